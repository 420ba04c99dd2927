"""What is fuzzed: for each target a function of bytes that must not raise, and the inputs that fuzzing begins with.

A function checks what its reader promises: that it returns or refuses with the error of its kind, and that what it returns
can be stored.
"""

from __future__ import annotations

import atexit
import gzip
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from coepg_dagster import jsonlines
from coepg_dagster.auditing.marks import NotMarked, marking
from coepg_dagster.evaluation import statistics
from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.evaluation.protocols import PROTOCOLS
from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.experiment.versions import CODE, code_version
from coepg_dagster.inference.agents import coordinate_tokens
from coepg_dagster.inference.files import IncompleteCheckpoint, check_finite, check_size, faults
from coepg_dagster.pictures import FORMATS, MAX_PIXELS, BadPicture, picture
from coepg_dagster.prompts import coordinate_span, parse_end_to_end, parse_grounder, parse_planner
from coepg_dagster.readers import android_control, jsonl, mind2web, screenspot
from coepg_dagster.readers.files import Files
from coepg_dagster.readers.images import Resize, prepared
from coepg_dagster.readers.rows import READER_SCHEMA, Reject, RejectedRow, Step
from coepg_dagster.readers.source_rows import SourceRow
from tests.evaluation.shared import score_file
from tests.readers import samples

REPOSITORY = Path(__file__).parents[2]
_RESIZE = Resize()


@dataclass(frozen=True)
class Target:
    """`run` raises where a promise is broken. `seeds` are inputs to begin with; `json`: inputs are lines of JSON."""

    run: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    json: bool = False


