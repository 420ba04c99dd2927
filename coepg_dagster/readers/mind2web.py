"""Multimodal-Mind2Web: the Parquet files of osunlp/Multimodal-Mind2Web, and UGround's block samples of its test splits.

Candidates are JSON in JSON; zero to fourteen are positive. Histories are rebuilt from the task's action representations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from coepg_dagster.prompts import normal_value
from coepg_dagster.readers.files import Files, files_below
from coepg_dagster.readers.images import Resize, opened, prepared, too_small
from coepg_dagster.readers.rows import (
    TRAINED,
    BoxTuple,
    Reject,
    RejectedRow,
    Step,
    attempted,
    numbers,
    of_picture,
    parse_json,
    part_of,
    position,
    target_boxes,
    texts,
    wanted,
)
from coepg_dagster.readers.source_rows import SourceRow, of_lines, of_parquet
from coepg_dagster.readers.views import Rule, blocks, choose

COLUMNS: Final = (
    "action_uid",
    "annotation_id",
    "website",
    "confirmed_task",
    "operation",
    "pos_candidates",
    "screenshot",
    "action_reprs",
    "target_action_index",
)
SPLITS: Final = ("train", "test_task", "test_website", "test_domain")
OPERATIONS: Final = frozenset({"CLICK", "TYPE", "SELECT"})
VALIDATION_PERCENT: Final = 5
"""Share of training tasks that become the validation split, chosen by a hash of annotation_id (the dataset has none)."""


def split_of(path: Path, annotation_id: str) -> str:
    """The split of a row: the file's, but `validation` for a fixed part of the training tasks."""
    name = path.name.split("-")[0].removesuffix(".parquet")
    if name not in SPLITS:
        raise RejectedRow("bad_file", f"file names start with one of {', '.join(SPLITS)}, not {name!r}")
    if name == "train":
        digest = hashlib.sha256(annotation_id.encode()).digest()
        if int.from_bytes(digest[:8]) % 100 < VALIDATION_PERCENT:
            return "validation"
    return name


def files(source: Path) -> list[Path]:
    """The Parquet files of a local copy, in order of name."""
    return [source] if source.is_file() else files_below(source, lambda name: name.endswith(".parquet"))


def rows(path: Path, view: Rule, resize: Resize, shrink: bool) -> Iterator[SourceRow | Reject]:
    """A SourceRow per row of one Parquet file; not a Parquet file: one Reject."""
    return of_parquet(path, COLUMNS, lambda row, _: [convert(row, path, view, resize, shrink)])


def target_box(candidate: object) -> BoxTuple:
    """The box of a positive candidate (JSON, its `attributes` JSON again) in page pixels; it may lie off the page."""
    data = parse_json(candidate, "a positive candidate")
    if not isinstance(data, dict) or "attributes" not in data:
        raise RejectedRow("bad_candidates", f"{candidate!r:.80} has no attributes")
    attributes = parse_json(data["attributes"], "a candidate's attributes")
    rect = attributes.get("bounding_box_rect") if isinstance(attributes, dict) else None
    if not isinstance(rect, str):
        raise RejectedRow("bad_candidates", "a positive candidate has no bounding_box_rect")
    try:
        x, y, w, h = (float(part) for part in rect.split(","))
    except ValueError:
        raise RejectedRow("bad_candidates", f"bounding_box_rect {rect!r} is not x,y,w,h") from None
    return x, y, x + w, y + h


def convert(row: Mapping[str, Any], path: Path, view: Rule, resize: Resize, shrink: bool) -> Step:
    """The step of one row; raises RejectedRow where it is left out."""
    annotation = wanted(row, "annotation_id", str)
    split = split_of(path, annotation)
    with part_of(split):
        return _step(row, annotation, split, view, resize, shrink)


