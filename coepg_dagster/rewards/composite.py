"""A reward made of the plug-ins that an experiment names: a score of places, terms, and a combiner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from coepg_dagster.plugins import NoPlugin, find, settings_of
from coepg_dagster.rewards import combiners, terms
from coepg_dagster.rewards.answers import OF_EACH, OF_PLACE, OF_STEP, Answers, Floats, refuse_inputs
from coepg_dagster.rewards.cdrem import ValueMode, type_reward, value_reward
from coepg_dagster.rewards.gate import PlannedAction

Choice = Mapping[str, Any]
"""A plug-in with all its settings: {"name": …, settings…}."""

Role = Literal["planner", "grounder"]

CAN_ASK: Final[Mapping[Role, tuple[frozenset[str], frozenset[str]]]] = {
    # the grounders that reward a planner are read as points, and a planner's own answer names no place
    "planner": (OF_PLACE - {"areas"}, OF_EACH - {"candidates"} | OF_STEP),
    "grounder": (OF_PLACE | {"candidates"}, OF_EACH - {"plans"} | OF_PLACE),
}
"""Whose answers are rewarded → what a score of places may ask for, and what a term may ask for."""


def parts_of(
    answer: PlannedAction | None, action_type: str, value: str, value_mode: ValueMode = "f1"
) -> tuple[float, float, float]:
    """(parsed, type, value) of an answer, each 0 or 1, given the label's type and value (Eq. 7, 8)."""
    if answer is None:
        return 0.0, 0.0, 0.0
    return 1.0, type_reward(answer.action_type, action_type), value_reward(answer.value, value, value_mode)


@dataclass(frozen=True)
class Composite:
    """The reward of an experiment: combiner(parsed, type, value, point, terms) + Σ weight · term.

    Args:
        point_score: what takes the place of Acc_j in Eq. 4, or scores an answer's own place.
        terms: name → settings of a reward function, and its `weight`; with weight 0 it is recorded, or used by the combiner.
        combiner: by default the gate of Eq. 9.
    """

    point_score: Choice = field(default_factory=lambda: {"name": terms.hit.__name__})
    terms: Mapping[str, Choice] = field(default_factory=dict)
    combiner: Choice = field(default_factory=lambda: {"name": combiners.gate.__name__})

    @property
    def plain(self) -> bool:
        """Whether it is Eq. 9 with some score of places, so that the weights of the votes decide all of it."""
        return not self.terms and self.combiner["name"] == combiners.gate.__name__

    def refuse(self, role: Role) -> None:
        """Raises NoPlugin for combinations that cannot work, or are known to be hacked. `role` is whose answers are rewarded."""
        score, about = CAN_ASK[role]
        refuse_inputs(find("reward", self.point_score["name"]), score)
        for name in self.terms:
            refuse_inputs(find("reward", name), about)
        combiner = find("combiner", self.combiner["name"])
        refuse_inputs(combiner, frozenset(combiners.PARTS) | set(self.terms))
        if self.terms.get(terms.hyperclick.__name__, {}).get("weight") and not self._rewards_right_places():
            raise NoPlugin(
                "the term 'hyperclick' alone is hacked by a low confidence: use a combiner that rewards right points too"
            )

    def _rewards_right_places(self) -> bool:
        ones = np.ones(1)
        return bool(self._combined(ones, ones, ones, ones)[0] > self._combined(ones, ones, ones, 0 * ones)[0])

    def point_scores(self, answers: Answers) -> Floats:
        """s of each answer's place, shape (B,)."""
        return answers.scores(find("reward", self.point_score["name"]), **settings_of(self.point_score))

    def term_scores(self, answers: Answers) -> dict[str, Floats]:
        """Term → its score of each of the B answers to one step, shape (B,)."""
        return {
            name: answers.scores(find("reward", name), **settings_of(chosen, "weight"))
            for name, chosen in self.terms.items()
        }

    def needs_point(self, parsed: Floats, type: Floats, value: Floats) -> npt.NDArray[np.bool_]:
        """Whether an answer's point decides anything of its reward, shape (B,). By Eq. 9: if the answer passes the gate."""
        low = self._combined(parsed, type, value, np.zeros_like(parsed))
        high = self._combined(parsed, type, value, np.ones_like(parsed))
        decides: npt.NDArray[np.bool_] = np.logical_and(parsed > 0, low != high)
        return decides

    def combine(
        self, parsed: Floats, type: Floats, value: Floats, point: Floats, term_scores: Mapping[str, Floats]
    ) -> Floats:
        """The reward of each answer, shape (B,), from its parts and terms, shape (B,) each."""
        reward = self._combined(parsed, type, value, point, term_scores)
        for name, chosen in self.terms.items():
            reward = reward + chosen["weight"] * term_scores[name]
        return reward

    def _combined(
        self,
        parsed: Floats,
        type: Floats,
        value: Floats,
        point: Floats,
        term_scores: Mapping[str, Floats] | None = None,
    ) -> Floats:
        combiner = find("combiner", self.combiner["name"])
        given: dict[str, Floats] = dict(zip(combiners.PARTS, (parsed, type, value, point), strict=True))
        given |= term_scores or {name: np.zeros_like(parsed) for name in self.terms}
        made = combiner.function(*(given[name] for name in combiner.inputs), **settings_of(self.combiner))
        reward = np.asarray(made, dtype=np.float64)
        if reward.shape != parsed.shape or not np.all(np.isfinite(reward)):
            raise ValueError(f"the combiner {combiner.name!r} gave no finite number for each of {len(parsed)} answers")
        return reward
