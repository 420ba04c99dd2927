"""Logs of grounding boards in the fields of ScreenSpot-Pro's evaluator, as MAI-UI published them for six boards.

Two kinds of rows, label and prediction in each: `local` (`prompt_to_evaluate`, no size of the image) and `server`
(`instruction`, `img_filename`, `img_size`, `pred_norm`). `bbox` is [x1, y1, x2, y2] and `pred` the point [x, y], both
in pixels of the stored screenshot, `raw_response` the model's answer with `"coordinate": [x, y]` in 0..1000. Public
code that writes them: Tongyi-MAI/MAI-UI evaluation/grounding, likaixin2000/ScreenSpot-Pro-GUI-Grounding.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Final

from coepg_dagster.evaluation.case import (
    FILE_SAYS,
    NO_PREDICTION,
    UNREADABLE,
    Action,
    Case,
    Notes,
    ScoringError,
    Unread,
    point_of,
)
from coepg_dagster.evaluation.grounding import REFUSAL, TARGET
from coepg_dagster.evaluation.metrics import BoxTuple, Point, inside_any
from coepg_dagster.evaluation.rows import PredictionRow, each_row, is_coordinate
from coepg_dagster.progress import Report

BOARDS: Final = {
    "screenspot",
    "screenspot_v2",
    "screenspot_pro",
    "osworld_g",
    "osworld_g_refined",
    "mmbench_gui",
    "ui_vision",
}
BAD_LABEL: Final = "rows whose label cannot be read"
NEGATIVE_LABEL: Final = "rows with a negative label, which no point answers"
OTHER_BOARD: Final = "rows of another board"
REPEATED: Final = "further rows of an item"
_PRO_GROUPS: Final = frozenset({"Creative", "Dev", "CAD", "Scientific", "Office", "OS"})
_DEVICES: Final = ("mobile", "desktop", "web")
_CATEGORIES: Final = ("basic", "functional", "spatial")
_COORDINATE: Final = re.compile(r'"coordinate"\s*:\s*\[\s*(-?[\d.]+)\s*,\s*(-?[\d.]+)\s*\]')
_THOUSAND: Final = 1000.0
_CLOSE: Final = 1e-6
"""Of a coordinate, relative to the screen: what products of floats differ by."""
_FEW: Final = 5
"""Rows that a note names."""


@dataclass
class _Rows:
    """How many rows have something in common, and the first of them."""

    n: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        self.n += 1
        if len(self.first) < _FEW:
            self.first.append(name)

    def text(self) -> str:
        return f"{self.n} ({', '.join(self.first)}{', …' if self.n > len(self.first) else ''})"


@dataclass
class _Space:
    """Whether points that should be pixels could also be in another space; and what they score in both."""

    name: str
    fits: bool = True
    points: int = 0
    as_pixels: int = 0
    as_other: int = 0
    sizes: bool = True

    def add(self, fits: bool, point: Point, other: Point | None, boxes: tuple[BoxTuple, ...]) -> None:
        self.fits = self.fits and fits
        self.points += 1
        self.as_pixels += inside_any(point, boxes)
        self.sizes = self.sizes and other is not None
        self.as_other += other is not None and inside_any(other, boxes)

    def refuse(self, path: Path) -> None:
        """Raises ScoringError where all points fit both spaces, and the two readings differ."""
        if not self.fits or not self.points or (self.sizes and self.as_pixels == self.as_other):
            return
        other = f"{self.as_other} of them are right" if self.sizes else "the rows lack the `img_size` that this needs"
        raise ScoringError(
            f"{path}: all {self.points} points fit two spaces: read as pixels {self.as_pixels} of them are right, read as "
            f"{self.name} {other}; the format has pixels of the stored screenshot, so convert `pred` to these"
        )


def board_of(row: Mapping[str, Any]) -> str:
    """The board that a row's own fields name, of BOARDS; empty where they name none."""
    return _board(
        *(str(row.get(key, "")) for key in ("dataset_source", "task_filename", "application", "group", "platform"))
    )


@lru_cache(maxsize=1024)
def _board(source: str, task: str, application: str, group: str, platform: str) -> str:
    names = " ".join((source, task, application, group)).lower()
    if "mmbench" in names or platform.startswith("os_"):
        return "mmbench_gui"
    if "osworld" in names or "os_g" in names.split():
        return "osworld_g_refined" if "refine" in names else "osworld_g"
    if re.search(r"ui[-_]?vision|element_grounding", names):
        return "ui_vision"
    if re.search(r"screenspot[-_]?(desktop|mobile|web)", names):
        return "screenspot_v2" if "v2" in names or platform == "v2" else "screenspot"
    return "screenspot_pro" if group in _PRO_GROUPS else ""


