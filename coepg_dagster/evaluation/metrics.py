"""F1 of action strings, as each public evaluation computes it, and the point tests.

Every function is pure; strings in, a fraction out. Each docstring names its source.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable

Point = tuple[float, float]
"""(x, y) in pixels of the stored screenshot, unless a docstring says otherwise."""
BoxTuple = tuple[float, float, float, float]
"""(x1, y1, x2, y2), same space as the point that it is tested with."""


def corners_in_order(box: BoxTuple) -> BoxTuple:
    """The same box, with its upper left corner first."""
    x1, y1, x2, y2 = box
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def set_f1(predicted: set[str], label: set[str]) -> float:
    """F1 over sets: both empty 1, one empty 0 (Mind2Web `calculate_f1`, whose rounding it keeps)."""
    if not predicted and not label:
        return 1.0
    hits = len(predicted & label)
    if hits == 0:
        return 0.0
    precision, recall = hits / len(predicted), hits / len(label)
    return 2 * precision * recall / (precision + recall)


def operation_f1(predicted: str, label: str, *, lowercase: bool = False, drop_punctuation: bool = False) -> float:
    """Op.F1 of Mind2Web: F1 over the sets of blank-separated tokens of "OP value".

    `lowercase` and `drop_punctuation` are UGround's; the latter drops a token that is a substring of the punctuation
    alphabet ("-" goes, "a," stays). "TYPE x" against "TYPE y" is 0.5.
    """
    if lowercase:
        predicted, label = predicted.lower(), label.lower()
    sides = [set(text.split()) for text in (predicted, label)]
    if drop_punctuation:
        sides = [{token for token in side if token not in string.punctuation} for side in sides]
    return set_f1(*sides)


def token_f1(predicted: str, label: str) -> float:
    """F1 over lower-cased token sets, 0 where either side is empty (OS-Atlas and UI-Genie `calculate_f1_score`)."""
    a, b = set(predicted.lower().split()), set(label.lower().split())
    return set_f1(a, b) if a and b else 0.0


def gui_r1_f1(predicted: str, label: str) -> float:
    """GUI-R1's F1: without brackets, as `token_f1`; one token on each side counts 1 if either contains the other.

    Both sides empty give 0, so this must not be applied to clicks. Source: GUI-R1 `calculate_f1_score`.
    """
    a, b = (set(text.replace("[", "").replace("]", "").lower().split()) for text in (predicted, label))
    if len(a) == 1 and len(b) == 1:
        (one,), (other,) = a, b
        if one in other or other in one:
            return 1.0
    return set_f1(a, b) if a and b else 0.0


def value_f1(predicted: str, label: str) -> float:
    """`gui_r1_f1` without the containment rule; two empty values agree (1), one empty does not (0)."""
    a, b = (set(text.replace("[", "").replace("]", "").lower().split()) for text in (predicted, label))
    return set_f1(a, b)


def contains_either(a: str, b: str) -> bool:
    """Whether one is a substring of the other; the empty string is one of every string."""
    return a in b or b in a


def inside(point: Point, box: BoxTuple) -> bool:
    """Whether the point is in the box, borders included."""
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


def strictly_inside(point: Point, box: BoxTuple) -> bool:
    """Whether the point is in the box, borders excluded."""
    return box[0] < point[0] < box[2] and box[1] < point[1] < box[3]


def inside_any(point: Point, boxes: Iterable[BoxTuple]) -> bool:
    x, y = point
    for x1, y1, x2, y2 in boxes:  # noqa: SIM110 - runs for every row of a file, and any() takes twice as long
        if x1 <= x <= x2 and y1 <= y <= y2:
            return True
    return False


def direction(start: Point, end: Point) -> str:
    """left, right, up or down: along the axis on which the two differ more; up or down where both differ as much."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    if abs(dx) > abs(dy):
        return "right" if dx > 0 else "left"
    return "down" if dy > 0 else "up"


def distance(a: Point, b: Point) -> float:
    return math.hypot(a[0] - b[0], a[1] - b[1])
