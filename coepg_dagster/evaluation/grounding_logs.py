"""Logs of grounding boards in the fields of ScreenSpot-Pro's evaluator, as MAI-UI published them for six boards.

Two kinds of rows, label and prediction in each: `local` (`prompt_to_evaluate`, no size of the image) and `server`
(`instruction`, `img_filename`, `img_size`, `pred_norm`). `bbox` is [x1, y1, x2, y2] and `pred` the point [x, y], both
in pixels of the stored screenshot, `raw_response` the model's answer with `"coordinate": [x, y]` in 0..1000. Public
code that writes them: Tongyi-MAI/MAI-UI evaluation/grounding, likaixin2000/ScreenSpot-Pro-GUI-Grounding, and for UI-Vision
uivision/UI-Vision. Rows may also have the board's own fields of a label (`readers.boards`), or only an id beside the board's
label files.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Final, NamedTuple, cast
from zlib import crc32

from coepg_dagster.evaluation.case import (
    FILE_SAYS,
    NO_PREDICTION,
    Action,
    Case,
    Notes,
    Rows,
    ScoringError,
    Unread,
    more_than_few,
    point_of,
)
from coepg_dagster.evaluation.exclusions import ITEM_ID, QUESTION, question
from coepg_dagster.evaluation.grounding import REFUSAL, TARGET
from coepg_dagster.evaluation.labels import NO_ITEM, BoardLabels, case_of, instruction_of
from coepg_dagster.evaluation.metrics import BoxTuple, Point, corners_in_order, inside_any
from coepg_dagster.evaluation.rows import REPEATED, PredictionRow, each_row, is_coordinate, placed, unreadable
from coepg_dagster.evaluation.spaces import Readings
from coepg_dagster.geometry import Space
from coepg_dagster.notations import locate
from coepg_dagster.progress import Report
from coepg_dagster.readers import boards
from coepg_dagster.readers.rows import RejectedRow

BOARDS: Final = frozenset(board.removesuffix("_v1") for board in boards.BOARDS)
NEGATIVE_LABEL: Final = "rows with a negative label, which no point answers"
OTHER_BOARD: Final = "rows of another board"
OTHER_BOX: Final = "rows whose own box is another than that of the labels: are they of one version?"
OTHER_INSTRUCTION: Final = "rows whose own instruction is another than that of the labels: are they of one version?"
NO_ANSWER: Final = "items without a prediction, which count as wrong"
_PRO_GROUPS: Final = frozenset({"Creative", "Dev", "CAD", "Scientific", "Office", "OS"})
_DEVICES: Final = ("mobile", "desktop", "web")
_CATEGORIES: Final = ("basic", "functional", "spatial")
_COORDINATE: Final = re.compile(r'"coordinate"\s*:\s*\[\s*(-?[\d.]+)\s*,\s*(-?[\d.]+)\s*\]')
_CLASSES: Final = (("ui_type", "element_type"), ("application", "app_name"), ("platform", "system"))
"""Facts of a case, each with its name in other logs."""
_THOUSAND: Final = 1000.0
_CLOSE: Final = 1e-6
"""Of a coordinate, relative to the screen: what products of floats differ by."""
_HALF_PIXEL: Final = 0.5
_LONGEST_ANSWER: Final = 100_000
"""Characters of a raw answer that are searched for a point."""
_REMEDY: Final = (
    "the format has pixels of the stored screenshot: convert `pred` to these, or say which space points are in with --space "
    f"({', '.join(Space)})"
)
_LABEL_FIELDS: Final = {
    "osworld_g": "box_coordinates",
    "osworld_g_refined": "box_coordinates",
    "mmbench_gui": "grounding_type",
}
"""Board → a field that only a label in its owner's own layout has."""