def read_mai_ui(path: Path, protocol: str, report: Report | None = None) -> tuple[Iterator[Case | Unread], Notes]:
    """The cases of a log, one after the other, and notes that are complete after the last. Also JSON with `details`.

    A row that cannot be read costs itself; so does a second row of one item, and a row of another board. `pred` may be
    null (no answer), a point, a box (its centre counts) or a list of points (the first counts). Rows of original and of
    refined OSWorld-G, whose boxes are the same, are taken for each other with a note. Raises ScoringError for a file whose
    points could as well be in another space.
    """
    board = protocol.split("/")[0]
    if board not in BOARDS:
        raise ScoringError(f"{path}: mai_ui files hold predictions for {', '.join(sorted(BOARDS))}, not {board}'s")
    notes: Notes = {}
    return _cases(path, board, notes, report), notes


def _cases(path: Path, board: str, notes: Notes, report: Report | None) -> Iterator[Case | Unread]:
    noticed: dict[str, _Rows] = {}
    spaces = _Space("parts of the screen (0..1)"), _Space("thousandths of the screen (0..1000)")
    seen: set[str] = set()
    named, again = Counter[str](), Counter[str]()

    def notice(what: str, name: str) -> None:
        noticed.setdefault(what, _Rows()).add(name)

    for row in each_row(path, report, within="details"):
        if isinstance(row, Unread):
            yield row
            continue
        own = board_of(row.data)
        named[own] += 1
        if own and own.removesuffix("_refined") != board.removesuffix("_refined"):
            detail = f"the row's fields name the board {own}, not {board}: score it with --protocol {own}/…"
            yield Unread(row.where, OTHER_BOARD, detail)
            continue
        try:
            case = _case(row, board, notice, spaces)
        except ScoringError as error:
            yield Unread(row.where, BAD_LABEL, str(error).removeprefix(f"{row.where}: "))
            continue
        if row.data.get("gt_type") == "negative":
            yield Unread(row.where, NEGATIVE_LABEL, f"item {case.step_id}: `gt_type` is negative")
        elif case.step_id in seen and row.data.get("id") is None:
            # nothing says that these are one item: two screenshots may have the same button
            again[case.step_id] += 1
            yield replace(case, step_id=f"{case.step_id}-{again[case.step_id] + 1}")
        elif case.step_id in seen:
            yield Unread(row.where, REPEATED, f"item {case.step_id} has a row already; only its first counts")
        else:
            seen.add(case.step_id)
            yield case
    for space in spaces:
        space.refuse(path)
    for own, n in sorted(named.items()):
        if own and own != board:
            notes[f"rows that call themselves {own}"] = n
    for what, rows in noticed.items():
        notes[what] = rows.text()


def _case(row: PredictionRow, board: str, notice: Any, spaces: tuple[_Space, _Space]) -> Case:
    data = row.data
    numbers = _numbers(row)
    x1, y1, x2, y2 = numbers[:4]
    boxes = ((x1, y1, x2, y2),)
    size = _size(row)
    image = data.get("img_filename") or data.get("image_path")
    name = str(data["id"]) if isinstance(data.get("id"), str | int) else ""
    # of both kinds of rows the same, so that a local and a server log can be compared
    label = (
        data.get("prompt_to_evaluate", data.get("instruction")),
        data.get("lang") or "en",
        data.get("instruction_style") or "instruction",
        None if name else image,
        numbers,
    )
    digest = hashlib.blake2b(repr(label).encode(errors="backslashreplace"), digest_size=6).hexdigest()
    step_id = f"{name}-{digest}" if name else digest

    raw = _raw_point(data.get("raw_response"))
    point, lacks = _point(data.get("pred"), step_id, notice)
    if point is not None and raw is None and data.get("raw_response") and max(point) < 0:
        point, lacks = None, UNREADABLE  # the log's mark of an answer without a point
    if point is not None and any(numbers):
        parts, thousandths = spaces
        if parts.fits:
            # labels in 0..1 share the space of such points, whatever it is called
            fits = max(numbers) > 1 and min(point) >= 0 and max(point) <= 1
            parts.add(fits, point, size and (point[0] * size[0], point[1] * size[1]), boxes)
        if thousandths.fits:
            other = size and (point[0] * size[0] / _THOUSAND, point[1] * size[1] / _THOUSAND)
            thousandths.add(raw == point and size != (1000, 1000), point, other, boxes)
    if point is not None:
        if raw is not None and (problem := _differs(point, raw, size, boxes)):
            notice(problem, step_id)
        normal = data.get("pred_norm")
        if size is not None and isinstance(normal, list) and len(normal) == 2 and all(map(is_coordinate, normal)):
            triples = zip(normal, size, point, strict=True)
            if any(abs(part * side - value) > _CLOSE * side for part, side, value in triples):
                notice("rows whose `pred` and `pred_norm` differ; `pred` counts", step_id)
    facts = _classes(data)
    if not any(numbers) or max(numbers) < 0:
        facts["target"] = REFUSAL
    elif board.startswith("osworld_g"):
        facts["target"] = TARGET
    if len(numbers) > 4:
        # the log made [x, y, width, height] of a box to corners, and so the first four numbers of a polygon
        corners = (x1, y1, x2 - x1, y2 - y1, *numbers[4:])
        facts["polygon"] = list(zip(corners[::2], corners[1::2], strict=True))
        notice("rows with a polygon, of which `items` takes the first four numbers as a box", step_id)
    screenshot = name.rpartition("-")[0] if board.startswith("osworld_g") else ""
    return Case(
        step_id=step_id,
        episode_id=str(image) if image else screenshot or None,
        label=Action("click"),
        prediction=None if point is None else Action("click", "", point),
        boxes=boxes,
        size=size,
        group=_group(data, board, facts),
        lacks=lacks,
        facts=facts,
    )


