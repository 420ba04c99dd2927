"""What a protocol judges (`Case`) and what it returns (`Verdict`).

Coordinates are pixels of the stored screenshot ("original" space) unless a protocol says that it converts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from coepg_dagster.evaluation.metrics import BoxTuple, Point
from coepg_dagster.refusal import Refusal


class ScoringError(Refusal, ValueError):
    """Predictions that cannot be scored; the message names file, row or step, and what to do."""


FARTHEST: Final = 1e9
"""Largest coordinate accepted, px: no screen is larger, and the protocols can compute with all up to it."""


def point_of(x: float, y: float) -> Point | None:
    """(x, y), or None where a coordinate is not finite or beyond FARTHEST."""
    # comparisons with NaN are false
    return (float(x), float(y)) if abs(x) <= FARTHEST and abs(y) <= FARTHEST else None


MOST_LISTED: Final = 10_000
"""Rows that a result lists by name."""
_FEW: Final = 5


@dataclass
class Rows:
    """Rows that have something in common: how many, and the names of the first MOST_LISTED; as text it names a few."""

    n: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        self.n += 1
        if len(self.names) < MOST_LISTED:
            self.names.append(name)

    def __str__(self) -> str:
        return f"{self.n} ({', '.join(self.names[:_FEW])}{', …' if self.n > _FEW else ''})"


Notes = dict[str, int | str | Rows]
"""What a reader of a file notices, for the notes of the result."""
NO_PREDICTION: Final = "rows without a prediction"
UNREADABLE: Final = "rows with an unreadable prediction"


UNPARSED: Final = "unparsed_answer"
"""Why a protocol skips a case for its answer; all other reasons are of the label."""
SEVERAL: Final = "\x1f"
"""Joins the classes of a fact of which a case has several: it counts in each of them."""
FILE_SAYS: Final = "file_says"
"""Fact: `correct` or `wrong`, as the file of predictions itself judges the row."""


# Action, Case and Verdict are made for every row of a file, and a frozen dataclass takes three times as long to make.
@dataclass(slots=True)
class Action:
    """A label or a predicted action. Web: CLICK, TYPE, SELECT. Mobile: the canonical names of `android_control`."""

    type: str
    value: str = ""
    point: Point | None = None


@dataclass(slots=True)
class Case:
    """One prediction beside its label."""

    step_id: str
    episode_id: str | None  # the task; None: the source names none, the step is its own task
    label: Action
    prediction: Action | None  # None: the answer could not be parsed, or is missing
    boxes: tuple[BoxTuple, ...] = ()  # every target box
    size: tuple[int, int] | None = None  # width, height of the stored screenshot
    seen_size: tuple[int, int] | None = None  # of the image that the model saw
    group: str = ""  # ScreenSpot's "mobile_text" and so on
    step_index: int | None = None
    episode_steps: int | None = None  # how many steps the task has in the source
    # NO_PREDICTION, or which part cannot be read; a file's result counts both
    lacks: str = field(default="", compare=False)
    padding: bool = False  # stands for a step that the source lost: always 0 / 0 / 0
    facts: Mapping[str, Any] = field(default_factory=dict)  # further input of single protocols, see their docstrings


@dataclass(frozen=True, slots=True)
class Unread:
    """A row of a file that cannot be read: it is counted by its reason and in no denominator."""

    where: str  # file and row
    reason: str  # what rows of its kind have in common
    detail: str


@dataclass(slots=True)
class Verdict:
    """One case's contribution to each metric of a protocol, in the order of `Protocol.metrics`.

    A value of None is outside that metric's denominator. `weights` differs from 1 only where an owner's script counts a
    hit without counting the attempt.
    """

    values: tuple[float | None, ...]
    skipped: str = ""  # why the case is in no denominator at all
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Protocol:
    """A named way to count. `judge` is pure; `finish` sees all verdicts, for rules that depend on the whole file."""

    name: str
    metrics: tuple[str, ...]
    judge: Callable[[Case], Verdict]
    element: str  # when the element, or point, is right
    text: str  # when value or text is right
    denominator: str  # which steps count
    averages: str  # what the owner prints
    source: str  # public code that defines it
    macro: Literal["episode", "group"] = "episode"
    groups: tuple[str, ...] = ()  # fixed groups of the macro average over groups
    group_of: Callable[[Case], str] = lambda case: case.label.type
    finish: Callable[[Sequence[Case], list[Verdict]], list[Verdict]] | None = None
    needs: str = ""  # what predictions must hold besides action and point
    groupings: tuple[
        str, ...
    ] = ()  # facts of a case, or several joined by " × ", over whose classes the owner averages
    items: int | None = None  # how many the published board has

    @property
    def description(self) -> str:
        return f"element: {self.element}; text: {self.text}; counted: {self.denominator}"


def more_than_few(n: int, of: int) -> bool:
    """Whether `n` of the `of` rows of a file, more than two and more than 1 %, are odd: then the file is, and not single rows."""
    return n > max(2, of // 100)


def skipped(reason: str) -> Verdict:
    """The verdict on a case that no metric counts: all three protocols that skip cases have three."""
    return Verdict((None,) * 3, reason)
