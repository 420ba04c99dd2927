"""What every reader gives: steps, or rows left out with a reason that names file and row.

Nothing is clamped or guessed: a row that is not as its format says is left out, and counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from coepg_dagster.prompts import ACTION_TYPES
from coepg_dagster.refusal import Refusal
from coepg_dagster.steps import STEP_SCHEMA

READER_SCHEMA: Final = pa.schema(
    [
        *STEP_SCHEMA,
        pa.field("point", pa.list_(pa.float32(), 2)),  # where the label acted, px of the screenshot (AndroidControl)
        pa.field("instruction", pa.string()),  # the step's own instruction (AndroidControl low level)
        pa.field("episode_steps", pa.int32()),  # how many steps the task has in the source, those left out included
        pa.field("view", pa.list_(pa.int32(), 4)),  # (x1, y1, x2, y2) of the screenshot in the source image; null: all
        pa.field("view_rule", pa.string()),  # how that was chosen, see `views`
    ]
)
"""STEP_SCHEMA and what only some sources know; a loop that wants STEP_SCHEMA selects its columns."""

REJECT_SCHEMA: Final = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),
        pa.field("row", pa.string(), nullable=False),  # as the format counts: row, record, record/step or line, from 0
        pa.field("reason", pa.string(), nullable=False),  # one of REASONS
        pa.field("detail", pa.string(), nullable=False),
    ]
)

REASONS: Final[Mapping[str, str]] = {
    "no_screenshot": "the screenshot is null",
    "bad_image": "the screenshot cannot be decoded, or is cut short",
    "image_too_large": "the screenshot has more pixels than are ever decoded",
    "bad_candidates": "candidates are malformed",
    "box_outside_image": "a target box does not lie in the image",
    "box_without_area": "a target box has no area",
    "missing_column": "a column or field is missing",
    "bad_field": "a field has another type or value than the format says",
    "bad_json": "invalid JSON",
    "bad_path": "an image path leaves the data folder, or is not there",
    "unknown_action": "the action type is none of the format's",
    "duplicate_id": "the id came before",
    "lengths_differ": "arrays of one record differ in length",
    "truncated_record": "the file ends within a record",
    "bad_checksum": "a record does not have its checksum",
    "bad_file": "the file is not of its format",
    "not_in_splits": "the episode is in no split",
    "no_target": "no positive candidate, or no target box in any view (left out of training only)",
    "no_enclosing_node": "no clickable node contains the click (left out of training only)",
}
"""Why rows are left out."""
EXPECTED: Final = frozenset({"no_target", "no_enclosing_node"})
"""Reasons that are facts of the data and no sign of damage: they do not count towards the share of bad rows."""

TRAINED: Final = frozenset({"train", "validation"})
"""Splits that rows without a target are left out of. Test splits keep them, as every protocol's denominator wants."""

MOBILE_ACTIONS: Final = ("CLICK", "LONG_PRESS", "TYPE", "SCROLL", "OPEN_APP", "BACK", "HOME", "WAIT")
ALL_ACTIONS: Final = frozenset(ACTION_TYPES) | frozenset(MOBILE_ACTIONS) | {"SCROLL DOWN"}


class ReaderError(Refusal, ValueError):
    """An import that cannot go on; the message names the file and what to do."""


class RejectedRow(Exception):
    """Raised while one row is converted: it is left out. `reason` is a key of REASONS."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Reject:
    file: str
    row: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Step:
    """One row of READER_SCHEMA, and what was noticed about it (counted, not stored)."""

    values: dict[str, Any]
    noticed: tuple[str, ...] = ()
    row: str = ""  # where it comes from, as in `Reject`


Item = Step | Reject


def step(
    *,
    step_id: str,
    split: str,
    episode_id: str,
    step_index: int,
    family: str,
    goal: str,
    history: list[str],
    screenshot: bytes,
    size: tuple[int, int],
    boxes: list[tuple[float, float, float, float]],
    action_type: str,
    value: str,
    noticed: tuple[str, ...] = (),
    **optional: Any,
) -> Step:
    """A `Step` from its parts; `optional` are the nullable columns of READER_SCHEMA."""
    values = {
        "step_id": step_id,
        "split": split,
        "episode_id": episode_id,
        "step_index": step_index,
        "family": family,
        "goal": goal,
        "history": history,
        "screenshot": screenshot,
        "width": size[0],
        "height": size[1],
        "boxes": boxes,
        "action_type": action_type,
        "value": value,
    }
    return Step(values | optional, noticed)


def parse_json(text: object, what: str) -> Any:
    """`text` as JSON; RejectedRow where it is none."""
    if not isinstance(text, str | bytes):
        raise RejectedRow("bad_field", f"{what} must be JSON text, not {type(text).__name__}")
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RejectedRow("bad_json", f"{what}: {error}") from error


def wanted(row: Mapping[str, Any], key: str, *types: type) -> Any:
    """The field, of one of `types`; a bool is never a number."""
    if key not in row:
        raise RejectedRow("missing_column", f"{key!r} is missing")
    value = row[key]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise RejectedRow("bad_field", f"{key!r} must be {' or '.join(t.__name__ for t in types)}, not {value!r:.80}")
    return value


def numbers(value: object, n: int, what: str) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) != n:
        raise RejectedRow("bad_field", f"{what} must be {n} numbers, not {value!r:.80}")
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and v == v for v in value):
        raise RejectedRow("bad_field", f"{what} must be {n} numbers, not {value!r:.80}")
    return tuple(float(v) for v in value)


SLACK: Final = 1.0
"""Pixels by which a box may leave the image: browsers report fractions, images have whole pixels."""


def checked_box(box: tuple[float, float, float, float], size: tuple[int, int]) -> tuple[float, float, float, float]:
    """`box` (x1, y1, x2, y2), unchanged, if it has area and lies in an image of `size`; RejectedRow otherwise."""
    x1, y1, x2, y2 = box
    if not (x2 > x1 and y2 > y1):
        raise RejectedRow("box_without_area", f"box {box}")
    if x1 < -SLACK or y1 < -SLACK or x2 > size[0] + SLACK or y2 > size[1] + SLACK:
        raise RejectedRow("box_outside_image", f"box {box} in an image of {size[0]} x {size[1]} px")
    return box
