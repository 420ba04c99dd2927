"""Small files in the real formats, made by the tests. Nothing here comes from a dataset."""

from __future__ import annotations

import gzip
import io
import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from coepg_dagster.readers.tfrecord import Example, Forest, masked_crc

Rect = tuple[int, int, int, int]


def load(out: Path) -> pa.Table:
    """The steps that `import_dataset` left in a folder."""
    return pa.concat_tables([pa.ipc.open_file(file).read_all() for file in sorted(out.glob("*.arrow"))])


def framed(data: bytes) -> bytes:
    """`data` as one TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def picture(width: int, height: int, format: str = "PNG", *marks: Rect) -> bytes:
    """A white image with black rectangles, encoded."""
    image = Image.new("RGB", (width, height), "white")
    for mark in marks:
        ImageDraw.Draw(image).rectangle(mark, fill="black")
    out = io.BytesIO()
    image.save(out, format)
    return out.getvalue()


def candidate(x: float, y: float, w: float, h: float, **more: Any) -> str:
    attributes = json.dumps({"backend_node_id": "7", "bounding_box_rect": f"{x},{y},{w},{h}", "class": "b"})
    return json.dumps(
        {"tag": "button", "attributes": attributes, "backend_node_id": "7", "is_original_target": True} | more
    )


def mind2web_row(task: str = "t0", index: int = 0, **change: Any) -> dict[str, Any]:
    """One row of Multimodal-Mind2Web: three actions a task, a page of 1280 × 2600 px, one target at (100, 1700)."""
    return {
        "action_uid": f"a{index}",
        "raw_html": "<html/>",
        "cleaned_html": "<html/>",
        "operation": json.dumps({"op": "TYPE", "original_op": "TYPE", "value": "10203"}),
        "pos_candidates": [candidate(100, 1700, 200.5, 40)],
        "neg_candidates": [candidate(0, 0, 10, 10)],
        "website": "thumbtack",
        "domain": "Service",
        "subdomain": "Home",
        "annotation_id": task,
        "confirmed_task": "Find a photographer",
        "screenshot": {"bytes": picture(1280, 2600, "JPEG", (100, 1700, 300, 1740)), "path": None},
        "action_reprs": [
            "[textbox]  Search -> TYPE: wedding",
            "[textbox]  Zip code -> TYPE: 10203",
            "[button]  Go -> CLICK",
        ],
        "target_action_index": str(index),
        "target_action_reprs": "[textbox]  Zip code -> TYPE: 10203",
    } | change


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_mind2web(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(rows[0])
    types = {
        "screenshot": IMAGE,
        "pos_candidates": pa.list_(pa.string()),
        "neg_candidates": pa.list_(pa.string()),
        "action_reprs": pa.list_(pa.string()),
    }
    schema = pa.schema([pa.field(name, types.get(name, pa.string())) for name in names])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=4)
    return path


def forest(*nodes: tuple[Rect, bool, int, str]) -> bytes:
    """An accessibility forest of one window: (bounds, clickable, depth, text) of each node."""
    message = Forest()
    tree = message.windows.add(layer=1).tree
    for i, (rect, clickable, depth, text) in enumerate(nodes):
        node = tree.nodes.add(unique_id=i, is_clickable=clickable, depth=depth, text=text)
        bounds = node.bounds_in_screen
        bounds.left, bounds.top, bounds.right, bounds.bottom = rect
    return bytes(message.SerializeToString())


SCREEN = (270, 600)
NODES = (
    ((0, 0, 270, 600), True, 0, "root"),
    ((20, 100, 120, 160), True, 2, "Trash"),
    ((20, 100, 60, 130), False, 3, "icon"),
)
ACTIONS = [
    {"action_type": "open_app", "app_name": "Drive"},
    {"action_type": "click", "x": 50, "y": 120},
    {"action_type": "scroll", "direction": "down"},
    {"action_type": "input_text", "text": "report"},
    {"action_type": "type", "x": 30, "y": 150, "text": "None"},
    {"action_type": "long_press", "x": 200, "y": 500},
    {"action_type": "navigate_back"},
    {"action_type": "navigate_home"},
    {"action_type": "wait"},
]


def episode(number: int = 0, done: list[dict[str, Any]] | None = None, **change: list[Any]) -> bytes:
    """One serialised AndroidControl record; `change` replaces features."""
    done = ACTIONS if done is None else done
    n = len(done) + 1
    features: dict[str, list[Any]] = {
        "episode_id": [number],
        "goal": [b"Restore the report"],
        "screenshots": [picture(*SCREEN)] * n,
        "accessibility_trees": [forest(*NODES)] * n,
        "screenshot_widths": [SCREEN[0]] * n,
        "screenshot_heights": [SCREEN[1]] * n,
        "actions": [json.dumps(action).encode() for action in done],
        "step_instructions": [f"do step {i}".encode() for i in range(len(done))],
    } | change
    example = Example()
    for name, values in features.items():
        feature = example.features.feature[name]
        (feature.int64_list if isinstance(values[0], int) else feature.bytes_list).value.extend(values)
    return bytes(example.SerializeToString())


def write_android_control(folder: Path, records: list[bytes], splits: dict[str, list[int]] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "android_control-00000-of-00001"
    path.write_bytes(gzip.compress(b"".join(framed(record) for record in records)))
    (folder / "splits.json").write_text(json.dumps(splits or {"train": [0, 1], "validation": [2], "test": [3, 4]}))
    (folder / "test_subsplits.json").write_text(json.dumps({"IDD": [3], "app_unseen": [4], "task_unseen": [4]}))
    return path


def user_row(step_id: str = "s0", **change: Any) -> dict[str, Any]:
    return {
        "step_id": step_id,
        "episode_id": "shop",
        "step_index": 0,
        "split": "train",
        "family": "shop.example",
        "goal": "Buy a scarf",
        "history": ["CLICK [Scarves]"],
        "image": "images/1.png",
        "boxes": [[10, 10, 50, 30]],
        "action_type": "CLICK",
        "value": "",
    } | change


def write_user_rows(folder: Path, rows: list[dict[str, Any] | str]) -> Path:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "images/1.png").write_bytes(picture(100, 60))
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    (folder / "steps.jsonl").write_text(text + "\n")
    return folder
