"""What every reader yields: steps, or rejects with file, row and reason.

Nothing is guessed: a row that breaks its format is left out and counted. Test splits stay complete: there a row is
left out only where no model could see it or its label cannot be read, and target boxes stay as they are (`target_boxes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from coepg_dagster import jsonlines
from coepg_dagster.prompts import ACTION_TYPES, MOBILE_ACTION_TYPES
from coepg_dagster.refusal import Refusal
from coepg_dagster.steps import STEP_SCHEMA

READER_SCHEMA: Final = pa.schema(
    [
        *STEP_SCHEMA,
        pa.field("point", pa.list_(pa.float32(), 2)),  # where the label acted, px of the screenshot (AndroidControl)
        pa.field("instruction", pa.string()),  # the step's own, for models to see (AndroidControl low level)
        pa.field("episode_steps", pa.int32()),  # how many steps the task has in the source, those left out included
        pa.field("view", pa.list_(pa.int32(), 4)),  # (x1, y1, x2, y2) of the screenshot in the source image; null: all
        pa.field("view_rule", pa.string()),  # how that was chosen, see `views`
    ]
)
"""STEP_SCHEMA and columns that only some sources have; who needs STEP_SCHEMA alone selects its columns."""

REJECT_SCHEMA: Final = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),
        # as the format counts: row, record or record/step, from 0; line, from 1
        pa.field("row", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),  # one of REASONS
        pa.field("detail", pa.string(), nullable=False),
        pa.field("split", pa.string()),  # null: not known, the row failed earlier
        pa.field("steps", pa.int32(), nullable=False),  # how many steps the row holds
    ]
)

REASONS: Final[Mapping[str, str]] = {
    "no_screenshot": "the screenshot is null",
    "bad_image": "the screenshot cannot be decoded, or is cut short",
    "image_too_large": "the screenshot has more pixels than are ever decoded, or its file more bytes than are read",
    "extreme_aspect": "no model sees a screenshot of that shape",
    "too_long": "the texts and boxes of a step are longer than what any model reads",
    "bad_candidates": "candidates are malformed",
    "box_outside_image": "a target box does not lie in the image",
    "box_without_area": "a target box has no area",
    "missing_column": "a column or field is missing",
    "bad_field": "a field has another type or value than the format says",
    "bad_json": "invalid JSON, or no UTF-8 text",
    "bad_path": "an image path leaves the data folder, or is not there",
    "unknown_action": "the action type is none of the format's",
    "duplicate_id": "the id came before",
    "lengths_differ": "arrays of one record differ in length",
    "truncated_record": "the file ends within a record",
    "bad_checksum": "a record does not have its checksum",
    "bad_file": "the file is not of its format",
    "not_in_splits": "the episode is in no split",
    "missing_target": "the action needs a target box and the row has none (left out of training only)",
    "no_target": "no positive candidate, or no target box in any view (left out of training only)",
    "no_enclosing_node": "no clickable node contains the click (left out of training only)",
}
"""Why rows are left out."""
EXPECTED: Final = frozenset({"no_target", "no_enclosing_node"})
"""Reasons that are facts of the data and no sign of damage: they do not count towards the share of bad rows."""

TRAINED: Final = frozenset({"train", "validation"})
"""Splits from which rows without a target are left out. Test splits keep them: every protocol's denominator has them."""
UNKNOWN_SPLIT: Final = "unknown split"

ALL_ACTIONS: Final = frozenset(ACTION_TYPES) | frozenset(MOBILE_ACTION_TYPES) | {"SCROLL DOWN"}


class ReaderError(Refusal, ValueError):
    """An import that cannot go on; the message names the file and what to do."""


class RejectedRow(Exception):
    """Raised to leave out the row being converted. `reason` is a key of REASONS; `part_of` sets split and steps."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail
        self.split: str | None = None
        self.steps = 1

    def reject(self, file: str, row: str) -> Reject:
        return Reject(file, row, self.reason, self.detail, self.split, self.steps)


STRANGE: Final = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""Errors that a row of an unforeseen form raises. They cost that row only, and its reject names the error."""


