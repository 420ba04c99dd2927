"""AndroidControl in its real format: actions, boxes, levels, damaged records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coepg_dagster.evaluation.score import score_steps
from coepg_dagster.readers.android_control import enclosing_node
from coepg_dagster.readers.importing import Options, ReaderError, import_dataset, rejects
from coepg_dagster.readers.tfrecord import Forest, masked_crc

from .samples import ACTIONS, NODES, SCREEN, episode, forest, framed, load, picture, write_android_control


def imported(tmp_path: Path, records: list[bytes], **options: Any) -> tuple[Any, Any, Any]:
    write_android_control(tmp_path / "data", records)
    counts = import_dataset(
        "android_control", tmp_path / "data", tmp_path / "out", Options(max_bad_share=1.0, **options)
    )
    return load(tmp_path / "out").to_pylist(), rejects(tmp_path / "out").to_pylist(), counts


def test_every_action_type_becomes_a_step(tmp_path: Path) -> None:
    steps, left_out, _ = imported(tmp_path, [episode(3)])
    assert not left_out
    assert [(s["action_type"], s["value"]) for s in steps] == [
        ("OPEN_APP", "Drive"),
        ("CLICK", ""),
        ("SCROLL", "down"),
        ("TYPE", "report"),
        ("TYPE", ""),
        ("LONG_PRESS", ""),
        ("BACK", ""),
        ("HOME", ""),
        ("WAIT", ""),
    ]
    assert [s["point"] for s in steps][:5] == [None, [50, 120], None, None, [30, 150]]
    assert steps[1]["boxes"] == [[20, 100, 120, 160]]  # the smaller icon node is not clickable
    assert steps[5]["boxes"] == [[0, 0, 270, 600]]
    assert steps[0]["boxes"] == steps[3]["boxes"] == []  # input_text clicks nowhere
    assert steps[2]["history"] == ["OPEN_APP Drive", "CLICK [Trash]"]
    assert {s["episode_steps"] for s in steps} == {len(ACTIONS)}
    assert [s["step_id"] for s in steps][:2] == ["3_0", "3_1"]


def test_levels_and_splits(tmp_path: Path) -> None:
    high, _, counts = imported(tmp_path / "a", [episode(0), episode(2), episode(4)])
    assert {s["goal"] for s in high} == {"Restore the report"} and {s["instruction"] for s in high} == {None}
    assert dict(counts.steps) == {"train": 9, "validation": 9, "test": 9}
    assert counts.noticed["test: subsplit app_unseen"] == 9
    low, _, _ = imported(tmp_path / "b", [episode(0)], level="low")
    assert (low[1]["goal"], low[1]["instruction"]) == ("Restore the report", "do step 1")


def test_the_smallest_clickable_node_and_of_equals_the_deepest() -> None:
    nodes = (
        ((0, 0, 100, 100), True, 1, "outer"),
        ((10, 10, 50, 50), True, 2, "shallow"),
        ((10, 10, 50, 50), True, 5, "deep"),
        ((20, 20, 30, 30), False, 6, "not clickable"),
        ((25, 25, 25, 40), True, 7, "no area"),
    )
    tree = Forest()
    tree.ParseFromString(forest(*nodes))
    assert enclosing_node(tree, (25, 25)) == ((10, 10, 50, 50), "deep")
    assert enclosing_node(tree, (50, 50)) == ((10, 10, 50, 50), "deep")  # borders belong to the node
    assert enclosing_node(tree, (51, 50)) == ((0, 0, 100, 100), "outer")
    assert enclosing_node(tree, (200, 50)) is None


def test_a_click_without_enclosing_node_leaves_training_only(tmp_path: Path) -> None:
    lonely = {"accessibility_trees": [forest(*NODES[1:])] * 2}
    click = [{"action_type": "click", "x": 250, "y": 590}]
    steps, left_out, counts = imported(tmp_path, [episode(0, click, **lonely), episode(3, click, **lonely)])
    assert [(r["reason"], r["row"]) for r in left_out] == [("no_enclosing_node", "0/0")] and counts.bad == 0
    assert [(s["episode_id"], s["boxes"], s["point"]) for s in steps] == [("3", [], [250, 590])]
    assert counts.noticed["test: no_enclosing_node"] == 1


ONE = [{"action_type": "wait"}]


@pytest.mark.parametrize(
    ("record", "reason", "row"),
    [
        (episode(0, ONE, screenshots=[picture(*SCREEN)]), "lengths_differ", "1"),
        (episode(0, ONE, step_instructions=[b"a", b"b"]), "lengths_differ", "1"),
        (episode(0, ONE, actions=[b"{"]), "bad_json", "1/0"),
        (episode(0, [{"action_type": "dance"}]), "unknown_action", "1/0"),
        (episode(0, [{"action_type": "scroll", "direction": "inwards"}]), "bad_field", "1/0"),
        (episode(0, [{"action_type": "input_text"}]), "bad_field", "1/0"),
        (episode(0, [{"action_type": "click", "x": "7", "y": 1}]), "bad_field", "1/0"),
        (episode(0, ONE, screenshots=[picture(*SCREEN)[:90], b"x"]), "bad_image", "1/0"),
        (episode(0, ONE, screenshots=[b"", b"x"]), "no_screenshot", "1/0"),
        (episode(0, ONE, screenshot_widths=[7, 7]), "bad_field", "1/0"),
        (episode(0, ACTIONS[1:2], accessibility_trees=[b"\xff\xff", b""]), "bad_field", "1/0"),
        (episode(99, ONE), "not_in_splits", "1"),
        (b"\xff\xff\xff", "bad_field", "1"),
        (b"", "missing_column", "1"),
    ],
)
def test_a_bad_record_or_step_is_left_out(tmp_path: Path, record: bytes, reason: str, row: str) -> None:
    steps, left_out, _ = imported(tmp_path, [episode(3, ONE), record, episode(4, ONE)])
    assert [s["step_id"] for s in steps] == ["3_0", "4_0"]
    assert [(r["reason"], r["row"]) for r in left_out] == [(reason, row)]


def test_a_file_cut_short_keeps_what_came_before(tmp_path: Path) -> None:
    path = write_android_control(tmp_path / "data", [episode(3, ONE), episode(4, ONE)])
    whole = gzip.decompress(path.read_bytes())
    first = len(framed(episode(3, ONE)))
    for cut in (first + 5, first + 40, len(whole) - 2):
        path.write_bytes(gzip.compress(whole[:cut]))
        out = tmp_path / f"out{cut}"
        counts = import_dataset("android_control", tmp_path / "data", out, Options(max_bad_share=1.0))
        assert (dict(counts.steps), dict(counts.rejected)) == ({"test": 1}, {"truncated_record": 1})
    path.write_bytes(gzip.compress(whole)[:-30])
    counts = import_dataset("android_control", tmp_path / "data", tmp_path / "out", Options(max_bad_share=1.0))
    assert counts.rejected == {"truncated_record": 1}
    assert rejects(tmp_path / "out")["file"][0].as_py() == str(path)


def test_checksums_are_checked(tmp_path: Path) -> None:
    path = write_android_control(tmp_path / "data", [episode(3, ONE), episode(4, ONE)])
    whole = bytearray(gzip.decompress(path.read_bytes()))
    whole[60] ^= 1
    path.write_bytes(bytes(whole))  # not zipped: both are read
    counts = import_dataset("android_control", tmp_path / "data", tmp_path / "out", Options(max_bad_share=1.0))
    assert (dict(counts.steps), dict(counts.rejected)) == ({"test": 1}, {"bad_checksum": 1})
    assert load(tmp_path / "out")["step_id"].to_pylist() == ["4_0"]


def test_masked_crc_is_tensorflows() -> None:
    # crc32c(b"123456789") is 0xE3069283; rotated right by 15, plus 0xA282EAD8
    assert masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def test_missing_splits_are_named(tmp_path: Path) -> None:
    write_android_control(tmp_path / "data", [episode(3, ONE)])
    (tmp_path / "data/splits.json").unlink()
    with pytest.raises(ReaderError, match=r"splits\.json"):
        import_dataset("android_control", tmp_path / "data", tmp_path / "out")


def test_imported_steps_are_scored_under_the_protocols(tmp_path: Path) -> None:
    imported(tmp_path, [episode(3)])
    steps = load(tmp_path / "out")
    predictions = pa.table(
        {
            "step_id": steps["step_id"],
            "action_type": steps["action_type"],
            "value": steps["value"],
            "x": pa.array([None if p is None else p[0] for p in steps["point"].to_pylist()], pa.float64()),
            "y": pa.array([None if p is None else p[1] for p in steps["point"].to_pylist()], pa.float64()),
        }
    )
    for protocol in ("os_atlas", "ui_genie", "qwen", "strict14", "gui_r1"):
        result = score_steps(f"android_control/{protocol}", steps, predictions)
        assert result.metrics["type_acc"].micro == 100
        # GUI-R1's F1 of two empty texts is 0, so its step accuracy misses the TYPE that has no text
        assert result.metrics["step_acc"].micro == pytest.approx(500 / 6 if protocol == "gui_r1" else 100)
    assert score_steps("sop/android_control/strict14", steps, predictions).metrics["score"].micro == 100
    assert json.loads(result.to_json())["skipped"] == {}
