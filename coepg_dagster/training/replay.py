"""ARPO's experience replay (arXiv 2505.16282): stored successes for groups of GRPO that have none.

A group whose rewards are low and alike teaches nothing. Its first answer is replaced by an earlier success on the same prompt,
if there is one, before advantages are computed. A success keeps the log-probabilities of the policy that sampled it, so that
the ratio of the loss is that of the present policy to the one that wrote the answer: with present ones in their place the ratio
would be 1, as if the present policy had sampled it, and the clip of the loss could not see how far the policy has moved.

A buffer lives as long as one training, in which the graders stay the same; its successes would mean nothing to other graders.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from coepg_dagster.artifacts import whole
from coepg_dagster.rewards.answers import Floats

FILE: Final = "replay.json"
"""A buffer, within a checkpoint of training."""

Prompt = tuple[str, str | None]
"""A prompt: its step, and a grounder's plan."""


@dataclass(frozen=True)
class Success:
    """An answer that was rewarded.

    Args:
        tokens: with the one that ends it.
        logprobs: log-probability of each token when it was sampled, nats; NaN: unknown.
        sampled_in: the optimizer step.
    """

    tokens: list[int]
    logprobs: list[float]
    sampled_in: int


class ReplayBuffer:
    """The last `size` answers to each prompt whose reward is above `success`, first in, first out.

    Args:
        size: successes kept for each prompt.
        success: the reward above which an answer is one.
        below_mean, below_std: a group is low and alike if mean and standard deviation (N) of its rewards are below these.
    """

    def __init__(self, size: int, success: float, below_mean: float, below_std: float) -> None:
        self._size, self._success = size, success
        self._below_mean, self._below_std = below_mean, below_std
        self._kept: dict[Prompt, list[Success]] = {}

    def wants(self, rewards: Floats) -> npt.NDArray[np.bool_]:
        """Whether each of P groups gets an earlier success, shape (P,); `rewards` has the shape (P, G).

        >>> ReplayBuffer(8, 0.1, 0.2, 0.05).wants(np.array([[0.0, 0, 0], [0.1, 0.1, 0.1], [0, 0, 0.5], [1, 1, 1]]))
        array([ True,  True, False, False])
        """
        low: npt.NDArray[np.bool_] = rewards.mean(axis=1) < self._below_mean
        alike: npt.NDArray[np.bool_] = rewards.std(axis=1) < self._below_std
        return low & alike

    def draw(self, asked: Prompt, *seed: int) -> Success | None:
        """One of the successes on a prompt, drawn by `seed` alone; None: there is none."""
        kept = self._kept.get(asked, [])
        return kept[int(np.random.default_rng(seed).integers(len(kept)))] if kept else None

    def add(self, asked: Prompt, answers: Sequence[Success], rewards: Sequence[float]) -> None:
        """Keeps those of `answers` to a prompt that are successes."""
        new = [answer for answer, reward in zip(answers, rewards, strict=True) if reward > self._success]
        if new:
            self._kept[asked] = [*self._kept.get(asked, []), *new][-self._size :]

    def save(self, folder: Path) -> None:
        """Writes FILE in a folder."""
        kept = [
            {"step_id": step_id, "plan": plan, "successes": [asdict(success) for success in successes]}
            for (step_id, plan), successes in self._kept.items()
        ]
        with whole(folder / FILE) as draft:
            draft.write_text(json.dumps(kept), "utf-8")

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote."""
        self._kept = {
            (row["step_id"], row["plan"]): [Success(**success) for success in row["successes"]]
            for row in json.loads((folder / FILE).read_text("utf-8"))
        }
