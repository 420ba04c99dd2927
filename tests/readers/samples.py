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


SIZE = (300, 260)
"""Of the images of `write_board`."""
ASKED = "close the window"


def write_board(folder: Path, board: str, *changes: dict[str, Any]) -> Path:
    """Two items of a board in its owner's layout, with their images; each of `changes` is laid over one more entry.

    The target of both is the box (100, 200, 160, 240); that of the second item of OSWorld-G is a triangle.
    """
    corners, upper_left = [100, 200, 160, 240], [100, 200, 60, 40]
    match board:
        case "screenspot_v1" | "screenspot_v2":
            ending, images = ("_v2", "screenspotv2_image") if board.endswith("2") else ("", "screenspot_imgs")
            file, name = folder / f"screenspot_mobile{ending}.json", folder / images / "a.png"
            entry: dict[str, Any] = {"img_filename": "a.png", "bbox": upper_left, "instruction": ASKED}
            entries = [entry | {"data_type": kind, "data_source": "ios"} for kind in ("text", "icon")]
        case "screenspot_pro":
            file, name = folder / "annotations/vscode_macos.json", folder / "images/vscode/a.png"
            entry = {"img_filename": "vscode/a.png", "bbox": corners, "instruction": ASKED, "img_size": list(SIZE)}
            entry |= {"application": "vscode", "platform": "macos", "group": "Dev", "instruction_cn": "关"}
            kinds = enumerate(("text", "icon"))
            entries = [entry | {"id": f"vscode_macos_{i}", "ui_type": kind} for i, kind in kinds]
        case "osworld_g" | "osworld_g_refined":
            refined = "_refined" if board.endswith("refined") else ""
            file, name = folder / f"benchmark/OSWorld-G{refined}.json", folder / "benchmark/images/a.png"
            entry = {"image_path": "a.png", "image_size": list(SIZE), "instruction": ASKED, "GUI_types": ["Icon"]}
            shapes = [("bbox", upper_left), ("polygon", [100, 200, 160, 200, 100, 240])]
            entries = [
                entry | {"id": f"X-{i}", "box_type": kind, "box_coordinates": where}
                for i, (kind, where) in enumerate(shapes)
            ]
        case "mmbench_gui":
            file, name = folder / "L2_annotations.json", folder / "offline_images/os_mac/a.png"
            box = [corners[0] / SIZE[0], corners[1] / SIZE[1], corners[2] / SIZE[0], corners[3] / SIZE[1]]
            entry = {"image_path": "a.png", "image_size": list(SIZE), "bbox": box, "instruction": ASKED}
            entry |= {"platform": "os_mac", "app_name": "calendar", "data_type": "text"}
            levels = enumerate(("basic", "advanced"))
            entries = [entry | {"index": i, "grounding_type": level} for i, level in levels]
        case _:
            file = folder / "annotations/element_grounding/element_grounding_basic.json"
            name = folder / "images/element_grounding/a.png"
            entry = {"image_path": "element_grounding/a.png", "image_size": list(SIZE), "prompt_to_evaluate": ASKED}
            entry |= {"platform": "gimp", "element_type": "Button", "category": "graphics"}
            entries = [entry | {"bbox": box} for box in (corners, [160, 240, 100, 200])]
    for path in (file, name):
        path.parent.mkdir(parents=True, exist_ok=True)
    name.write_bytes(picture(*SIZE, "PNG", (100, 200, 160, 240)))
    file.write_text(json.dumps([*entries, *(entries[0] | change for change in changes)]))
    return folder
