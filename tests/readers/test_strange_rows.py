"""One strange row costs that row, with a reason, in every reader; and what `check-data` calls ok is imported."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from coepg_dagster.readers.importing import (
    Dataset,
    Options,
    ReaderError,
    check_data,
    import_dataset,
    load_benchmark,
    rejects,
)
from coepg_dagster.readers.rows import ALL_ACTIONS

from .samples import candidate, episode, load, mind2web_row, picture, user_row, write_android_control, write_mind2web

LENIENT = Options(max_bad_share=1.0)


def wide() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (2048, 9)).save(out, "PNG")
    return out.getvalue()


SPOT = {
    "img_filename": "1.png",
    "bbox": [10, 10, 20, 10],
    "instruction": "close",
    "data_type": "icon",
    "platform": "web",
}
BLOCKS: dict[str, Any] = {
    "annotation_id": "t",
    "action_uid": "a",
    "task": "Rent a truck",
    "website": "budget",
    "operation": "CLICK",
    "value": "",
    "previous_actions": ["[button]  Reservations -> HOVER"],
    "step": 1,
    "total_steps": 14,
    "split": "task",
    "blocks_path": "t_a",
    "target_blocks": {"1": [[10.0, 10.0, 20.0, 10.0]]},
}
GOOD: dict[Dataset, tuple[str, dict[str, Any]]] = {
    "jsonl": ("steps.jsonl", user_row(image="1.png")),
    "screenspot": ("web.jsonl", SPOT),
    "mind2web_blocks": ("cross_task_blocks.jsonl", BLOCKS),
}
ID = {"jsonl": "step_id", "screenspot": "id", "mind2web_blocks": "action_uid"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images for all JSON formats."""
    made = tmp_path_factory.mktemp("strange")
    (made / "1.png").write_bytes(picture(100, 60))
    (made / "wide.png").write_bytes(wide())
    (made / "t_a").mkdir()
    shutil.copy(made / "1.png", made / "t_a/1.png")
    return made


def imported(dataset: Dataset, folder: Path, lines: list[bytes]) -> tuple[list[str], list[dict[str, Any]]]:
    """(step ids, rejects) of a file of these lines."""
    file = folder / GOOD[dataset][0]
    file.write_bytes(b"\n".join(lines))
    table, _ = load_benchmark(dataset, file, folder / "out" / dataset, LENIENT)
    return table["step_id"].to_pylist(), rejects(folder / "out" / dataset).to_pylist()


