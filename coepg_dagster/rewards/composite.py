"""A reward made of the plug-ins that an experiment names: a score of places, terms, and a combiner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
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

    A combiner gives what has no right to the point 0, as by Eq. 9. So that this is never more than a point earns, it gets a
    point score that goes below 0 as the part above its lowest, which is added again: combiner(…, point - lowest, …) + lowest.

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
            term = find("reward", name)
            refuse_inputs(term, about)
            if self.terms[name]["weight"] < 0 and set(term.inputs) & (OF_EACH - {"texts"}):
                raise NoPlugin(
                    f"terms: {name} gives an answer that cannot be read its lowest score, which a negative weight would make the "
                    "best: give a weight of 0 or more"
                )
        combiner = find("combiner", self.combiner["name"])
        refuse_inputs(combiner, frozenset(combiners.PARTS) | set(self.terms))
        if self.terms.get(terms.hyperclick.__name__, {}).get("weight") and not self._rewards_right_places():
            raise NoPlugin(
                "the term 'hyperclick' alone is hacked by a low confidence: use a combiner that rewards right points too"
            )

    def _rewards_right_places(self) -> bool:
        ones = np.ones(1)
        return any(high[0] > low[0] for low, high in self._at_both_ends(ones, ones, ones))

    @property
    def lowest_point(self) -> float:
        """The lowest score of a place."""
        return find("reward", self.point_score["name"]).lowest

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
        """Whether an answer's point decides anything of its reward, shape (B,). By Eq. 9: if the answer passes the gate.

        Terms that the combiner reads are not known yet: it is asked with each at both of its ends.
        """
        decides = np.zeros(len(parsed), dtype=bool)
        for low, high in self._at_both_ends(parsed, type, value):
            decides |= low != high
        return decides & (parsed > 0)

    @property
    def lowest(self) -> float:
        """The lowest reward that there can be, with scores from the lowest of each to 1."""
        parsed, types, values = np.array(list(product((0.0, 1.0), repeat=3))).T
        combined = [low_or_high.min() for ends in self._at_both_ends(parsed, types, values) for low_or_high in ends]
        weighted = [(chosen["weight"], find("reward", name).lowest) for name, chosen in self.terms.items()]
        return float(min(combined) + sum(min(weight, weight * lowest) for weight, lowest in weighted))

    def _at_both_ends(self, parsed: Floats, type: Floats, value: Floats) -> Iterator[tuple[Floats, Floats]]:
        """What the combiner gives with the lowest point and with a point of 1, for each choice of its terms' ends."""
        read = [name for name in self.terms if name in find("combiner", self.combiner["name"]).inputs]
        for ends in product(*((find("reward", name).lowest, 1.0) for name in read)):
            of_terms = {name: np.full_like(parsed, end) for name, end in zip(read, ends, strict=True)}
            low, high = (
                self._combined(parsed, type, value, np.full_like(parsed, point), of_terms)
                for point in (self.lowest_point, 1.0)
            )
            yield low, high

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
        term_scores: Mapping[str, Floats],
    ) -> Floats:
        combiner = find("combiner", self.combiner["name"])
        above = point - self.lowest_point
        given: dict[str, Floats] = dict(zip(combiners.PARTS, (parsed, type, value, above), strict=True))
        given |= term_scores
        made = combiner.function(*(given[name] for name in combiner.inputs), **settings_of(self.combiner))
        reward = np.asarray(made, dtype=np.float64)
        if reward.shape != parsed.shape or not np.all(np.isfinite(reward)):
            raise ValueError(f"the combiner {combiner.name!r} gave no finite number for each of {len(parsed)} answers")
        return reward + self.lowest_point