@cache
def _folder() -> Path:
    """A folder for the files of this process, in memory where possible."""
    shared = Path("/dev/shm")  # noqa: S108 - a folder of its own below it
    folder = Path(tempfile.mkdtemp(prefix="coepg-fuzz-", dir=shared if shared.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _file(name: str, content: bytes) -> Path:
    path = _folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _stored(values: Any, schema: pa.Schema) -> None:
    """Raises where a table cannot hold the rows."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(values, schema), sink)


# --- answers of models ------------------------------------------------------------------------------------------------


def planner(data: bytes) -> None:
    text = data.decode(errors="replace")
    answer, whole = parse_planner(text), parse_end_to_end(text)
    rows = [vars(each) for each in (answer, whole) if each is not None]
    if answer is not None:
        assert answer.plan == answer.plan.strip() != "" and answer.action_type == answer.action_type.strip() != ""
    columns = [("plan", pa.string()), ("action_type", pa.string()), ("value", pa.string())]
    _stored(rows, pa.schema([*columns, ("point", pa.list_(pa.float64()))]))


def grounder(data: bytes) -> None:
    text = data.decode(errors="replace")
    point, spans = parse_grounder(text), coordinate_span(text)
    assert (point is None) == (not spans) and len(spans) in (0, 2, 4)
    assert all(0 <= a < b <= len(text) and any(map(str.isdigit, text[a:b])) for a, b in spans)
    assert point is None or all(abs(value) < float("inf") for value in point)
    tokens = coordinate_tokens([data[i : i + 3] for i in range(0, len(data), 3)])
    assert all(0 <= token <= len(data) // 3 for token in tokens)


_PLANNER = [
    '{"plan": "click OK", "action_type": "CLICK", "value": ""}',
    '<think>{"plan": 1}</think>```json\n{"plan": "a", "action_type": "TYPE", "value": 1e999}\n```',
    '{"a": {"plan": "x\\ud83d\\ude00", "action_type": "SELECT", "value": null}}',
    '{"action_type": "CLICK", "value": "", "point": "(1,2)"}',
]
_GROUNDER = [
    *("(12,34)", "[[1, 2, 3, 4]]", "<point>12 34</point>", '{"x": 1.5e3, "y": "2"}', "click(start_box='(1,2)')"),
    *("<think>(1,2)</think><answer>x1=1, y1=2, x2=3, y2=4</answer>", "<|box_start|>(1,2),(3,4)<|box_end|>"),
    *("（１２，３４）", "x\u200b: 1\xa0y: 2", "point: 1e999, 2", '"bbox_2d": [1, 2, 3, 4], "size": [5, 6]'),
]


# --- files of predictions ---------------------------------------------------------------------------------------------

_SCORED = [
    *(("coepg", name) for name in PROTOCOLS),
    *(("gui_r1", name) for name in ("android_control/gui_r1", "android_control/strict14", "screenspot/gui_r1")),
    *(("uground", name) for name in ("screenspot/uground", "mind2web/uground")),
    *(("mai_ui", name) for name in PROTOCOLS if name.split("/")[0] in ("screenspot_pro", "osworld_g", "mmbench_gui")),
    ("ui_genie", "android_control/ui_genie"),
]
"""(format, protocol) by the first byte of an input."""


def predictions(data: bytes) -> None:
    """First byte: format and protocol. Second: gzipped or not. The rest: the file."""
    if len(data) < 3:
        return
    format, protocol = _SCORED[data[0] % len(_SCORED)]
    zipped = data[1] % 8 == 0
    file = _file("p.jsonl.gz" if zipped else "p.jsonl", gzip.compress(data[2:], 1) if zipped else data[2:])
    try:
        with patch.object(statistics, "RESAMPLES", 5):  # intervals are not what is fuzzed
            result = score_file(file, format, protocol)
    except ScoringError as error:
        str(error).encode()
        return
    json.loads(result.to_json(), parse_constant=_no_number)


def _no_number(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def _predictions() -> list[bytes]:
    from tests.evaluation import test_formats as rows

    mai = {"bbox": [0, 0, 9, 9], "pred": [5, 5], "img_size": [100, 100], "id": "a", "group": "CAD", "ui_type": "text",
           "application": "x", "instruction": "y", "raw_response": '"coordinate": [50, 50]'}  # fmt: skip
    genie = {"actiontype_match_gt": {"actiontype_match_details": [rows.GENIE | {"answer": rows.GENIE["gt"]}]},
             "actiontype_notmatch_gt": {"actiontype_notmatch_details": []}}  # fmt: skip
    of = {"coepg": rows.COEPG, "mai_ui": mai, "ui_genie": genie, "uground": rows.PLAN, "gui_r1": rows.GUI_R1}
    seeds = []
    for i, (format, protocol) in enumerate(_SCORED):
        row = of[format]
        if protocol.startswith("screenspot/") and format != "coepg":
            row = rows.SCREENSPOT if format == "uground" else rows.GUI_R1_WEB
        seeds.append(bytes([i, 1 if i % 5 else 0]) + rows.plain(row, 1) + b"\n" + rows.plain(row, 2))
    return seeds


# --- files of data sets -----------------------------------------------------------------------------------------------


def pictures(data: bytes) -> None:
    try:
        image = picture(data)
    except BadPicture as error:
        str(error).encode()
        return
    assert image.width * image.height <= MAX_PIXELS
    image.convert("RGB").tobytes()
    if image.width * image.height < 1_000_000:
        try:
            ready = prepared(image, data, boxes=[(0, 0, 1, 1)], resize=_RESIZE)
        except RejectedRow:
            return
        assert picture(ready.screenshot).size == ready.size


def _pictures() -> list[bytes]:
    seeds = []
    for format in FORMATS:
        for mode in ("RGB", "L", "RGBA", "P", "1", "I;16"):
            out = io.BytesIO()
            try:
                Image.linear_gradient("L").resize((9, 7)).convert(mode if mode != "I;16" else "I").save(out, format)
            except (OSError, ValueError, KeyError):
                continue  # the format has no such mode
            seeds.append(out.getvalue())
    out = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 4), "red").save(out, "JPEG", exif=exif, progressive=True)
    return [*seeds, out.getvalue()]


def tfrecord(data: bytes) -> None:
    """First byte: a whole file; a gzipped one; or, else, records with right checksums, each behind its two bytes of length."""
    if not data:
        return
    content = data[1:]
    if data[0] % 4 == 1:
        content = gzip.compress(content, 1)
    elif data[0] % 4 > 1:
        framed, rest = b"", content
        while len(rest) > 2:
            length = int.from_bytes(rest[:2], "little")
            framed, rest = framed + samples.framed(rest[2 : 2 + length]), rest[2 + length :]
        content = framed
    file = _file("a-00000-of-00001", content)
    splits = android_control.Splits({0: "train", 1: "validation", 3: "test"}, {3: ("IDD",)})
    level: Any = "low" if data[0] & 4 else "high"
    _consumed(android_control.rows(file, splits, level, _RESIZE, shrink=False))


def _consumed(rows: Any) -> None:
    """Every row becomes steps that a table can hold, or a reject with a reason."""
    for row in rows:
        for item in row.run() if isinstance(row, SourceRow) else [row]:
            if isinstance(item, Step):
                _stored([item.values], READER_SCHEMA)
            else:
                assert isinstance(item, Reject) and item.reason
                item.detail.encode()


def _tfrecord() -> list[bytes]:
    tiny = {"screenshots": [samples.picture(27, 60)] * 3, "accessibility_trees": [samples.forest(*samples.NODES)] * 3,
            "screenshot_widths": [27] * 3, "screenshot_heights": [60] * 3}  # fmt: skip
    seeds = []
    for number, done in ((0, samples.ACTIONS[1:3]), (3, samples.ACTIONS[4:6]), (1, samples.ACTIONS[6:8])):
        record = samples.episode(number, done, **tiny)
        seeds += [bytes([0]) + samples.framed(record), bytes([1 + 4]) + samples.framed(record)]
        seeds += [bytes([2 + 4 * (number % 2)]) + len(record).to_bytes(2, "little") + record]
    return seeds


_ROWS = ("jsonl", "screenspot", "blocks", "mind2web")


def rows(data: bytes) -> None:
    """First byte: which data set. The rest: one line."""
    if not data:
        return
    kind, line = _ROWS[data[0] % len(_ROWS)], data[1:]
    images = _images()

    def converted() -> Any:
        match kind:
            case "jsonl":
                return [jsonl.convert(line, images, _RESIZE, shrink=True)]
            case "screenspot":
                return [screenspot.convert(json.loads(line), 0, Path("web.json"), images, _RESIZE, shrink=False)]
            case "blocks":
                return [mind2web.convert_block(line, images, _RESIZE)]
            case _:
                row = jsonlines.parse(line)
                row["screenshot"] = {"bytes": images.image("1.png")}
                return [mind2web.convert(row, Path("train-0.parquet"), "target_crop", _RESIZE, shrink=True)]

    _consumed([SourceRow("f", "0", converted)])


@cache
def _images() -> Files:
    for name in ("1.png", "t_a/1.png", "images/1.png"):
        _file(f"images/{name}", samples.picture(100, 60))
    return Files(_folder(), _folder() / "images")


def _rows() -> list[bytes]:
    from tests.readers import test_strange_rows as good

    page = samples.mind2web_row()
    del page["screenshot"]
    page["pos_candidates"] = [samples.candidate(10, 10, 20.5, 4)]
    lines = [samples.user_row(image="1.png"), good.SPOT, good.BLOCKS, page]
    return [bytes([i]) + json.dumps(line).encode() for i, line in enumerate(lines)]


# --- files of users ---------------------------------------------------------------------------------------------------


def experiment(data: bytes) -> None:
    file = _file("x.yaml", data)
    try:
        loaded = load_experiment(file)
    except ExperimentError as error:
        str(error).encode()
        return
    for asset in CODE:
        code_version(loaded, asset)
    loaded.fingerprint()


def _experiments() -> list[bytes]:
    files = sorted((REPOSITORY / "experiments").glob("*.yaml"))
    tricks = [
        b"a: &a [*a]\n",
        b"a: !!python/name:os.system\n",
        b"{a: 1, a: 2}\n",
        b"? [x]\n: 0x1f\n",
        b"- .inf\n- 1e999\n",
    ]
    return [*(file.read_bytes() for file in files), *tricks]


def checkpoint(data: bytes) -> None:
    """First two bytes: length of config.json, which follows; the rest is model.safetensors."""
    if len(data) < 2:
        return
    length = int.from_bytes(data[:2], "little")
    _file("model/config.json", data[2 : 2 + length])
    _file("model/model.safetensors", data[2 + length :])
    folder = _folder() / "model"
    for name in ("tokenizer.json", "preprocessor_config.json"):
        _file(f"model/{name}", b"{}")
    _file("model/chat_template.jinja", b"")
    try:
        if not faults(folder):
            check_size(folder)
            check_finite(folder)
    except IncompleteCheckpoint as error:
        str(error).encode()


def _checkpoints() -> list[bytes]:
    config = json.loads((REPOSITORY / "models/base-planner/config.json").read_bytes())
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(8)
    text = json.dumps(config, separators=(",", ":")).encode()
    return [len(text).to_bytes(2, "little") + text + weights]


def mark(data: bytes) -> None:
    try:
        said = marking(jsonlines.parse(data))
    except (NotMarked, jsonlines.NotJson) as error:
        str(error).encode()
        return
    json.dumps(said.model_dump(mode="json")).encode()


TARGETS: dict[str, Target] = {
    "planner": Target(planner, lambda: [text.encode() for text in _PLANNER]),
    "grounder": Target(grounder, lambda: [text.encode() for text in _GROUNDER]),
    "predictions": Target(predictions, _predictions, json=True),
    "tfrecord": Target(tfrecord, _tfrecord),
    "pictures": Target(pictures, _pictures),
    "rows": Target(rows, _rows, json=True),
    "experiment": Target(experiment, _experiments),
    "checkpoint": Target(checkpoint, _checkpoints),
    "mark": Target(mark, lambda: [b'{"mark": "veto", "by": "a", "reason": "b", "whole_step": true}'], json=True),
}
