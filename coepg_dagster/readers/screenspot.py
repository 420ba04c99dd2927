"""ScreenSpot, ScreenSpot-v2 and ScreenSpot-Pro: annotation files (JSON, or UGround's JSON lines) and a folder of images;
or the hub's Parquet files, which hold the images.

A step is one instruction with one box; `family` is the group of the averages: "mobile_text", or "CAD_icon" in -Pro.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from PIL import Image

from coepg_dagster.readers.files import Files, files_below
from coepg_dagster.readers.images import Resize, opened, prepared, too_small
from coepg_dagster.readers.rows import (
    BoxTuple,
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
from coepg_dagster.readers.source_rows import SourceRow, of_lines, of_parquet

SPLIT: Final = "test"
MAX_LIST: Final = 1 << 28
"""Bytes of a JSON list of annotations; the largest published one has about 1 MB."""
PLATFORMS: Final = ("mobile", "desktop", "web")


def files(source: Path) -> list[Path]:
    """The annotation files of a folder, or the one file."""
    if source.is_file():
        return [source]
    return files_below(source, lambda name: name.endswith((".json", ".jsonl", ".parquet")))


def rows(path: Path, images: Files, resize: Resize, shrink: bool) -> Iterator[SourceRow | Reject]:
    """A SourceRow per annotation of one file."""
    if path.suffix == ".parquet":
        return of_parquet(path, COLUMNS, lambda row, i: [_parquet_step(row, i, path, resize, shrink)])
    if path.suffix == ".jsonl":
        return of_lines(path, lambda line, i: _of_entry(line, i, path, images, resize, shrink))
    return _listed(path, images, resize, shrink)


def _listed(path: Path, images: Files, resize: Resize, shrink: bool) -> Iterator[SourceRow | Reject]:
    """A SourceRow per entry of a JSON list. Invalid UTF-8 becomes lone surrogates, so that only its entry is rejected."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_LIST + 1)
        if len(content) > MAX_LIST:
            raise RejectedRow(
                "bad_file", f"has more than {MAX_LIST:,} bytes: save it as JSON lines, an annotation to a line"
            )
        entries = parse_json(content.decode("utf-8", "surrogateescape"), str(path))
    except (OSError, RejectedRow) as error:
        yield Reject(str(path), "", "bad_file", str(error))
        return
    if not isinstance(entries, list):
        yield Reject(str(path), "", "bad_file", "must be a list of annotations")
        return
    for i, entry in enumerate(entries):
        yield SourceRow(str(path), str(i), partial(_of_entry, entry, i, path, images, resize, shrink))


def _of_entry(entry: object, i: int, path: Path, images: Files, resize: Resize, shrink: bool) -> list[Step]:
    with part_of(SPLIT):
        data = parse_json(entry, "the line") if isinstance(entry, bytes) else entry
        return [convert(data, i, path, images, resize, shrink)]


COLUMNS: Final = ("file_name", "bbox", "instruction", "data_type", "data_source", "image")
SOURCES: Final = {"ios": "mobile", "android": "mobile", "windows": "desktop", "macos": "desktop"}
"""Platform by data_source; every other source (gitlab, shop, forum, tool) is the web."""


def _parquet_step(row: Mapping[str, Any], i: int, path: Path, resize: Resize, shrink: bool) -> Step:
    """Boxes of the hub's files are corners in 0..1."""
    with part_of(SPLIT):
        return _of_parquet(row, i, path, resize, shrink)


def _of_parquet(row: Mapping[str, Any], i: int, path: Path, resize: Resize, shrink: bool) -> Step:
    source = row["image"].get("bytes") if isinstance(row["image"], dict) else None
    if not isinstance(source, bytes):
        raise RejectedRow("no_screenshot", "the image is null")
    image = opened(source)
    x1, y1, x2, y2 = numbers(row["bbox"], 4, "bbox")
    width, height = image.size
    box = (x1 * width, y1 * height, x2 * width, y2 * height)
    family = f"{SOURCES.get(wanted(row, 'data_source', str), 'web')}_{wanted(row, 'data_type', str)}"
    about = {"step_id": f"{path.stem}_{i:05d}", "episode_id": wanted(row, "file_name", str), "family": family}
    return _step(row, about, source, image, box, resize, shrink)


def group(data: Mapping[str, Any], path: Path) -> str:
    """ "CAD_icon" of -Pro's group and ui_type; "mobile_text" of platform (stated, or in the file's name) and data_type."""
    if "group" in data and "ui_type" in data:
        return f"{wanted(data, 'group', str)}_{wanted(data, 'ui_type', str)}"
    platform = data.get("platform") or next((p for p in PLATFORMS if p in path.name), None)
    if platform not in PLATFORMS:
        raise RejectedRow(
            "bad_field", f"platform {platform!r} is none of {', '.join(PLATFORMS)}; state it, or name the file after it"
        )
    return f"{platform}_{wanted(data, 'data_type', str)}"


def convert(data: object, i: int, path: Path, images: Files, resize: Resize, shrink: bool) -> Step:
    """The step of one annotation. -Pro's boxes are corners, the others x, y, width, height."""
    if not isinstance(data, dict):
        raise RejectedRow("bad_field", f"an annotation must be an object, not {data!r:.80}")
    name = wanted(data, "img_filename" if "img_filename" in data else "image", str)
    source = images.image(name)
    with of_picture(name):
        image = opened(source)
    a, b, c, d = numbers(wanted(data, "bbox", list), 4, "bbox")
    corners = "img_size" in data and "ui_type" in data
    box = (a, b, c, d) if corners else (a, b, a + c, b + d)
    step_id = str(data["id"]) if isinstance(data.get("id"), str) else f"{path.stem}_{i:05d}"
    about = {"step_id": step_id, "episode_id": name, "family": group(data, path)}
    return _step(data, about, source, image, box, resize, shrink)


def _step(
    data: Mapping[str, Any],
    about: Mapping[str, str],
    source: bytes,
    image: Image.Image,
    box: BoxTuple,
    resize: Resize,
    shrink: bool,
) -> Step:
    """The step of an annotation, with the columns `about`."""
    boxes, faults = target_boxes([box], image.size, trained=False)
    ready = prepared(image, source, boxes=boxes, resize=resize if shrink else None)
    small = bool(boxes) and too_small(box, image.size, resize)
    return ready.step(
        **about,
        split=SPLIT,
        step_index=0,
        goal=wanted(data, "instruction", str),
        history=[],
        action_type="CLICK",
        value="",
        noticed=(*faults, *(("target_too_small",) if small else ())),
    )
