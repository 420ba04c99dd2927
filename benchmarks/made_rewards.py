"""What the ways of `benchmarks.grpo_samples` share: seconds of whole optimizer steps, and rewards of made plans.

Imported in MS-SWIFT's environment too, with another TRL than ours.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import torch
from transformers import TrainerCallback

from benchmarks import plain, sized
from coepg_dagster.artifacts import whole

POINT_TOKENS: Final = 12


class Steps(TrainerCallback):  # type: ignore[misc]
    """Seconds of each optimizer step, and of its rewards; written to a file after each step."""

    def __init__(self, file: Path, about: Mapping[str, Any]) -> None:
        self._file, self._about = file, about
        self._ended = 0.0
        self._rewards = 0.0
        self.steps: list[dict[str, float]] = []

    def rewarded(self, function: Callable[[], list[float]]) -> list[float]:
        """The result of `function`, whose time is that of the rewards of the running step."""
        began = self._now()
        rewards = function()
        self._rewards = self._now() - began
        return rewards

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._ended = self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = self._now()
        self.steps.append({"seconds": now - self._ended, "rewards": self._rewards})
        self._ended = now
        memory = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
        print(f"step {len(self.steps)}: {json.dumps(self.steps[-1])}, {memory:.1f} GB", flush=True)
        with whole(self._file) as draft:
            draft.write_text(json.dumps({**self._about, "steps": self.steps, "memory_gb": memory}))

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


class Made:
    """A reward function for TRL that puts made plans in place of completions; in the first step it rewards one group alone."""

    __name__ = "made"

    def __init__(self, reward: plain.PlainReward, clock: Steps, group: int) -> None:
        self._reward, self._clock, self._group = reward, clock, group

    def __call__(self, completions: Sequence[Any], step_id: Sequence[str], **_: Any) -> list[float]:
        return self.score([plain.text_of(completion) for completion in completions], step_id)

    def score(self, texts: Sequence[str], step_ids: Sequence[str]) -> list[float]:
        made = sized.made_answers(texts, step_ids)
        if not self._clock.steps and type(self._reward) is plain.PlainReward:
            made = made[: self._group]
        rewards = self._clock.rewarded(lambda: self._reward.score(made, step_ids[: len(made)]))
        return rewards + [0.0] * (len(texts) - len(made))


def rows_of(size: sized.Size, rows: int) -> tuple[pa.Table, pa.Table]:
    """(steps, dataset), the same in every way: each step has its own screenshot."""
    return sized.tables(size, rows, screens=rows)


def names_of(graders: int) -> list[str]:
    return [f"grader_{i}" for i in range(graders)]


def made_reward(
    kind: type[plain.PlainReward],
    checkpoint: str,
    graders: int,
    size: sized.Size,
    steps: pa.Table,
    clock: Steps,
    group: int,
) -> Made:
    """The reward of so many graders, each loaded from the same checkpoint."""
    device, dtype = sized.placed(size)
    names = names_of(graders)
    grounders = {name: plain.PlainGrounder(checkpoint, POINT_TOKENS, device, dtype) for name in names}
    return Made(kind(grounders, dict.fromkeys(names, 1.0), steps), clock, group)