def strange(error: Exception) -> RejectedRow:
    """The RejectedRow for an error of STRANGE."""
    return RejectedRow("bad_field", f"{type(error).__name__}: {error}")


@contextmanager
def part_of(split: str, steps: int = 1) -> Iterator[None]:
    """Rejections raised inside count as `steps` lost steps of `split`; errors of STRANGE become rejections."""
    try:
        yield
    except (RejectedRow, *STRANGE) as error:
        rejected = error if isinstance(error, RejectedRow) else strange(error)
        rejected.split, rejected.steps = split, steps
        raise rejected from error.__cause__


@contextmanager
def of_picture(name: str) -> Iterator[None]:
    """Rejections raised inside name the picture's file."""
    try:
        yield
    except RejectedRow as rejected:
        rejected.detail = f"{name!r}: {rejected.detail}"
        raise


@dataclass(frozen=True)
class Reject:
    file: str
    row: str
    reason: str
    detail: str
    split: str | None = None  # None: not known, the row failed earlier
    steps: int = 1


@dataclass(frozen=True)
class Step:
    """One row of READER_SCHEMA, and what was noticed about it (counted, not stored)."""

    values: dict[str, Any]
    noticed: tuple[str, ...] = ()
    row: str = ""  # where it comes from, as in `Reject`


Item = Step | Reject


_STORED: Final = [field for field in READER_SCHEMA if field.name != "screenshot"]
MAX_BYTES: Final = 1 << 18
"""Of the texts and boxes of a step: some 60,000 tokens, of which a hundredth is usual. One longer prompt would end all work."""


def assert_storable(values: Mapping[str, Any], fields: list[pa.Field] = _STORED) -> None:
    """Raises RejectedRow where READER_SCHEMA cannot hold a value (half a surrogate pair, a number that is too large), or a step
    takes more than MAX_BYTES beside its screenshot."""
    try:
        size = pa.array([values], pa.struct(fields)).nbytes
        if size > MAX_BYTES:
            raise RejectedRow("too_long", f"{size:,} bytes of texts and boxes; at most {MAX_BYTES:,} are read")
        if missing := [field.name for field in fields if not field.nullable and values[field.name] is None]:
            raise RejectedRow("bad_field", f"{missing[0]!r} is null")
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        if len(fields) > 1:  # to name the field that is to blame
            for field in fields:
                assert_storable({field.name: values.get(field.name)}, [field])
        text = isinstance(error, UnicodeEncodeError)
        why = "is no UTF-8 text, or holds half a surrogate pair" if text else f"cannot be stored ({error})"
        raise RejectedRow("bad_field", f"{fields[0].name!r} {why}") from error


def parse_json(text: object, what: str) -> Any:
    """`text` parsed as JSON; raises RejectedRow where it is invalid."""
    if not isinstance(text, str | bytes):
        raise RejectedRow("bad_field", f"{what} must be JSON text, not {type(text).__name__}")
    try:
        return jsonlines.parse(text)
    except jsonlines.NotJson as error:
        raise RejectedRow("bad_json", f"{what}: {error}") from error


def wanted(row: Mapping[str, Any], key: str, *types: type) -> Any:
    """The field, of one of `types` (a bool is never a number); raises RejectedRow otherwise."""
    if key not in row:
        raise RejectedRow("missing_column", f"{key!r} is missing")
    value = row[key]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise RejectedRow("bad_field", f"{key!r} must be {' or '.join(t.__name__ for t in types)}, not {value!r:.80}")
    return value


def numbers(value: object, n: int, what: str) -> tuple[float, ...]:
    """`value` as `n` finite numbers; raises RejectedRow where it is something else."""
    if isinstance(value, list | tuple) and len(value) == n:
        coordinates = tuple(float(v) for v in value if isinstance(v, int | float) and not isinstance(v, bool))
        if len(coordinates) == n and all(map(math.isfinite, coordinates)):
            return coordinates
    raise RejectedRow("bad_field", f"{what} must be {n} finite numbers, not {value!r:.80}")


MAX_STEPS: Final = 10_000
"""Largest position of a step in a task or a block on a page: evaluation pads tasks to their stated length."""