def _step(row: Mapping[str, Any], annotation: str, split: str, view: Rule, resize: Resize, shrink: bool) -> Step:
    reprs = texts(wanted(row, "action_reprs", list), "action_reprs")
    index = position(wanted(row, "target_action_index", str, int), "target_action_index")
    if index >= len(reprs):
        raise RejectedRow("bad_field", f"target_action_index {index!r} is not a position in {len(reprs)} action_reprs")
    action_type, value = operation(parse_json(wanted(row, "operation", str), "operation"))
    screenshot = row["screenshot"]
    source = screenshot.get("bytes") if isinstance(screenshot, dict) else screenshot
    if not isinstance(source, bytes):
        raise RejectedRow("no_screenshot", "the screenshot is null")
    image = opened(source)
    candidates = attempted(target_box, wanted(row, "pos_candidates", list, type(None)) or [])
    boxes, faults = target_boxes(candidates, image.size, trained=split in TRAINED)
    place, held, rule = choose(boxes, *image.size, "target_block" if view == "scroll" and split in TRAINED else view)
    if not held and split in TRAINED:
        raise RejectedRow("no_target", f"{len(boxes)} positive candidates, none of which fits into a view")
    # a page that is scrolled is cut into blocks later, at its own size
    ready = prepared(image, source, view=place, boxes=held, resize=resize if shrink and rule != "scroll" else None)
    seen = blocks(*image.size)[0][2:] if rule == "scroll" else ready.size
    return ready.step(
        step_id=f"{annotation}_{wanted(row, 'action_uid', str)}",
        split=split,
        episode_id=annotation,
        step_index=index,
        family=wanted(row, "website", str),
        goal=wanted(row, "confirmed_task", str),
        history=reprs[:index],
        action_type=action_type,
        value=value,
        episode_steps=len(reprs),
        view=list(place),
        view_rule=rule,
        noticed=(*faults, *noticed(ready.boxes, seen, resize)),
    )


def operation(data: object) -> tuple[str, str]:
    """(action type, value) of `operation`; HOVER and ENTER are clicks, and a click has no value."""
    if not isinstance(data, dict):
        raise RejectedRow("bad_field", f"operation must be an object, not {data!r:.80}")
    name, value = data.get("op"), data.get("value", "")
    if name in ("HOVER", "ENTER"):
        name = "CLICK"
    if not isinstance(name, str) or name not in OPERATIONS:
        raise RejectedRow("unknown_action", f"operation {name!r} is none of {', '.join(sorted(OPERATIONS))}")
    if not isinstance(value, str):
        raise RejectedRow("bad_field", f"the operation's value must be text, not {value!r:.80}")
    return name, "" if name == "CLICK" else normal_value(value)


def noticed(boxes: list[BoxTuple], size: tuple[int, int], resize: Resize) -> tuple[str, ...]:
    """Facts worth counting: several targets, none, one that becomes too small to read."""
    facts = []
    if len(boxes) > 1:
        facts.append("several_targets")
    if not boxes:
        facts.append("no_target")
    if boxes and all(too_small(box, size, resize) for box in boxes):
        facts.append("target_too_small")
    return tuple(facts)


# --- UGround's blocks -------------------------------------------------------------------------------------------------


def block_files(source: Path) -> list[Path]:
    """The sample files `*_blocks.jsonl` of a folder, or the one file."""
    return [source] if source.is_file() else files_below(source, lambda name: name.endswith("_blocks.jsonl"))


def block_rows(path: Path, images: Files, resize: Resize) -> Iterator[SourceRow | Reject]:
    """A SourceRow per row of a sample file; `images` holds the folders of blocks."""
    return of_lines(path, lambda line, _: [convert_block(line, images, resize)])


def convert_block(line: bytes, images: Files, resize: Resize) -> Step:
    """The step of one row: its first block with a target, or block 0 where it has none. Boxes are block pixels."""
    row = parse_json(line, "the row")
    if not isinstance(row, dict):
        raise RejectedRow("bad_field", "the row must be an object")
    split = f"test_{wanted(row, 'split', str)}"
    with part_of(split):
        return _block_step(row, split, images, resize)


def _block_step(row: Mapping[str, Any], split: str, images: Files, resize: Resize) -> Step:
    targets = {position(name, "a block"): held for name, held in wanted(row, "target_blocks", dict).items()}
    block = min(targets, default=0)
    name = str(Path(wanted(row, "blocks_path", str)) / f"{block}.png")
    source = images.image(name)
    with of_picture(name):
        image = opened(source)
    boxes, faults = target_boxes(attempted(_block_box, targets.get(block, [])), image.size, trained=False)
    action_type, value = operation({"op": wanted(row, "operation", str), "value": wanted(row, "value", str)})
    annotation = wanted(row, "annotation_id", str)
    ready = prepared(image, source, boxes=boxes)
    return ready.step(
        step_id=f"{annotation}_{wanted(row, 'action_uid', str)}",
        split=split,
        episode_id=annotation,
        step_index=position(wanted(row, "step", int), "step"),
        family=wanted(row, "website", str),
        goal=wanted(row, "task", str),
        history=texts(wanted(row, "previous_actions", list), "previous_actions"),
        action_type=action_type,
        value=value,
        episode_steps=position(wanted(row, "total_steps", int), "total_steps"),
        view_rule=f"block {block}",
        noticed=(*faults, *noticed(boxes, image.size, resize)),
    )


def _block_box(entry: object) -> BoxTuple:
    x, y, w, h = numbers(entry, 4, "a box of target_blocks")
    return x, y, x + w, y + h