HUGE = st.sampled_from([2**31, 2**63, -1, float("inf"), float("-inf"), float("nan"), 1e300, 1e39, True])
TEXT = st.text(max_size=8) | st.sampled_from(
    [
        "\ud83d",
        "\udce9",
        "a\0b",
        "",
        ".",
        "..",
        "../1.png",
        "/etc/passwd",
        "wide.png",
        "²",
        "9" * 5000,
        "x" * 300,
        "\u2028",
    ]
)
ANY = st.recursive(
    st.none() | st.booleans() | HUGE | TEXT | st.integers(-(10**12), 10**12),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("dataset", list(GOOD))
@settings(max_examples=30)
@given(data=st.data())
def test_a_row_of_anything_costs_at_most_itself(dataset: Dataset, folder: Path, data: st.DataObject) -> None:
    row = dict(GOOD[dataset][1])
    for key in data.draw(st.lists(st.sampled_from(sorted(row)), min_size=1, max_size=3, unique=True)):
        row[key] = data.draw(ANY)
    strange = json.dumps(row, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass")
    strange = strange.replace(b"1e+300", b"1" + b"0" * 5000)  # which Python itself would not write
    before, after = (json.dumps(GOOD[dataset][1] | {ID[dataset]: name}).encode() for name in ("one", "two"))
    ids, left_out = imported(dataset, folder, [before, strange, after])
    assert len(ids) + len(left_out) == 3 and all(r["row"] == "2" for r in left_out)
    assert {"one", "two"} <= {step_id.removeprefix("t_") for step_id in ids}
    if dataset == "jsonl":
        strict = check_data(folder / GOOD[dataset][0])
        assert strict.counts.bad == len(left_out) and not (strict.ok and left_out)


LINES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("Latin-1", lambda line: line.replace(b"GOAL", b"caf\xe9"), "bad_json"),
    ("UTF-16", lambda line: line.decode().encode("utf-16"), "bad_json"),
    ("half a pair", lambda line: line.replace(b"GOAL", b"\\ud83d"), "bad_field"),
    ("the other half", lambda line: line.replace(b"GOAL", b"\\udc00 x"), "bad_field"),
    ("number", lambda line: line.replace(b"60.5", b"1" + b"0" * 5000), "bad_field"),
    ("number", lambda line: line.replace(b"60.5", b"1e999"), "bad_field"),
    ("number", lambda line: line.replace(b"60.5", b"-Infinity"), "bad_field"),
    ("nested", lambda line: line.replace(b"60.5", b"[" * 100_000), "bad_json"),
    ("nested", lambda line: line.replace(b"60.5", b"[" * 900 + b"]" * 900), "bad_field"),
]


@pytest.mark.parametrize(("what", "spoil", "reason"), LINES, ids=[line[0] for line in LINES])
@pytest.mark.parametrize("dataset", list(GOOD))
def test_bytes_and_numbers_that_json_cannot_hold(
    dataset: Dataset, folder: Path, what: str, spoil: Callable[[bytes], bytes], reason: str
) -> None:
    text = {"jsonl": "goal", "screenspot": "instruction", "mind2web_blocks": "task"}[dataset]
    place: dict[str, Any] = {
        "jsonl": {"boxes": [[10, 10, 60.5, 40]]},
        "screenspot": {"bbox": [10, 10, 60.5, 20]},
        "mind2web_blocks": {"target_blocks": {"1": [[10, 10, 60.5, 20]]}},
    }[dataset]
    row = GOOD[dataset][1] | place | {text: "GOAL"}
    good = json.dumps(row | {ID[dataset]: "one"}).encode()
    ids, left_out = imported(dataset, folder, [spoil(json.dumps(row).encode()), good])
    if dataset == "mind2web_blocks" and reason == "bad_field" and what in ("number", "nested"):
        assert len(ids) == 2 and not left_out, "a test split keeps its steps whatever their boxes are"
        return
    assert [step_id.removeprefix("t_") for step_id in ids] == ["one"]
    if what != "UTF-16":  # its zero bytes are line ends too
        assert [(r["row"], r["reason"]) for r in left_out] == [("1", reason)]


SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"


@pytest.mark.parametrize("dataset", list(GOOD))
def test_line_separators_and_byte_order_marks_are_no_line_ends(dataset: Dataset, folder: Path) -> None:
    text = {"jsonl": "goal", "screenspot": "instruction", "mind2web_blocks": "task"}[dataset]
    rows = [GOOD[dataset][1] | {ID[dataset]: str(i), text: f"a{c}b"} for i, c in enumerate(SEPARATORS)]
    lines = [json.dumps(row, ensure_ascii=ord(row[text][1]) < 32).encode() for row in rows]
    ids, left_out = imported(dataset, folder, [b"\xef\xbb\xbf" + lines[0], *lines[1:-1], b"\xef\xbb\xbf" + lines[-1]])
    assert not left_out and len(ids) == len(SEPARATORS)
    goals = load_benchmark(dataset, folder / GOOD[dataset][0], folder / "out" / dataset, LENIENT)[0]["goal"]
    assert goals.to_pylist() == [row[text] for row in rows]


def test_an_entry_of_a_json_list_costs_itself(tmp_path: Path, folder: Path) -> None:
    entries = [
        SPOT | {"id": "a"},
        SPOT | {"id": "b", "instruction": "GOAL"},
        SPOT | {"id": "c", "bbox": [1, 2, 60.5, 9]},
    ]
    whole = json.dumps([*entries, SPOT | {"id": "d", "instruction": "\ud83d"}, SPOT | {"id": "e"}]).encode()
    spoiled = whole.replace(b"GOAL", b"caf\xe9").replace(b"60.5", b"1" + b"0" * 5000)
    (tmp_path / "web.json").write_bytes(b"\xef\xbb\xbf" + spoiled)
    table, counts = load_benchmark(
        "screenspot", tmp_path / "web.json", tmp_path / "out", Options(images=str(folder), max_bad_share=1.0)
    )
    assert table["step_id"].to_pylist() == ["a", "e"] and counts.rejected == {"bad_field": 3}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    "change",
    [
        {"goal": "x" * 300_000},
        {"goal": "\U0001f600" * 70_000},
        {"value": "x" * 300_000, "action_type": "TYPE"},
        {"history": ["a"] * 100_000},
        {"history": ["x" * 100_000] * 3},
        {"boxes": [[1, 2, 3, 4 + i / 10_000] for i in range(20_000)]},
        {"family": "x" * 300_000},
        {"step_id": "x" * 300_000},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_step_that_no_model_could_read_to_its_end_costs_its_row(folder: Path, split: str, change: Any) -> None:
    whole = user_row(image="1.png", split=split)
    usual = {"goal": "x" * 10_000, "history": ["clicked the button that says Submit"] * 300}
    lines = [json.dumps(whole | {"step_id": "long"} | change), json.dumps(whole | usual | {"step_id": "usual"})]
    ids, [left_out] = imported("jsonl", folder, [line.encode() for line in lines])
    assert ids == ["usual"] and left_out["reason"] == "too_long" and left_out["split"] == split
    assert len(left_out["detail"]) < 200


@pytest.mark.parametrize("image", ["wide.png", "no.png", "a\0b", "x" * 5000, "1.png/x", ".", "", "t_a"])
def test_an_image_that_cannot_be_seen_costs_its_row(folder: Path, image: str) -> None:
    lines = [
        json.dumps(user_row(str(i), image=name, boxes=[[1, 1, 9, 8]])).encode()
        for i, name in enumerate(["1.png", image])
    ]
    ids, [left_out] = imported("jsonl", folder, lines)
    assert ids == ["0"] and left_out["reason"] == ("extreme_aspect" if image == "wide.png" else "bad_path")
    assert not check_data(folder / "steps.jsonl").ok


@pytest.mark.parametrize("change", [{"boxes": []}, {"boxes": [], "action_type": "WAIT"}])
def test_an_extreme_image_is_left_out_of_tests_without_target_too(folder: Path, change: dict[str, Any]) -> None:
    row = user_row(image="wide.png", split="test", **change)
    assert imported("jsonl", folder, [json.dumps(row).encode()])[1][0]["reason"] == "extreme_aspect"


@pytest.mark.parametrize(
    ("point", "ok"),
    [
        ([1, 2], True),
        ([100, 60], True),
        (None, True),
        ([float("inf"), 7], False),
        ([-7, 7], False),
        ([50, 62], False),
        ([1e400, 1], False),
        ([float("nan"), 1], False),
        ([1], False),
        ("1,2", False),
    ],
)
def test_a_point_lies_on_the_image(folder: Path, point: Any, ok: bool) -> None:
    ids, left_out = imported("jsonl", folder, [json.dumps(user_row(image="1.png", point=point)).encode()])
    assert bool(ids) == ok and [r["reason"] for r in left_out] == ([] if ok else ["bad_field"])


@pytest.mark.parametrize("index", ["9" * 5000, "²", "-1", "1e3", " 1", "", 10**12, 2**31, "10001"])
def test_a_position_is_one(tmp_path: Path, folder: Path, index: Any) -> None:
    rows = [mind2web_row("t0"), mind2web_row("t1", target_action_index=str(index))]
    write_mind2web(tmp_path / "train-0.parquet", rows)
    counts = import_dataset("mind2web", tmp_path / "train-0.parquet", tmp_path / "out", LENIENT)
    assert counts.rejected == {"bad_field": 1} and counts.steps == {"train": 1}
    for dataset, key in (("jsonl", "step_index"), ("jsonl", "episode_steps"), ("mind2web_blocks", "total_steps")):
        line = json.dumps(GOOD[dataset][1] | {key: index}).encode()  # type: ignore[index]
        assert [r["reason"] for r in imported(dataset, folder, [line])[1]] == ["bad_field"]  # type: ignore[arg-type]
    for blocks in ({str(index): []}, {"1": [], str(index): [[1, 2, 3, 4]]}):
        line = json.dumps(BLOCKS | {"target_blocks": blocks}).encode()
        assert [r["reason"] for r in imported("mind2web_blocks", folder, [line])[1]] == ["bad_field"]


def columns(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    for field in schema:
        kind = field.type
        if pa.types.is_string(kind) or pa.types.is_list(kind):
            yield field.name, kind


def test_text_columns_with_other_bytes_cost_their_rows(tmp_path: Path) -> None:
    small = {"screenshot": {"bytes": picture(300, 300), "path": None}, "pos_candidates": [candidate(1, 1, 20, 20)]}
    file = write_mind2web(tmp_path / "test_task-0.parquet", [mind2web_row(f"t{i}", **small) for i in range(12)])
    table = pq.read_table(file)
    read = {"annotation_id", "action_uid", "website", "confirmed_task", "operation", "pos_candidates", "action_reprs"}
    spoiled = {}
    for i, (name, kind) in enumerate(columns(table.schema)):
        values = table[name].to_pylist()
        if pa.types.is_list(kind):
            raw = [[text.encode() for text in value] for value in values]
            raw[i % 12] = [b"caf\xe9"]
            fresh = pa.array(raw, pa.list_(pa.binary()))
            fresh = pa.ListArray.from_arrays(fresh.offsets, fresh.values.view(pa.string()))
        else:
            raw_text = [value.encode() for value in values]
            raw_text[i % 12] = b"caf\xe9"
            fresh = pa.array(raw_text, pa.binary()).view(pa.string())
        if name in read | {"target_action_index"}:
            spoiled[str(i % 12)] = name
        table = table.set_column(table.schema.get_field_index(name), name, fresh)
    pq.write_table(table, file)
    counts = import_dataset("mind2web", file, tmp_path / "out", LENIENT)
    left_out = {r["row"]: r for r in rejects(tmp_path / "out").to_pylist()}
    assert set(left_out) == set(spoiled) and counts.steps.total() == 12 - len(spoiled)
    assert all(r["reason"] == "bad_field" and "not UTF-8" in r["detail"] for r in left_out.values())


@pytest.mark.parametrize(
    "action",
    [
        {"action_type": ["click"]},
        {"action_type": {}},
        {"action_type": "click", "x": 10**400, "y": 1},
        {"action_type": "click", "x": float("inf"), "y": 1},
        {"action_type": "input_text", "text": "\ud83d"},
        {"action_type": "open_app", "app_name": 7},
        [],
        "click",
    ],
)
def test_android_actions_of_other_forms(tmp_path: Path, action: Any) -> None:
    raw = json.dumps(action).encode()
    record = episode(3, [{"action_type": "wait"}], actions=[raw])
    write_android_control(tmp_path / "in", [record, episode(4, [{"action_type": "wait"}])])
    counts = import_dataset("android_control", tmp_path / "in", tmp_path / "out", LENIENT)
    assert counts.rejected.total() == 1 and counts.steps == {"test": 1}
    goal = episode(3, [{"action_type": "wait"}], goal=[b"caf\xe9"])
    write_android_control(tmp_path / "in2", [goal, episode(4, [{"action_type": "wait"}])])
    counts = import_dataset("android_control", tmp_path / "in2", tmp_path / "out2", LENIENT)
    assert counts.rejected.total() == 1 and counts.steps == {"test": 1}


def test_an_operation_of_another_form_costs_its_row(tmp_path: Path) -> None:
    rows = [mind2web_row("t0"), mind2web_row("t1", operation=json.dumps({"op": ["CLICK"], "value": ""}))]
    write_mind2web(tmp_path / "test_task-0.parquet", rows)
    counts = import_dataset("mind2web", tmp_path / "test_task-0.parquet", tmp_path / "out", LENIENT)
    assert counts.rejected == {"unknown_action": 1} and counts.steps.total() == 1


def test_annotation_files_of_other_names_and_links(tmp_path: Path) -> None:
    data, disk = tmp_path / "data", tmp_path / "disk"
    disk.mkdir()
    (disk / "1.png").write_bytes(picture(100, 60))
    data.mkdir()
    (data / "images").symlink_to(disk)
    name = b"caf\xe9.jsonl"
    (data / "._steps.jsonl").write_bytes(b"\0\5\x16\7")  # beside every file on some disks
    Path(f"{data}/{name.decode(errors='surrogateescape')}").write_text(json.dumps(user_row()) + "\nnot json\n")
    report = check_data(data)
    assert report.counts.steps == {"train": 1} and report.counts.bad == 1
    report.text().encode()
    import_dataset("jsonl", data, tmp_path / "out", LENIENT)
    assert load(tmp_path / "out").num_rows == 1


@given(st.text(max_size=6), st.sampled_from(["../", "/", "a/../../", "./../", "images/../../"]))
@settings(max_examples=20)
def test_names_in_the_data_stay_below_its_folder(folder: Path, tail: str, way: str) -> None:
    (folder.parent / "secret.png").write_bytes(picture(100, 60))
    line = json.dumps(
        user_row(image=f"{way}secret.png{tail}" if way != "/" else f"{folder.parent}/secret.png")
    ).encode()
    ids, [left_out] = imported("jsonl", folder, [line])
    assert not ids and left_out["reason"] == "bad_path" and "leaves" in left_out["detail"]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("action", sorted(ALL_ACTIONS))
@pytest.mark.parametrize("style", ["web", "mobile"])
def test_an_action_that_needs_a_target_has_one_in_training(folder: Path, split: str, action: str, style: Any) -> None:
    row = user_row(image="1.png", boxes=[], action_type=action, split=split)
    (folder / "steps.jsonl").write_text(json.dumps(row))
    options = Options(style=style, max_bad_share=1.0)
    _, counts = load_benchmark("jsonl", folder / "steps.jsonl", folder / "out" / style, options)
    needs = action in ("CLICK", "LONG_PRESS", "SELECT") or (action == "TYPE" and style == "web")
    left_out = needs and split != "test"
    assert counts.rejected == ({"missing_target": 1} if left_out else {})
    assert check_data(folder / "steps.jsonl", options).ok != left_out
    if left_out:
        with pytest.raises(ReaderError, match=r"missing_target.*benchmark\.max_bad_share"):
            load_benchmark("jsonl", folder / "steps.jsonl", folder / "out" / "strict", Options(style=style))


def test_check_data_knows_a_phone_by_its_actions(folder: Path) -> None:
    typed = user_row("a", image="1.png", boxes=[], action_type="TYPE", value="x")
    (folder / "steps.jsonl").write_text(json.dumps(typed))
    assert (
        "missing_target: a TYPE of split train needs a target box, unless" in check_data(folder / "steps.jsonl").text()
    )
    back = user_row("b", image="1.png", boxes=[], action_type="BACK")
    (folder / "steps.jsonl").write_text(json.dumps(typed) + "\n" + json.dumps(back))
    assert check_data(folder / "steps.jsonl").ok


def test_check_data_says_which_split_is_missing(folder: Path) -> None:
    rows = [user_row(split, image="1.png", split=split, episode_id=split) for split in ("train", "test")]
    (folder / "steps.jsonl").write_text("\n".join(map(json.dumps, rows)))
    alone = check_data(folder / "steps.jsonl")
    assert alone.ok and "no step in split validation" in alone.text() and "any split for tests" not in alone.text()
    wanted = check_data(folder / "steps.jsonl", Options(), ["train", "validation", "test", "test_b"])
    assert wanted.problems == tuple(
        f"no step in split {s}, which the experiment needs" for s in ("validation", "test_b")
    )
    assert not wanted.ok