def _numbers(row: PredictionRow) -> tuple[float, ...]:
    """`bbox`: four numbers of a box, or the coordinates of a polygon."""
    box = row.get("bbox", list)
    if len(box) < 4 or len(box) % 2 or not all(map(is_coordinate, box)):
        raise row.fail(f"field 'bbox' must be [x1, y1, x2, y2] or the corners of a polygon, not {shown(box)}")
    return tuple(map(float, box))


def _size(row: PredictionRow) -> tuple[int, int] | None:
    """The stored screenshot's width and height; None where the row has none."""
    if row.data.get("img_size") is not None:
        return row.size("img_size")
    return row.size("image_size") if row.data.get("image_size") is not None else None


def _raw_point(answer: Any) -> Point | None:
    """The last `"coordinate": [x, y]` of an answer, in 0..1000; None where there is none."""
    found = _COORDINATE.findall(answer) if isinstance(answer, str) else []
    try:
        return point_of(*map(float, found[-1])) if found else None
    except ValueError:
        return None


def _point(value: Any, step_id: str, notice: Any) -> tuple[Point | None, str]:
    """`pred` as a point, and what it lacks."""
    if value is None or value == []:
        return None, NO_PREDICTION
    if isinstance(value, list) and value and all(isinstance(each, list) for each in value):
        if len(value) > 1:
            notice("rows with several predictions, of which the first counts", step_id)
        value = value[0]
    if isinstance(value, list) and all(map(is_coordinate, value)):
        if len(value) == 2:
            return (float(value[0]), float(value[1])), ""
        if len(value) == 4:
            notice("rows with a box as prediction, whose centre counts", step_id)
            return ((value[0] + value[2]) / 2, (value[1] + value[3]) / 2), ""
    return None, UNREADABLE


def _differs(point: Point, raw: Point, size: tuple[int, int] | None, boxes: tuple[BoxTuple, ...]) -> str:
    """What to note where the raw answer gives another point than `pred`; empty where it is the same.

    Without the image's size, a side of it follows from the two and must be a whole number of pixels.
    """
    if size is None:
        for value, thousandths in zip(point, raw, strict=True):
            side = value * _THOUSAND / thousandths if thousandths else 0.0
            if abs(side - round(side)) > _CLOSE * max(1.0, abs(side)) or (not thousandths and value):
                return "rows whose `pred` does not follow from the raw answer"
        return ""
    again = raw[0] * size[0] / _THOUSAND, raw[1] * size[1] / _THOUSAND
    if all(abs(a - b) <= _CLOSE * side for a, b, side in zip(again, point, size, strict=True)):
        return ""
    changed = inside_any(again, boxes) != inside_any(point, boxes)
    return f"rows whose raw answer gives another point, {'with another' if changed else 'with the same'} verdict"


def _classes(data: Mapping[str, Any]) -> dict[str, Any]:
    """The classes of a row over which a board's page averages."""
    facts: dict[str, Any] = {
        key: value
        for key in ("ui_type", "application", "platform")
        if isinstance(value := data.get(key), str) and value
    }
    said = data.get("correctness")
    if isinstance(said, str):
        facts[FILE_SAYS] = "correct" if said == "correct" else "wrong"
    return facts


def _group(data: Mapping[str, Any], board: str, facts: Mapping[str, Any]) -> str:
    """The class of the board's main average."""
    if board in ("screenspot_pro", "mmbench_gui"):
        return str(data.get("group", ""))
    names = [str(data.get(key, "")).lower() for key in ("application", "task_filename", "platform", "group")]
    match board:
        case "screenspot" | "screenspot_v2":
            device = next((device for device in _DEVICES if any(device in name for name in names)), names[0])
            return f"{device}_{facts.get('ui_type', '')}"
        case "ui_vision":
            found = (part for part in _CATEGORIES if any(part in name for name in reversed(names)))
            return next(found, str(data.get("group", "")))
        case _:
            return str(facts.get("target", ""))