def position(value: object, what: str) -> int:
    """`value`, a whole number or its decimal digits, as a number from 0 to MAX_STEPS; raises RejectedRow otherwise."""
    digits = value if isinstance(value, str) else str(value) if type(value) is int else ""
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 10 and int(digits) <= MAX_STEPS):
        raise RejectedRow("bad_field", f"{what} must be a number from 0 to {MAX_STEPS}, not {value!r:.80}")
    return int(digits)


def texts(value: list[Any], what: str) -> list[str]:
    """`value`, a list of texts; raises RejectedRow where something else is in it."""
    for text in value:
        if not isinstance(text, str):
            raise RejectedRow("bad_field", f"{what} must be a list of texts, not of {text!r:.80}")
    return value


BoxTuple = tuple[float, float, float, float]
SLACK: Final = 1.0
"""Pixels by which a box may leave the image: browsers report fractions, images have whole pixels."""


def _fault(box: BoxTuple, size: tuple[int, int]) -> RejectedRow | None:
    x1, y1, x2, y2 = box
    if not (x2 > x1 and y2 > y1):
        return RejectedRow("box_without_area", f"box {box}")
    if x1 < -SLACK or y1 < -SLACK or x2 > size[0] + SLACK or y2 > size[1] + SLACK:
        return RejectedRow("box_outside_image", f"box {box} in an image of {size[0]} x {size[1]} px")
    return None


def checked_box(box: BoxTuple, size: tuple[int, int]) -> BoxTuple:
    """`box` (x1, y1, x2, y2), unchanged, if it has area and lies in an image of `size`; else raises RejectedRow."""
    if fault := _fault(box, size):
        raise fault
    return box


def attempted(read: Callable[[Any], BoxTuple], entries: Iterable[Any]) -> list[BoxTuple | RejectedRow]:
    """`read(entry)` of each entry, or the RejectedRow that it raised."""

    def attempt(entry: Any) -> BoxTuple | RejectedRow:
        try:
            return read(entry)
        except RejectedRow as rejected:
            return rejected

    return [attempt(entry) for entry in entries]


def target_boxes(
    candidates: Iterable[BoxTuple | RejectedRow], size: tuple[int, int], *, trained: bool
) -> tuple[list[BoxTuple], tuple[str, ...]]:
    """The distinct target boxes of a step, and the faults of its `candidates` (keys of REASONS), for counting.

    Boxes are (x1, y1, x2, y2) in pixels of an image of `size` (width, height). For training (`trained`) they are cut at
    the edge of the image, and those left without area are dropped; raises the first fault where no box is left. In a
    test split boxes stay as they are, as the owners of the protocols count them: no point hits what lies off the image.
    Only malformed boxes are dropped there.
    """
    width, height = size
    boxes, faults = list[BoxTuple](), list[RejectedRow]()
    for box in candidates:
        fault = box if isinstance(box, RejectedRow) else _fault(box, size)
        if not isinstance(box, RejectedRow) and all(map(math.isfinite, box)):
            x1, y1, x2, y2 = box
            if trained:
                x1, y1, x2, y2 = max(x1, 0.0), max(y1, 0.0), min(x2, float(width)), min(y2, float(height))
                if x1 < x2 and y1 < y2:
                    boxes.append((x1, y1, x2, y2))
                else:
                    fault = fault or RejectedRow("box_outside_image", f"box {box} on the edge of {width} x {height} px")
            elif x1 <= x2 and y1 <= y2:
                boxes.append(box)
        if fault:
            faults.append(fault)
    if faults and not boxes and trained:
        raise faults[0]
    return list(dict.fromkeys(boxes)), tuple(dict.fromkeys(fault.reason for fault in faults))


def checked_point(point: tuple[float, ...], size: tuple[int, int]) -> tuple[float, float]:
    """`point` (x, y), unchanged, if it lies in an image of `size`; raises RejectedRow otherwise."""
    x, y = point
    if not (-SLACK <= x <= size[0] + SLACK and -SLACK <= y <= size[1] + SLACK):
        raise RejectedRow("bad_field", f"point {point} lies outside the image of {size[0]} x {size[1]} px")
    return x, y
