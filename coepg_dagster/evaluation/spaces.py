"""Is a file of points in pixels, as its format says, or could it as well be in another space?

A file that fits two spaces is refused with what it scores in both: the space is never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coepg_dagster.evaluation.case import Case, ScoringError
from coepg_dagster.evaluation.metrics import BoxTuple, Point, inside_any
from coepg_dagster.geometry import Space

MANY: Final = 20
"""Targets beyond 1000 px that points up to 1000 would all have to miss."""


@dataclass
class _Reading:
    """Whether points that should be pixels could all be in another space; and what they score in both."""

    space: Space
    name: str
    side: float  # what the width or height of a screen is in that space
    fits: bool = True
    points: int = 0
    as_pixels: int = 0
    as_other: int = 0
    known: bool = True  # every point can be read in the other space

    def add(self, fits: bool, point: Point, case: Case) -> None:
        self.fits = self.fits and fits
        self.points += 1
        self.as_pixels += inside_any(point, case.boxes)
        if case.size is not None:
            place = point[0] * case.size[0] / self.side, point[1] * case.size[1] / self.side
            self.as_other += inside_any(place, case.boxes)
        elif any(point):
            self.known = False
        else:
            self.as_other += inside_any(point, case.boxes)

    def error(self, where: str, remedy: str) -> ScoringError:
        other = f"{self.as_other} of them are right" if self.known else "the rows lack the `img_size` that this needs"
        return ScoringError(
            f"{where}: all {self.points} points fit two spaces: read as pixels {self.as_pixels} of them are right, read as "
            f"{self.name} {other}; {remedy}"
        )


class Readings:
    """The points of a file, which should be pixels of the stored screenshot, read as other spaces too.

    A point that equals the raw answer may be unconverted (0..1000). Without raw answers it looks so if no point is beyond 1000
    though MANY targets are, and more are hit when it is read so.
    """

    def __init__(self) -> None:
        self._parts = _Reading(Space.UNIT, "parts of the screen (0..1)", 1.0)
        self._thousandths = _Reading(Space.NORM_1000, "thousandths of the screen (0..1000)", 1000.0)
        self._unconverted, self._beyond = True, 0

    def add(self, case: Case, raw: Point | None = None) -> None:
        """Takes a case whose point is read as pixels; `raw` is the point in the model's answer as it stands there."""
        if not (self._parts.fits or self._thousandths.fits):
            return
        point = case.prediction.point if case.prediction else None
        target = _far_corner(case.boxes) or case.label.point
        if point is None or target is None:
            return
        x, y = point
        if self._parts.fits:
            # labels in 0..1 share the space of such points, whatever it is called
            self._parts.add(0 <= x <= 1 and 0 <= y <= 1 and max(target) > 1, point, case)
        if self._thousandths.fits:
            self._thousandths.add(0 <= x <= 1000 and 0 <= y <= 1000 and case.size != (1000, 1000), point, case)
            self._unconverted = self._unconverted and raw == point
            self._beyond += any(box[0] > 1000 or box[1] > 1000 for box in case.boxes)

    def check(self, where: str, remedy: str) -> None:
        """Raises ScoringError where all points fit two spaces and the readings differ; it ends with the `remedy`."""
        parts, thousandths = self._parts, self._thousandths
        if parts.fits and parts.points and not (parts.known and parts.as_pixels == parts.as_other):
            raise parts.error(where, remedy)
        if not thousandths.fits or not thousandths.points:
            return
        differ = not thousandths.known or thousandths.as_pixels != thousandths.as_other
        better = thousandths.known and thousandths.as_other > thousandths.as_pixels
        if (self._unconverted and differ) or (self._beyond >= MANY and better):
            raise thousandths.error(where, remedy)


def _far_corner(boxes: tuple[BoxTuple, ...]) -> Point | None:
    """The largest x and y of boxes; None where there is none, or all are at (0, 0)."""
    if not boxes:
        return None
    far = max(box[2] for box in boxes), max(box[3] for box in boxes)
    return far if any(far) else None
