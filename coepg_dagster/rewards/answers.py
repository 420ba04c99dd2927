"""What a reward function may ask for: the answers to one step, and what they should have named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from coepg_dagster.plugins import NoPlugin, Plugin

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Answers:
    """B answers to one step, with M target boxes. All coordinates are pixels of the stored screenshot.

    A planner's answer names no place: its location is that of ϕ_k for its plan, where a grounder was queried.

    Args:
        areas: the located places (x1, y1, x2, y2), shape (B, 4); a point has both corners in one place, and NaN is none.
        boxes: shape (M, 4); M = 0: the action has no target.
        size: (width, height) of the screenshot.
        texts: the answers as generated.
        plans: their plans, empty where there is none.
        candidates: every place that an answer names, in its order, shapes (N_b, 2).
        references: plans of D_{k-1} that were verified for the step.
    """

    areas: Floats
    boxes: Floats
    size: tuple[float, float]
    texts: Sequence[str] = ()
    plans: Sequence[str] = ()
    candidates: Sequence[Floats] = ()
    references: Sequence[str] = ()

    @property
    def points(self) -> Floats:
        """The centres of `areas`, shape (B, 2)."""
        return (self.areas[:, :2] + self.areas[:, 2:]) / 2

    def scores(self, reward: Plugin, **settings: object) -> Floats:
        """The score of each answer by a reward function, shape (B,).

        A function that asks for places gets only the answers that name one; the others have its lowest score. Every answer has 0
        where the function asks for boxes and the step has none.

        Raises:
            ValueError: the function did not give one finite number for each answer, or one below its `lowest`.
        """
        if "boxes" in reward.inputs and not len(self.boxes):
            return np.zeros(len(self.areas))
        scores = np.full(len(self.areas), reward.lowest)
        asks_for_places = not PLACES.isdisjoint(reward.inputs)
        named = [row for row, area in enumerate(self.areas) if not (asks_for_places and np.isnan(area).any())]
        rows = np.array(named, dtype=np.int64)
        if not rows.size:
            return scores
        asked = [self._asked(name, rows) for name in reward.inputs]
        made = np.asarray(reward.function(*asked, **settings), dtype=np.float64)
        if made.shape != rows.shape or not np.all(np.isfinite(made)):
            raise ValueError(
                f"the reward {reward.name!r} gave {made.tolist()} for {rows.size} answers: it must give a finite number for each"
            )
        if made.min() < reward.lowest:
            raise ValueError(
                f"the reward {reward.name!r} gave {made.min():g}, below its lowest score {reward.lowest:g}: name the lowest that "
                "it can give where it is defined, as `@plugin(..., lowest=-1.0)`"
            )
        scores[rows] = made
        return scores

    def _asked(self, name: str, rows: npt.NDArray[np.int64]) -> object:
        value = getattr(self, name)
        if name not in OF_EACH:
            return value
        return value[rows] if isinstance(value, np.ndarray) else [value[row] for row in rows]


PLACES: Final = frozenset({"points", "areas"})
OF_EACH: Final = PLACES | {"texts", "plans", "candidates"}
OF_STEP: Final = frozenset({"boxes", "size", "references"})
OF_PLACE: Final = PLACES | {"boxes", "size"}
"""What a score of places may ask for."""


def refuse_inputs(chosen: Plugin, known: frozenset[str]) -> None:
    """Raises NoPlugin if a function's positional parameters are not among the `known` names."""
    unknown = [name for name in chosen.inputs if name not in known]
    if unknown:
        raise NoPlugin(
            f"the {chosen.kind} {chosen.name!r} asks for {', '.join(unknown)}; here it can have {', '.join(sorted(known))}"
        )