def board_of(row: Mapping[str, Any]) -> str:
    """The board that a row's own fields name, of BOARDS; empty where they name none."""
    get = row.get
    return _board(
        str(get("dataset_source", "")),
        str(get("task_filename", "")),
        str(get("application", "")),
        str(get("group", "")),
        str(get("platform", "")),
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


def read_mai_ui(
    path: Path,
    protocol: str,
    report: Report | None = None,
    *,
    labels: Path | None = None,
    space: Space | None = None,
) -> tuple[Iterator[Case | Unread], Notes]:
    """The cases of a log, one after the other, and notes that are complete after the last. Also JSON with `details`.

    A row that cannot be read costs itself; so does a second row of one item, and a row of another board. `pred` may be null (no
    answer), a point, a box (its centre counts) or a list of points (the first counts). Rows of original and of refined
    OSWorld-G, whose boxes are the same, are taken for each other with a note. Raises ScoringError for a file whose points could
    as well be in another space.

    Args:
        labels: the board's label files, as its owner publishes them; they count, and items without a row are wrong.
        space: of `pred`, where it is not pixels of the stored screenshot, or of the raw answer where that counts and is not in
            0..1000; a row's own `space` goes first.
    """
    board = protocol.split("/")[0]
    if board not in BOARDS:
        raise ScoringError(f"{path}: mai_ui files hold predictions for {', '.join(sorted(BOARDS))}, not {board}'s")
    notes: Notes = {}
    known = BoardLabels.read(board, labels) if labels is not None else None
    return _Log(path, board, notes, known, space).cases(report), notes


class _Log:
    """One pass over a log."""

    def __init__(self, path: Path, board: str, notes: Notes, labels: BoardLabels | None, space: Space | None) -> None:
        self.path, self.board, self.notes, self.labels, self.space = path, board, notes, labels, space
        self.noticed: dict[str, Rows] = {}
        self.readings = Readings()
        self.answers = _Answers()
        self.unread: dict[str, Unread] = {}  # the first by reason
        self.disordered = 0
        self.disorder: ScoringError | None = None
        self.of_world = board.startswith("osworld_g")
        self.category = next((name for name in _CATEGORIES if name in path.name.lower()), "")

    def notice(self, what: str, name: str) -> None:
        if (rows := self.noticed.get(what)) is None:
            rows = self.noticed[what] = Rows()
        rows.add(name)

    def cases(self, report: Report | None) -> Iterator[Case | Unread]:
        """All cases; afterwards the notes are complete."""
        for case in self._rows(report):
            if isinstance(case, Unread):
                self.unread.setdefault(case.reason, case)
            yield case

    def _rows(self, report: Report | None) -> Iterator[Case | Unread]:
        seen: set[str] = set()
        named, again = Counter[str](), Counter[str]()
        family = self.board.removesuffix("_refined")
        for row in each_row(self.path, report, within="details"):
            if isinstance(row, Unread):
                yield row
                continue
            own = board_of(row.data)
            named[own] += 1
            if own and own.removesuffix("_refined") != family:
                detail = f"the row's fields name the board {own}, not {self.board}: score it with --protocol {own}/…"
                yield Unread(row.where, OTHER_BOARD, detail)
                continue
            if row.data.get("gt_type") == "negative":
                yield Unread(row.where, NEGATIVE_LABEL, "`gt_type` is negative")
                continue
            try:
                case = self._case(row)
            except ScoringError as error:
                yield row.unread(error)
                continue
            if case is None:
                yield Unread(
                    row.where, NO_ITEM, f"{self._named(row.data)} is no item of {self.labels and self.labels.source}"
                )
            elif case.step_id not in seen:
                seen.add(case.step_id)
                yield case
            elif row.data.get("id") is None and self.labels is None:
                # nothing says that these are one item: two screenshots may have the same button
                again[case.step_id] += 1
                yield replace(case, step_id=f"{case.step_id}-{again[case.step_id] + 1}")
            else:
                yield Unread(row.where, REPEATED, f"item {case.step_id} has a row already; only its first counts")
        if self.labels is not None:
            yield from self._unanswered(seen)
        if self.disorder is not None and more_than_few(self.disordered, len(seen)):
            # the others are then in order by chance
            raise self.disorder
        self.readings.check(str(self.path), _REMEDY)
        for own, n in sorted(named.items()):
            if own and own != self.board:
                self.notes[f"rows that call themselves {own}"] = n
        self.answers.into(self.noticed)
        self.notes |= self.noticed

    def _unanswered(self, seen: set[str]) -> Iterator[Case | Unread]:
        """The items that no row is about, and the entries of the label files that cannot be read."""
        assert self.labels is not None
        self.labels.require(seen, self.path, self.unread)
        for item, case in self.labels.items.items():
            if item not in seen:
                self.notice(NO_ANSWER, item)
                yield case
        yield from self.labels.unread

    @staticmethod
    def _named(data: Mapping[str, Any]) -> str:
        own = next((data[name] for name in ("id", "step_id", "item", "index") if data.get(name) is not None), None)
        return f"{shown(own)}" if own is not None else f"the question {shown(instruction_of(data))}"

    def _case(self, row: PredictionRow) -> Case | None:
        """The case of a row; None where no label is its."""
        data = row.data
        if self.labels is None:
            item = self._label(row)
        else:
            name = self.labels.item_of(data)
            if name is None:
                return None
            known = self.labels.items[name]
            self._compare(row, known)
            item = _Item(known.step_id, known.episode_id, known.boxes, known.size, known.group, dict(known.facts))
        said = data.get("correctness")
        if said.__class__ is str:
            item.facts[FILE_SAYS] = "correct" if said.strip().lower() == "correct" else "wrong"
        answer = data.get("raw_response")
        raw = _raw_point(answer) if answer else None
        value = data.get("pred")
        lacks, stated = "", False
        point = _plain_point(value)
        if point is None or self.space is not None or "space" in data:
            point, lacks, stated = self._point(row, item, value, raw)
        elif raw is None and answer and max(point) < 0:
            point, lacks = None, self._pointless(row)
        prediction = None if point is None else Action("click", "", point)
        step_id, episode_id, boxes, size, group, facts = item
        case = Case(step_id, episode_id, _CLICK, prediction, boxes, size, None, group, None, None, lacks, False, facts)
        if point is None:
            if raw is not None and lacks == NO_PREDICTION:
                self.notice("rows without a prediction whose raw answer names a point", step_id)
            return case
        self.readings.add(case, raw, stated=stated)
        if raw is not None:
            self.answers.add(point, raw, case)
        if size is not None:
            self._compare_parts(data.get("pred_norm"), point, case)
        return case

    def _compare(self, row: PredictionRow, item: Case) -> None:
        """Notices where a row's own label is another than that of the label files."""
        data, own = row.data, instruction_of(row.data)
        assert self.labels is not None
        if own is not None and own.strip() != self.labels.instructions[item.step_id].strip():
            self.notice(OTHER_INSTRUCTION, item.step_id)
        box = data.get("bbox")
        if isinstance(box, list) and len(box) == 4 and all(map(is_coordinate, box)) and len(item.boxes) == 1:
            x1, y1, x2, y2 = box
            theirs, ours = corners_in_order((x1, y1, x2, y2)), corners_in_order(item.boxes[0])
            apart = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
            if apart > _HALF_PIXEL and "polygon" not in item.facts:
                self.notice(OTHER_BOX, item.step_id)

    def _label(self, row: PredictionRow) -> _Item:
        """The item of a row that holds its label."""
        data, board = row.data, self.board
        if board in _LABEL_FIELDS and _LABEL_FIELDS[board] in data and "img_size" not in data:
            return self._own_label(row)
        boxes, numbers, polygon = _targets(row)
        if board != "ui_vision" and polygon is None:
            self._in_order(row, boxes)
        image = data.get("img_filename") or data.get("image_path") or data.get("img_path")
        own = data.get("id")
        name = str(own) if own.__class__ in (str, int) else ""
        # of both kinds of rows the same, so that a local and a server log can be compared
        label = (
            data.get("prompt_to_evaluate", data.get("instruction")),
            data.get("lang") or "en",
            data.get("instruction_style") or "instruction",
            None if name else image,
            numbers,
        )
        written = repr(label).encode(errors="backslashreplace")
        step_id = f"{name}-{crc32(written):08x}" if name else hashlib.blake2b(written, digest_size=6).hexdigest()
        facts: dict[str, Any] = {ITEM_ID: name} if name else {}
        for key, other in _CLASSES:
            value = data.get(key) or data.get(other)
            if value.__class__ is str and value:
                facts[key] = value
        if not any(numbers) or max(numbers) < 0:
            facts["target"] = REFUSAL
        elif self.of_world:
            facts["target"] = TARGET
        if board == "screenspot":
            device = _group(data, board, facts).partition("_")[0]
            facts[QUESTION] = question(device, instruction_of(data) or "")
        if polygon:
            facts["polygon"] = polygon
            self.notice("rows with a polygon, of which `items` takes the first four numbers as a box", step_id)
        episode = str(image) if image else name.rpartition("-")[0] if self.of_world else ""
        group = _group(data, board, facts) or self.category
        row.can_be_kept("a field", step_id, episode, group, *(text for text in facts.values() if isinstance(text, str)))
        return _Item(step_id, episode or None, boxes, _size(row), group, facts)

    def _in_order(self, row: PredictionRow, boxes: tuple[BoxTuple, ...]) -> None:
        """Raises ScoringError where a box does not name its upper left corner first; the first such error is kept."""
        try:
            for box in boxes:
                row.in_order("bbox", box)
        except ScoringError as error:
            self.disordered += 1
            self.disorder = self.disorder or error
            raise

    def _own_label(self, row: PredictionRow) -> _Item:
        """The item of a row in the fields of the board's own label files."""
        try:
            label = boards.label_of(cast(boards.Board, self.board), dict(row.data), 0, "row")
        except RejectedRow as rejected:
            raise row.fail(rejected.detail) from rejected
        case = case_of(self.board, label)
        return _Item(case.step_id, case.episode_id, case.boxes, case.size, case.group, dict(case.facts))

    def _point(self, row: PredictionRow, item: _Item, value: Any, raw: Point | None) -> tuple[Point | None, str, bool]:
        """The predicted point in pixels, what it lacks, and whether its space is stated."""
        data = row.data
        name = data.get("space") or self.space
        if value is None and "pred" not in data:
            # the format says what space these fields are in; a raw answer's may be stated
            for other, found, space in (
                ("pred_norm", data.get("pred_norm"), Space.UNIT),
                ("raw_response", raw and list(raw), name or Space.NORM_1000),
            ):
                if isinstance(found, list):
                    if other == "raw_response" and name is None and raw is not None:
                        self.readings.add_thousandths(raw)
                    value, name = found, space
                    self.notice(f"rows without `pred`, of which `{other}` counts", item.step_id)
                    break
        point, lacks = self._read(row, value, item.step_id)
        if point is not None and raw is None and data.get("raw_response") and max(point) < 0:
            return None, self._pointless(row), False
        if point is None or name is None:
            return point, lacks, False
        return placed(row, point, name, item.size), lacks, True

    @staticmethod
    def _pointless(row: PredictionRow) -> str:
        """What lacks where a log marks an answer without a point."""
        return unreadable(row, "raw_response", "an answer with a point", row.data["raw_response"])

    def _read(self, row: PredictionRow, value: Any, step_id: str) -> tuple[Point | None, str]:
        """`pred` as a point in the space in which it stands, and what it lacks."""
        if value is None or value == []:
            return None, NO_PREDICTION
        if isinstance(value, list):
            if value and all(isinstance(each, list) for each in value):
                if len(value) > 1:
                    self.notice("rows with several predictions, of which the first counts", step_id)
                value = value[0]
            if (point := _plain_point(value)) is not None:
                return point, ""
            if len(value) == 4 and all(map(is_coordinate, value)):
                self.notice("rows with a box as prediction, whose centre counts", step_id)
                return ((value[0] + value[2]) / 2, (value[1] + value[3]) / 2), ""
        return None, unreadable(row, "pred", "two numbers [x, y]", value)

    def _compare_parts(self, normal: Any, point: Point, case: Case) -> None:
        """Notices where the point in parts of the screen, which servers write too, is another one."""
        if case.size is None or _plain_point(normal) is None:
            return
        triples = zip(normal, case.size, point, strict=True)
        if any(abs(part * side - value) > _CLOSE * side for part, side, value in triples):
            self.notice("rows whose `pred` and `pred_norm` differ; `pred` counts", case.step_id)


_CLICK: Final = Action("click")


class _Item(NamedTuple):
    """What a row is about, without the prediction; as the fields of `Case`."""

    step_id: str
    episode_id: str | None
    boxes: tuple[BoxTuple, ...]
    size: tuple[int, int] | None
    group: str
    facts: dict[str, Any]


def _plain_point(value: Any) -> Point | None:
    """`value`, a list of two coordinates, as a point; None where it is anything else."""
    if value.__class__ is list and len(value) == 2:
        x, y = value
        if is_coordinate(x) and is_coordinate(y):
            return float(x), float(y)
    return None


class _Answers:
    """Rows whose raw answer gives another point than `pred`.

    The format says that answers are in 0..1000. Where fewer rows differ if they are read as pixels, or as parts of the screen,
    the log is of another model, and these are noted.
    """

    _OTHERS: Final = {" (read as pixels)": None, " (read as parts of the screen)": 1.0}

    def __init__(self) -> None:
        self.as_thousandths: dict[str, Rows] = {}
        self.as_others: dict[str, dict[str, Rows]] = {name: {} for name in self._OTHERS}
        self.only_thousandths = 0  # rows that agree, which hardly agree in another space too

    def add(self, point: Point, raw: Point, case: Case) -> None:
        problem = _differs(point, raw, case.size, case.boxes, _THOUSAND)
        if not problem:
            self.only_thousandths += 1
            return
        self.as_thousandths.setdefault(problem, Rows()).add(case.step_id)
        for name, side in self._OTHERS.items():
            if problem := _differs(point, raw, case.size, case.boxes, side):
                self.as_others[name].setdefault(problem, Rows()).add(case.step_id)

    def into(self, noticed: dict[str, Rows]) -> None:
        """Adds the differences in the space in which the fewest rows differ."""
        found, ending = self.as_thousandths, ""
        for name, rows in self.as_others.items():
            if self._count(rows) + self.only_thousandths < self._count(found):
                found, ending = rows, name
        for problem, those in found.items():
            noticed[problem + ending] = those

    @staticmethod
    def _count(problems: Mapping[str, Rows]) -> int:
        return sum(rows.n for rows in problems.values())


def _targets(row: PredictionRow) -> tuple[tuple[BoxTuple, ...], tuple[float, ...], list[Point] | None]:
    """`bbox` as boxes, as numbers, and as the corners of a polygon where it is one.

    It is four numbers, more of them (a polygon), a list of boxes (each counts), or of points (a polygon).
    """
    value = row.data.get("bbox")
    if value.__class__ is list and len(value) == 4 and all(map(is_coordinate, value)):
        x1, y1, x2, y2 = map(float, value)
        box = (x1, y1, x2, y2)
        return (box,), box, None
    if value is None and "bbox" not in row.data:
        raise row.fail(
            f"field 'bbox' is missing (there are {', '.join(sorted(row.data))}); give the board's label files with --labels"
        )
    flat = value
    if isinstance(value, list) and value and all(isinstance(each, list) for each in value):
        if all(len(each) == 4 and all(map(is_coordinate, each)) for each in value):
            boxes = tuple((float(a), float(b), float(c), float(d)) for a, b, c, d in value)
            return boxes, tuple(number for box in boxes for number in box), None
        if len(value) > 2 and all(len(each) == 2 for each in value):
            flat = [number for each in value for number in each]
    if not isinstance(flat, list) or len(flat) < 4 or len(flat) % 2 or not all(map(is_coordinate, flat)):
        raise row.fail(f"field 'bbox' must be [x1, y1, x2, y2] or the corners of a polygon, not {shown(value)}")
    numbers = tuple(map(float, flat))
    x1, y1, x2, y2 = numbers[:4]
    if flat is not value:  # points as such, which nothing has turned into corners
        return ((x1, y1, x1 + x2, y1 + y2),), numbers, list(zip(numbers[::2], numbers[1::2], strict=True))
    # the log made [x, y, width, height] of a box to corners, and so the first four numbers of a polygon
    corners = (x1, y1, x2 - x1, y2 - y1, *numbers[4:])
    return ((x1, y1, x2, y2),), numbers, list(zip(corners[::2], corners[1::2], strict=True))


def _size(row: PredictionRow) -> tuple[int, int] | None:
    """The stored screenshot's width and height; None where the row has none."""
    data = row.data
    if data.get("img_size") is not None:
        return row.size("img_size")
    return row.size("image_size") if data.get("image_size") is not None else None


def _raw_point(answer: Any) -> Point | None:
    """The point in a model's answer, as it stands there; None where there is none.

    It is the last `"coordinate": [x, y]`, else what `notations.locate` finds.
    """
    if not isinstance(answer, str) or not answer:
        return None
    found = _COORDINATE.match(answer, max(0, answer.rfind('"coordinate"')))
    if found:
        try:
            return point_of(float(found[1]), float(found[2]))
        except ValueError:
            return None
    place = locate(answer[-_LONGEST_ANSWER:])
    return None if place is None else point_of(place.x, place.y)


def _differs(
    point: Point, raw: Point, size: tuple[int, int] | None, boxes: tuple[BoxTuple, ...], side: float | None
) -> str:
    """What to note where the raw answer gives another point than `pred`; empty where it is the same.

    `side` is what the screen's sides are in the answer's space; None: pixels. Without the image's size, a side of it follows
    from the two and must be a whole number of pixels.
    """
    if side is None:
        again = raw
    elif size is not None:
        again = raw[0] * size[0] / side, raw[1] * size[1] / side
    else:
        for value, part in zip(point, raw, strict=True):
            pixels = value * side / part if part else 0.0
            if abs(pixels - round(pixels)) > _CLOSE * max(1.0, abs(pixels)) or (not part and value):
                return "rows whose `pred` does not follow from the raw answer"
        return ""
    width, height = size or (1, 1)
    if abs(again[0] - point[0]) <= _CLOSE * width and abs(again[1] - point[1]) <= _CLOSE * height:
        return ""
    changed = inside_any(again, boxes) != inside_any(point, boxes)
    return f"rows whose raw answer gives another point, {'with another' if changed else 'with the same'} verdict"


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
