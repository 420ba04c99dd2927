"""Boards of single grounding queries in the layouts that their owners publish: ScreenSpot, its v2 and Pro, OSWorld-G and its
refined instructions, MMBench-GUI L2, UI-Vision's element grounding.

A label is read without its image, for `coepg score --labels`; with it, it is a step of the split `test`, whose goal is the
instruction. Layouts, from the folder that an owner's archive or repository unpacks to:

    screenspot_v1      screenspot_DEVICE.json; images in screenspot_imgs/; `bbox` x, y, width, height in px
    screenspot_v2      screenspot_DEVICE_v2.json; images in screenspotv2_image/; as v1
    screenspot_pro     annotations/APPLICATION_SYSTEM.json; images/; `bbox` corners in px
    osworld_g          OSWorld-G.json, osworld_g_refined OSWorld-G_refined.json; images/; `box_type` bbox (x, y, width, height),
                       polygon (x, y, x, y, …) or refusal; the abilities of the paper in classification_result.json
    mmbench_gui        L2_annotations.json; offline_images/PLATFORM/; `bbox` corners in 0..1
    ui_vision          element_grounding_CATEGORY.json; images/; `bbox` any two opposite corners in px

Files in ScreenSpot-Pro's fields are read for every board, since people convert the others to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from coepg_dagster import jsonlines
from coepg_dagster.readers.files import Files, files_below
from coepg_dagster.readers.images import Resize, opened, prepared, too_small
from coepg_dagster.readers.rows import (
    BoxTuple,
    ReaderError,
    Reject,
    RejectedRow,
    Step,
    numbers,
    of_picture,
    parse_json,
    part_of,
    target_boxes,
    wanted,
)
from coepg_dagster.readers.screenspot import PLATFORMS, SOURCES
from coepg_dagster.readers.source_rows import SourceRow

Board = Literal[
    "screenspot_v1", "screenspot_v2", "screenspot_pro", "osworld_g", "osworld_g_refined", "mmbench_gui", "ui_vision"
]
SPLIT: Final = "test"
_CATEGORIES: Final = ("basic", "functional", "spatial")
ABILITIES: Final = "classification_result.json"


@dataclass(frozen=True)
class _Layout:
    """Which files hold the labels of a board, and where its images are."""

    annotations: re.Pattern[str]  # of the names of files in a folder
    images: tuple[str, ...]  # folders, relative to that of the whole board; the first that has an image


_LAYOUTS: Final[Mapping[Board, _Layout]] = {
    "screenspot_v1": _Layout(re.compile(r"screenspot_(desktop|mobile|web)\.json"), ("screenspot_imgs", "")),
    "screenspot_v2": _Layout(re.compile(r"screenspot_(desktop|mobile|web)_v2\.json"), ("screenspotv2_image", "")),
    "screenspot_pro": _Layout(re.compile(r"\w+_(windows|macos|linux)\.json"), ("images", "")),
    "osworld_g": _Layout(re.compile(r"OSWorld-G\.json"), ("images", "benchmark/images", "")),
    "osworld_g_refined": _Layout(re.compile(r"OSWorld-G_refined\.json"), ("images", "benchmark/images", "")),
    "mmbench_gui": _Layout(
        re.compile(r"L2_annotations\.json"), ("offline_images", "MMBench-GUI-OfflineImages/offline_images", "")
    ),
    "ui_vision": _Layout(re.compile(r"element_grounding_(basic|functional|spatial)\.json"), ("images", "")),
}
BOARDS: Final = tuple(_LAYOUTS)


def board_of(protocol: str) -> Board | None:
    """The board whose items a protocol scores; None where it is of no grounding board."""
    family = protocol.split("/")[0]
    return next((board for board in BOARDS if board.removesuffix("_v1") == family), None)


@dataclass(frozen=True, slots=True)
class Label:
    """One item of a board: what is asked, and where the target is, in pixels of the stored screenshot."""

    item: str  # the board's own id, else FILE_NUMBER
    instruction: str
    image: str  # as the board names it, with the folders that it gives
    boxes: tuple[BoxTuple, ...]  # empty: there is no target (refusal)
    size: tuple[int, int] | None = None  # of the image, as the board states it
    polygon: tuple[tuple[float, float], ...] = ()  # corners; `boxes` then holds what surrounds it
    group: str = ""  # class of the board's main average
    ui_type: str = ""
    application: str = ""
    platform: str = ""
    abilities: tuple[str, ...] = ()  # OSWorld-G: those of the paper, as its owner classified the item


def annotation_files(board: Board, source: Path) -> list[Path]:
    """The files that hold the labels of a board, in order: of a folder those of its layout, or the one file.

    Raises ReaderError where there are none, and for a file that is named as another version's.
    """
    layout = _LAYOUTS[board]
    if source.is_file():
        of_others = [name for name, other in _LAYOUTS.items() if other.annotations.fullmatch(source.name)]
        if of_others and board not in of_others:
            raise ReaderError(f"{source}: holds labels of {of_others[0]}, not of {board}; give the file of {board}")
        return [source]
    files = files_below(source, lambda name: layout.annotations.fullmatch(name) is not None)
    if not files:
        raise ReaderError(
            f"{source}: holds no labels of {board}, whose files are named {layout.annotations.pattern.replace(chr(92), '')}; "
            "give the folder that its owner's archive unpacks to, or one such file"
        )
    return files


def labels(board: Board, source: Path) -> Iterator[Label | Reject]:
    """The labels of a board, one after the other; a Reject for an entry that cannot be read. Raises ReaderError."""
    for path in annotation_files(board, source):
        abilities = _abilities(path) if board.startswith("osworld_g") else {}
        for i, entry in _entries(path):
            try:
                with part_of(SPLIT):
                    yield label_of(board, entry, i, path.stem, abilities)
            except RejectedRow as rejected:
                yield rejected.reject(str(path), str(i))


def _entries(path: Path) -> Iterator[tuple[int, Any]]:
    """The entries of a JSON list. Raises ReaderError."""
    try:
        with path.open("rb") as file:
            for i, (_, entry) in enumerate(jsonlines.members(file, ())):
                yield i, entry
    except (OSError, jsonlines.NotJson) as error:
        raise ReaderError(f"{path}: cannot be read as a JSON list ({error}); fetch it again") from error


def _abilities(annotations: Path) -> dict[str, tuple[str, ...]]:
    """Item → the abilities of the paper, from the file beside the labels; empty where there is none.

    Raises ReaderError for a file of another form.
    """
    path = annotations.with_name(ABILITIES)
    if not path.is_file():
        return {}
    try:
        classified = parse_json(path.read_bytes(), str(path))["classified"]
        of: dict[str, list[str]] = {}
        for ability, entries in classified.items():
            for entry in entries:
                of.setdefault(str(entry["id"] if isinstance(entry, dict) else entry), []).append(ability)
    except (OSError, RejectedRow, LookupError, TypeError, AttributeError) as error:
        raise ReaderError(f"{path}: is no list of items by ability ({error}); fetch it again, or remove it") from error
    return {item: tuple(sorted(set(names))) for item, names in of.items()}


def label_of(
    board: Board, entry: object, i: int, file: str, abilities: Mapping[str, tuple[str, ...]] | None = None
) -> Label:
    """The label in an entry: the i-th (from 0) of the file of that name without ending. Raises RejectedRow."""
    if not isinstance(entry, dict):
        raise RejectedRow("bad_field", f"an annotation must be an object, not {entry!r:.80}")
    own = entry.get("id", entry.get("index"))
    item = str(own) if isinstance(own, str | int) and not isinstance(own, bool) else f"{file}_{i}"
    if "img_size" in entry and "bbox" in entry:
        return _in_pro_fields(board, entry, item, file)
    match board:
        case "screenspot_v1" | "screenspot_v2":
            return _screenspot(entry, f"{file}_{i}", file)
        case "osworld_g" | "osworld_g_refined":
            return _osworld_g(entry, item, abilities or {})
        case "mmbench_gui":
            return _mmbench_gui(entry, item)
        case "ui_vision":
            return _ui_vision(entry, f"{file}_{i}", file)
    raise RejectedRow("missing_column", "'img_size' is missing")


def _text(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    return value if isinstance(value, str) else ""


def _size(entry: Mapping[str, Any], key: str) -> tuple[int, int]:
    width, height = numbers(wanted(entry, key, list), 2, key)
    if width < 1 or height < 1:
        raise RejectedRow("bad_field", f"{key}: {width:g} x {height:g} px is not a size")
    return int(width), int(height)


def _corners(value: object, key: str) -> BoxTuple:
    x1, y1, x2, y2 = numbers(value, 4, key)
    return x1, y1, x2, y2


def _from_upper_left(value: object, key: str) -> BoxTuple:
    """[x, y, width, height] as corners."""
    x, y, width, height = numbers(value, 4, key)
    return x, y, x + width, y + height


def _screenspot(entry: Mapping[str, Any], item: str, file: str) -> Label:
    source = _text(entry, "data_source")
    device = next((name for name in PLATFORMS if name in file), SOURCES.get(source, "web"))
    ui_type = wanted(entry, "data_type", str)
    return Label(
        item=item,
        instruction=wanted(entry, "instruction", str),
        image=wanted(entry, "img_filename", str),
        boxes=(_from_upper_left(wanted(entry, "bbox", list), "bbox"),),
        group=f"{device}_{ui_type}",
        ui_type=ui_type,
        platform=source,
    )


def _in_pro_fields(board: Board, entry: Mapping[str, Any], item: str, file: str) -> Label:
    box, ui_type = _corners(wanted(entry, "bbox", list), "bbox"), _text(entry, "ui_type")
    group = _text(entry, "group")
    if board in ("screenspot_v1", "screenspot_v2"):
        names = f"{file} {_text(entry, 'application')} {_text(entry, 'platform')}".lower()
        group = f"{next((name for name in PLATFORMS if name in names), 'web')}_{ui_type}"
    elif board == "ui_vision":
        group = next((name for name in _CATEGORIES if name in file.lower()), group)
    return Label(
        item=item,
        instruction=wanted(entry, "instruction", str),
        image=wanted(entry, "img_filename", str),
        boxes=(box,) if any(box) else (),
        size=_size(entry, "img_size"),
        group=group,
        ui_type=ui_type,
        application=_text(entry, "application"),
        platform=_text(entry, "platform"),
    )


def _osworld_g(entry: Mapping[str, Any], item: str, abilities: Mapping[str, tuple[str, ...]]) -> Label:
    kind, value = wanted(entry, "box_type", str), entry.get("box_coordinates")
    boxes: tuple[BoxTuple, ...] = ()
    polygon: tuple[tuple[float, float], ...] = ()
    match kind:
        case "bbox":
            boxes = (_from_upper_left(value, "box_coordinates"),)
        case "polygon":
            if not isinstance(value, list) or len(value) < 6 or len(value) % 2:
                raise RejectedRow("bad_field", f"box_coordinates of a polygon must be x, y, x, y, …, not {value!r:.80}")
            flat = numbers(value, len(value), "box_coordinates")
            polygon = tuple(zip(flat[::2], flat[1::2], strict=True))
            boxes = ((min(flat[::2]), min(flat[1::2]), max(flat[::2]), max(flat[1::2])),)
        case "refusal":
            pass
        case _:
            raise RejectedRow("bad_field", f"box_type {kind!r} is none of bbox, polygon, refusal")
    return Label(
        item=item,
        instruction=wanted(entry, "instruction", str),
        image=wanted(entry, "image_path", str),
        boxes=boxes,
        size=_size(entry, "image_size"),
        polygon=polygon,
        abilities=abilities.get(item, ()),
    )


def _mmbench_gui(entry: Mapping[str, Any], item: str) -> Label:
    width, height = size = _size(entry, "image_size")
    x1, y1, x2, y2 = _corners(wanted(entry, "bbox", list), "bbox")
    if max(x1, y1, x2, y2) <= 1:  # as the owner's evaluator: parts of the screen, else pixels
        x1, y1, x2, y2 = x1 * width, y1 * height, x2 * width, y2 * height
    platform, name = wanted(entry, "platform", str), wanted(entry, "image_path", str)
    return Label(
        item=f"{platform}_{item}",  # nothing says that an index is unique over platforms
        instruction=wanted(entry, "instruction", str),
        image=name if name.startswith(f"{platform}/") else f"{platform}/{name}",
        boxes=((x1, y1, x2, y2),),
        size=size,
        group=wanted(entry, "grounding_type", str),
        ui_type=_text(entry, "data_type"),
        application=_text(entry, "app_name"),
        platform=platform,
    )


def _ui_vision(entry: Mapping[str, Any], item: str, file: str) -> Label:
    x1, y1, x2, y2 = _corners(wanted(entry, "bbox", list), "bbox")
    category = next((name for name in _CATEGORIES if name in file), _text(entry, "category"))
    return Label(
        item=item,
        instruction=wanted(entry, "prompt_to_evaluate", str),
        image=wanted(entry, "image_path", str),
        boxes=((min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)),),
        size=_size(entry, "image_size"),
        group=category,
        ui_type=_text(entry, "element_type"),
        platform=_text(entry, "platform"),
    )


# --- steps ------------------------------------------------------------------------------------------------------------


def rows(
    board: Board, source: Path, path: Path, images: Files, resize: Resize, shrink: bool
) -> Iterator[SourceRow | Reject]:
    """A SourceRow per entry of one file of labels of the board in `source`."""
    found = _Images(_LAYOUTS[board].images, source, images)
    try:
        for i, entry in _entries(path):
            yield SourceRow(str(path), str(i), partial(_steps, board, entry, i, path, found, resize, shrink))
    except ReaderError as error:
        yield Reject(str(path), "", "bad_file", str(error))


def image_file(board: Board, images: Path, name: str) -> Path:
    """Where the image that a label names is or should be, below the folder of images."""
    return images / _image_name(_LAYOUTS[board].images, images, name)


def _image_name(folders: tuple[str, ...], images: Path, name: str) -> str:
    paths = [f"{folder}/{name}" if folder else name for folder in folders]
    return next((path for path in paths if (images / path).is_file()), paths[0])


@dataclass(frozen=True)
class _Images:
    """Where the images of a board are."""

    folders: tuple[str, ...]
    source: Path
    files: Files

    def read(self, name: str) -> bytes:
        """The image that a label names, from the first folder that has it. Raises RejectedRow."""
        return self.files.image(_image_name(self.folders, self.files.images, name))


def _steps(
    board: Board, entry: object, i: int, path: Path, images: _Images, resize: Resize, shrink: bool
) -> list[Step]:
    with part_of(SPLIT):
        label = label_of(board, entry, i, path.stem)
        source = images.read(label.image)
        with of_picture(label.image):
            image = opened(source)
        if label.size is not None and image.size != label.size:
            raise RejectedRow(
                "bad_field",
                f"{label.image!r} has {image.size[0]} x {image.size[1]} px, the label is for "
                f"{label.size[0]} x {label.size[1]}",
            )
        boxes, faults = target_boxes(label.boxes, image.size, trained=False)
        ready = prepared(image, source, boxes=boxes, resize=resize if shrink else None)
        small = bool(boxes) and too_small(boxes[0], image.size, resize)
        return [
            ready.step(
                step_id=label.item,
                episode_id=label.image,
                family=label.group or board,
                split=SPLIT,
                step_index=0,
                goal=label.instruction,
                history=[],
                action_type="CLICK",
                value="",
                noticed=(*faults, *(("target_too_small",) if small else ())),
            )
        ]
