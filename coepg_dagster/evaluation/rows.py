"""Rows of files that other people wrote: JSON lines or lists, with typed access and messages that name file, row and field.

Belongs here: reading. What a row means is decided in `formats` and `grounding_logs`.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from reprlib import repr as shown
from typing import IO, Any, Final, cast

from coepg_dagster import jsonlines
from coepg_dagster.evaluation.case import FARTHEST, NO_PREDICTION, Case, ScoringError, Unread, point_of
from coepg_dagster.evaluation.metrics import BoxTuple, Point
from coepg_dagster.geometry import Point as PlacedPoint
from coepg_dagster.geometry import Size, Space, Viewport
from coepg_dagster.progress import Report
from coepg_dagster.prompts import normal_value

_REPORT_EVERY: Final = 5_000
"""Rows between two reports of progress."""
MAX_JSON: Final = 1 << 30
"""Bytes that a file of one JSON value may have once it is decompressed; JSON lines are read one by one and have no limit."""
UNREADABLE_ROW: Final = "rows that are no JSON object"
BAD_LABEL: Final = "rows whose label cannot be read"
REPEATED: Final = "further rows of an item"


@dataclass(slots=True)
class PredictionRow:
    """One JSON object of a file, with typed access to its fields."""

    where: str  # file and row, for messages
    data: Mapping[str, Any]

    def fail(self, message: str) -> ScoringError:
        return ScoringError(f"{self.where}: {message}".encode(errors="backslashreplace").decode())

    def unread(self, error: ScoringError, reason: str = BAD_LABEL) -> Unread:
        """This row as one that costs itself, for an error of `fail`."""
        return Unread(self.where, reason, str(error).removeprefix(f"{self.where}: "))

    def inner(self, what: str, value: Any) -> PredictionRow:
        """An object within this row."""
        if not isinstance(value, dict):
            raise self.fail(f"{what} must be an object, not {shown(value)}")
        return PredictionRow(f"{self.where}: {what}", value)

    def get(self, key: str, *types: type, optional: bool = False) -> Any:
        """The field, of one of `types` (a bool is never a number); None where it is absent or null and `optional`."""
        value = self.data.get(key)
        if value.__class__ in types:
            return value
        if value is None and optional:
            return None
        if key not in self.data:
            raise self.fail(f"field {key!r} is missing (there are {', '.join(sorted(self.data))})")
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise self.fail(f"field {key!r} must be {' or '.join(t.__name__ for t in types)}, not {shown(value)}")
        return value

    def text(self, key: str, *, optional: bool = False) -> str:
        """The field's text; empty where it is absent or null and `optional`."""
        value = str(self.get(key, str, optional=optional) or "")
        if value.isascii():
            return value
        self.can_be_kept(f"field {key!r}", value)
        return value

    def can_be_kept(self, what: str, *texts: str) -> None:
        """Raises ScoringError where a table cannot hold one of these texts of the row: JSON can spell half a surrogate pair."""
        for text in texts:
            if text.isascii():
                continue
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise self.fail(f"{what} holds {shown(text)}, which is no text in UTF-8") from error

    def whole(self, key: str, most: int = 2**31 - 1, *, optional: bool = False) -> int | None:
        value: int | None = self.get(key, int, optional=optional)
        if value is not None and abs(value) > most:
            raise self.fail(f"field {key!r} must be at most {most}, not {value}")
        return value

    def numbers(self, what: str, value: Any, n: int) -> tuple[float, ...]:
        """`value` as n coordinates."""
        if not (isinstance(value, list) and len(value) == n and all(map(is_coordinate, value))):
            raise self.fail(f"{what} must be {n} numbers, not {shown(value)}")
        return tuple(map(float, value))

    def point(self, key: str, *, optional: bool = False) -> Point | None:
        """The field's two coordinates; None where it is absent or null and `optional`."""
        value = self.get(key, list, optional=optional)
        if value is None:
            return None
        x, y = self.numbers(f"field {key!r}", value, 2)
        return x, y

    def size(self, key: str) -> tuple[int, int]:
        width, height = self.numbers(f"field {key!r}", self.get(key, list), 2)
        return self._positive(key, int(width), int(height))

    def _positive(self, key: str, width: int, height: int) -> tuple[int, int]:
        if width <= 0 or height <= 0:
            raise self.fail(f"field {key!r}: {width} x {height} px is not a size")
        return width, height

    def width_height(self, width: str, height: str) -> tuple[int, int]:
        return self._positive(f"{width}, {height}", self.get(width, int), self.get(height, int))

    def xywh_boxes(self, value: Any, key: str) -> tuple[BoxTuple, ...]:
        """[[x, y, width, height], …] as corners."""
        boxes = (self.numbers(f"field {key!r}: a box [x, y, width, height]", box, 4) for box in self._list(value, key))
        return tuple((x, y, x + w, y + h) for x, y, w, h in boxes)

    def xyxy_boxes(self, value: Any, key: str) -> tuple[BoxTuple, ...]:
        """[[x1, y1, x2, y2], …]"""
        boxes: list[BoxTuple] = []
        for box in self._list(value, key):
            x1, y1, x2, y2 = self.numbers(f"field {key!r}: a box [x1, y1, x2, y2]", box, 4)
            boxes.append((x1, y1, x2, y2))
            self.in_order(key, boxes[-1])
        return tuple(boxes)

    def in_order(self, key: str, box: BoxTuple) -> None:
        """Raises ScoringError where a box does not name its upper left corner first."""
        x1, y1, x2, y2 = box
        if not (x1 <= x2 and y1 <= y2):
            raise self.fail(
                f"field {key!r}: the corners x1, y1, x2, y2 of {shown(list(box))} are not in order; is it x, y, width, height? "
                "Write corners"
            )

    def _list(self, value: Any, key: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.fail(f"field {key!r} must be a list of boxes, not {shown(value)}")
        return value


def placed(row: PredictionRow, point: Point | None, space: Any, size: tuple[int, int] | None) -> Point | None:
    """A point in the named space, in pixels of the stored screenshot of `size`, to a millionth: a border stays a border.

    In the space `resized` the row holds `seen_width` and `seen_height`. Raises ScoringError.
    """
    if space not in list(Space):
        raise row.fail(f"field 'space' must be one of {', '.join(Space)}, not {shown(space)}")
    if point is None or space == Space.ORIGINAL:
        return point
    if size is None:
        raise row.fail(
            f"a point in the space {Space(space)} needs the size of the screenshot (`width` and `height`, in mai_ui `img_size`)"
        )
    seen = row.width_height("seen_width", "seen_height") if space == Space.RESIZED else size
    place = Viewport(Size(*size), Size(*seen)).point(PlacedPoint(*point, Space(space)), Space.ORIGINAL)
    return point_of(round(place.x, 6), round(place.y, 6))


def is_coordinate(value: Any) -> bool:
    """Whether it is a number (a bool is none), finite and within FARTHEST."""
    return type(value) in (int, float) and -FARTHEST <= value <= FARTHEST


class AnswerReader:
    """Reads the fields of a model's answer in one row. A field that cannot be read counts as absent, and `lacks` says so."""

    def __init__(self, row: PredictionRow) -> None:
        self._row, self._something = row, False
        self.problem = ""
        """What cannot be read first, with file, row and field; empty where all can."""

    def text(self, value: Any, field: str) -> str:
        """`value`, a text or a number, as text; empty where it is neither."""
        if value is None:
            return ""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            self.unreadable(field, "a text", value)
            return ""
        self._something = self._something or bool(normal_value(str(value)))
        return str(value)

    def point(self, value: Any, field: str) -> Point | None:
        """`value`, a list of two numbers, as a point; None where it is not."""
        numbers = self._numbers(value, 2, field, "two numbers [x, y]")
        return (numbers[0], numbers[1]) if numbers else None

    def box(self, value: Any, field: str) -> BoxTuple | None:
        """`value`, a list of four numbers, as a box; None where it is not."""
        numbers = self._numbers(value, 4, field, "four numbers [x1, y1, x2, y2]")
        return (numbers[0], numbers[1], numbers[2], numbers[3]) if numbers else None

    def _numbers(self, value: Any, n: int, field: str, wanted: str) -> list[float] | None:
        if value is None or value == []:
            return None
        if not (isinstance(value, list) and len(value) == n and all(map(is_coordinate, value))):
            self.unreadable(field, wanted, value)
            return None
        self._something = True
        return [float(number) for number in value]

    def unreadable(self, field: str, wanted: str, value: Any) -> None:
        """Records that a part of the answer cannot be read."""
        self.problem = self.problem or unreadable(self._row, field, wanted, value)

    @property
    def lacks(self) -> str:
        """The value of `Case.lacks`."""
        return self.problem or ("" if self._something else NO_PREDICTION)


def unreadable(row: PredictionRow, field: str, wanted: str, value: Any) -> str:
    """What `Case.lacks` says of a field of an answer that cannot be read."""
    return str(row.fail(f"field {field!r} must be {wanted}, not {shown(value)}"))


@contextmanager
def _opened(path: Path, where: Callable[[], str]) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """The file, gzipped or not, and how many bytes of it are read. Raises ScoringError, which names `where()`."""
    try:
        with path.open("rb") as file:
            content: IO[bytes] = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file
            yield content, file.tell
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ScoringError(f"{where()}: damaged or cut-short gzip file ({error}); fetch it again") from error
    except OSError as error:
        raise ScoringError(f"{path}: cannot be read ({error.strerror or error})") from error


def _text(content: bytes) -> str:
    """Decoded UTF-8. Invalid bytes become lone surrogates, so that only the field with them fails."""
    return content.decode(errors="surrogateescape")


def each_case(
    rows: Iterable[PredictionRow | Unread], case_of: Callable[[PredictionRow], Case]
) -> Iterator[Case | Unread]:
    """The case of each row. A row that cannot be read, or whose label cannot be, costs itself."""
    for row in rows:
        if isinstance(row, PredictionRow):
            try:
                yield case_of(row)
            except ScoringError as error:
                yield row.unread(error)
        else:
            yield row


def each_row(path: Path, report: Report | None = None, *, within: str = "") -> Iterator[PredictionRow | Unread]:
    """Every line of a JSON-lines file, or entry of a JSON list, gzipped or not; blank lines are skipped.

    Both are read one after the other. `within` names the field that holds the list, at any depth, where the file is one JSON
    object. `report` gets bytes read, bytes of the file and rows. Raises ScoringError for a file that cannot be read or holds
    none.
    """
    n, reached, rows = 0, 1, f"{path}: row "
    with _opened(path, lambda: f"{rows}{reached}") as (file, position):
        size = path.stat().st_size
        for i, line in jsonlines.lines(file):
            where = f"{rows}{i + 1}"
            reached = i + 2  # reading it may fail
            text = _text(line)
            if n == 0 and text.removeprefix("\ufeff").lstrip().startswith("["):
                yield from _entries(path, list_elements(path, (), report))
                return
            n += 1
            entry, problem = _object(text)
            if n == 1 and within and (problem or f'"{within}"' in text):
                entries = list_elements(path, (within,), report)
                first = _first_of(entries, within)
                if first is not None:
                    yield from _entries(path, chain([first], entries))
                    return
            yield PredictionRow(where, entry) if entry is not None else Unread(where, UNREADABLE_ROW, problem)
            if report is not None and n % _REPORT_EVERY == 0:
                report(position(), size, {"rows": n})
    if n == 0:
        raise ScoringError(f"{path}: holds no rows")


def _object(text: str) -> tuple[dict[str, Any] | None, str]:
    """The JSON object that a text is; or None, and why it is none."""
    try:
        data = jsonlines.parse(text)
    except jsonlines.NotJson as error:
        return None, str(error)
    return (data, "") if isinstance(data, dict) else (None, "must be a JSON object")


def list_elements(path: Path, lists: Collection[str], report: Report | None = None) -> Iterator[tuple[str, Any]]:
    """`jsonlines.members` of a file, gzipped or not. Raises ScoringError, which names the file and the row reached."""
    n = 0

    def where() -> str:
        return f"{path}: row {n + 1}"

    with _opened(path, where) as (file, position):
        size = path.stat().st_size
        try:
            for member in jsonlines.members(file, lists):
                yield member
                n += 1
                if report is not None and n % _REPORT_EVERY == 0:
                    report(position(), size, {"rows": n})
        except jsonlines.NotJson as error:
            raise ScoringError(f"{where()}: {error}; the file is damaged or cut short, fetch it again") from error


def _first_of(members: Iterator[tuple[str, Any]], name: str) -> tuple[str, Any] | None:
    """The first element of the list of that name; None where there is none, or the file is no JSON document."""
    try:
        return next((member for member in members if member[0].rpartition(".")[2] == name), None)
    except ScoringError:
        return None


def _entries(path: Path, elements: Iterable[tuple[str, Any]]) -> Iterator[PredictionRow | Unread]:
    """The objects among the elements of a list, which is that of the first of them."""
    n, of = 0, None
    for name, entry in elements:
        of = name if of is None else of
        if name == of:
            n += 1
            yield entry_row(f"{path}: row {n}", entry)
    if n == 0:
        raise ScoringError(f"{path}: holds no rows")


def entry_row(where: str, entry: Any) -> PredictionRow | Unread:
    """An entry of a JSON list as a row."""
    if isinstance(entry, dict):
        return PredictionRow(where, entry)
    return Unread(where, UNREADABLE_ROW, "the JSON list must hold objects only")


def read_json(path: Path) -> Any:
    """The JSON value of a file, gzipped or not. Raises ScoringError."""
    try:
        with _opened(path, lambda: str(path)) as (file, _):
            content = file.read(MAX_JSON + 1)
        if len(content) > MAX_JSON:
            raise ScoringError(
                f"{path}: holds more than {MAX_JSON:,} bytes of JSON: save it as JSON lines, a row to a line"
            )
        return jsonlines.parse(_text(content))
    except jsonlines.NotJson as error:
        raise ScoringError(f"{path}: {error}") from error
