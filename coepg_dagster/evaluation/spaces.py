"""Is a file of points in pixels, as its format says, or could it as well be in another space?

A file that fits two spaces is refused with what it scores in both: the space is never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coepg_dagster.evaluation.android_control import within_14_percent
from coepg_dagster.evaluation.case import Case, ScoringError, more_than_few
from coepg_dagster.evaluation.metrics import BoxTuple, Point, inside_any
from coepg_dagster.geometry import Space

Boxes = tuple[BoxTuple, ...]

MANY: Final = 20
"""Targets beyond 1000 px that points up to 1000 would all have to miss."""
_PER_OUTLIER: Final = 10
"""Of such targets, for each point beyond 1000."""


def _nearly_all(n: int, of: int) -> bool:
    """Whether at most 1 % are otherwise, or one of MANY: a single odd answer says nothing about the space of a file."""
    return n > 0 and of - n <= max(of // 100, int(of >= MANY))


@dataclass
class _Reading:
    """How many points that should be pixels could be in another space; and what these score in both.

    A reading is right in a box, or within 14 % of the screen of the labelled point.
    """

    space: Space
    name: str
    side: float  # what the width or height of a screen is in that space
    points: int = 0
    fitting: int = 0
    as_pixels: int = 0
    as_other: int = 0
    known: bool = True  # every point can be read in the other space
    moves: bool = False  # some point is elsewhere in the other space

    def add(self, fits: bool, point: Point, case: Case, boxes: Boxes, labelled: Point | None) -> None:
        self.points += 1
        if not fits:
            return
        self.fitting += 1
        self.moves = self.moves or any(point)
        self.known = self.known and not (case.size is None and any(point))
        width, height = case.size or (0, 0)
        place = point[0] * width / self.side, point[1] * height / self.side
        self.as_pixels += _right(point, case, boxes, labelled)
        self.as_other += _right(place, case, boxes, labelled)

    @property
    def suspect(self) -> bool:
        return _nearly_all(self.fitting, self.points)

    @property
    def differ(self) -> bool:
        return not self.known or self.as_pixels != self.as_other

    def error(self, where: str, remedy: str) -> ScoringError:
        right = "of them are right"
        other = f"{self.as_other} {right}" if self.known else "the rows lack the `img_size` (`width`, `height`) for it"
        which = f"all {self.points}" if self.fitting == self.points else f"{self.fitting} of {self.points}"
        return ScoringError(
            f"{where}: {which} points fit two spaces: read as pixels {self.as_pixels} {right}, read as {self.name} {other}; "
            f"{remedy}"
        )


class Readings:
    """The points of a file, which should be pixels of the stored screenshot, read as other spaces too.

    A point that equals the raw answer may be unconverted (0..1000). Without raw answers points look so if nearly none is beyond
    1000 though MANY targets are, and more are hit when they are read so (or the rows lack the size to tell). A point with a
    negative coordinate is on no screen in any space and does not count.
    """

    def __init__(self) -> None:
        self._parts = _Reading(Space.UNIT, "parts of the screen (0..1)", 1.0)
        self._thousandths = _Reading(Space.NORM_1000, "thousandths of the screen (0..1000)", 1000.0)
        self._unconverted, self._beyond = 0, 0
        self._raw, self._raw_beyond, self._raw_parts = 0, 0, 0
        self._all, self._labels_in_parts = 0, 0

    def add(self, case: Case, raw: Point | None = None, *, stated: bool = False) -> None:
        """Takes a case whose points are read as pixels.

        Args:
            raw: the point in the model's answer as it stands there.
            stated: whether the space of the prediction was stated, so that only its label's may be another.
        """
        for point, boxes, labelled in _places(case):
            target = _far_corner(boxes) or labelled
            if point is None or target is None or min(point) < 0:
                continue
            self._all += 1
            self._labels_in_parts += max(target) <= 1 < max(point) and any(0 < value < 1 for value in target)
            if stated:
                continue
            # labels in 0..1 share the space of such points, whatever it is called
            self._parts.add(max(point) <= 1 < max(target), point, case, boxes, labelled)
            if case.size != (1000, 1000):
                self._thousandths.add(max(point) <= 1000, point, case, boxes, labelled)
                self._unconverted += raw == point
                if max(target) > 1000:
                    self._beyond += min((max(box[:2]) for box in boxes), default=max(target)) > 1000

    def add_thousandths(self, raw: Point) -> None:
        """Takes a raw answer that counts as the prediction, in 0..1000 since nothing says otherwise."""
        if min(raw) >= 0:
            self._raw += 1
            self._raw_beyond += max(raw) > 1000
            self._raw_parts += 0 < max(raw) <= 1

    def check(self, where: str, remedy: str) -> None:
        """Raises ScoringError where points fit two spaces and the readings differ, or raw answers are no thousandths.

        It ends with the `remedy`. Also where labels are in 0..1 and predictions in pixels, which would all be wrong.
        """
        if _nearly_all(self._labels_in_parts, self._all):
            raise ScoringError(
                f"{where}: {self._labels_in_parts} of {self._all} labels are in 0..1, and their predictions are beyond it: "
                "convert the boxes and points of the labels to pixels of the stored screenshot"
            )
        for n, place in ((self._raw_beyond, "beyond 1000"), (self._raw_parts, "in 0..1")):
            # a few of many are the model's fault
            if n and (n == self._raw or more_than_few(n, self._raw)):
                raise ScoringError(
                    f"{where}: the raw answers count, which are read as 0..1000, but {n} of {self._raw} are {place}; {remedy}"
                )
        parts, thousandths = self._parts, self._thousandths
        if parts.suspect and parts.moves:
            raise parts.error(where, remedy)
        better = not thousandths.known or thousandths.as_other > thousandths.as_pixels
        missed = self._beyond >= max(MANY, _PER_OUTLIER * (thousandths.points - thousandths.fitting))
        unconverted = _nearly_all(self._unconverted, thousandths.points)
        if thousandths.suspect and ((unconverted and thousandths.differ) or (missed and better)):
            raise thousandths.error(where, remedy)


def _right(point: Point, case: Case, boxes: Boxes, labelled: Point | None) -> bool:
    near = labelled is not None and case.size is not None and within_14_percent(point, labelled, case.size)
    return near or inside_any(point, boxes)


def _places(case: Case) -> Sequence[tuple[Point | None, Boxes, Point | None]]:
    """Each predicted point of a case, with the boxes and the point of its label."""
    if case.prediction is None:
        return ()
    if "predicted_actions" in case.facts:
        return [
            (mine.point, (true.box,) if true.box else () if true.point else case.boxes, true.point)
            for mine, true in zip(case.facts["predicted_actions"], case.facts.get("label_actions", ()), strict=False)
        ]
    point, box = case.prediction.point, case.facts.get("predicted_box")
    if box is not None:
        point = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    return ((point, case.boxes, case.label.point),)


def _far_corner(boxes: Boxes) -> Point | None:
    """The largest x and y of boxes; None where there is none, or all are at (0, 0)."""
    if not boxes:
        return None
    far = max(box[2] for box in boxes), max(box[3] for box in boxes)
    return far if any(far) else None
