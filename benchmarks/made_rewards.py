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
    """Seconds of each optimizer step and of its rewards, and the most memory until then (GB), in a file after each step."""

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
        memory = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
        self.steps.append({"seconds": now - self._ended, "rewards": self._rewards, "memory_gb": memory})
        self._ended = now
        print(f"step {len(self.steps)}: {json.dumps(self.steps[-1])}", flush=True)
        with whole(self._file) as draft:
            draft.write_text(json.dumps({**self._about, "steps": self.steps}))

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


class Made:
    """A reward function for TRL that puts made plans in place of completions; `rewards` has one for each step.

    In the first step plain rewards grade one plan alone.
    """

    __name__ = "made"

    def __init__(self, rewards: Sequence[plain.PlainReward], clock: Steps) -> None:
        self._rewards, self._clock = rewards, clock

    def __call__(self, completions: Sequence[Any], step_id: Sequence[str], **_: Any) -> list[float]:
        return self.score([plain.text_of(completion) for completion in completions], step_id)

    def score(self, texts: Sequence[str], step_ids: Sequence[str]) -> list[float]:
        made, done = sized.made_answers(texts, step_ids), len(self._clock.steps)
        reward = self._rewards[done]
        if not done and type(reward) is plain.PlainReward:
            made = made[:1]
        rewards = self._clock.rewarded(lambda: reward.score(made, step_ids[: len(made)]))
        return rewards + [0.0] * (len(texts) - len(made))


def rows_of(size: sized.Size, rows: int) -> tuple[pa.Table, pa.Table]:
    """(steps, dataset), the same in every way: each step has its own screenshot."""
    return sized.tables(size, rows, screens=rows)


def names_of(graders: int) -> list[str]:
    return [f"grader_{i}" for i in range(graders)]


def made_reward(
    kind: type[plain.PlainReward],
    checkpoint: str,
    graders: Sequence[int],
    size: sized.Size,
    steps: pa.Table,
    clock: Steps,
) -> Made:
    """The reward of so many graders in each optimizer step, each loaded from the same checkpoint."""
    device, dtype = sized.placed(size)
    grounders = {name: plain.PlainGrounder(checkpoint, POINT_TOKENS, device, dtype) for name in names_of(max(graders))}
    rewards = {
        n: kind({name: grounders[name] for name in names_of(n)}, dict.fromkeys(names_of(n), 1.0), steps)
        for n in graders
    }
    return Made([rewards[n] for n in graders], clock)
