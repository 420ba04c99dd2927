"""Multimodal-Mind2Web in its real format: steps, views, and what bad rows get."""

from __future__ import annotations

import io
import json
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coepg_dagster.readers.importing import (
    MANY_BAD,
    Counts,
    Options,
    ReaderError,
    import_dataset,
    load_benchmark,
    rejects,
)
from coepg_dagster.readers.views import blocks, choose

from .samples import candidate, load, mind2web_row, picture, write_mind2web

LENIENT = Options(max_bad_share=1.0)


def imported(
    tmp_path: Path, rows: list[dict[str, Any]], name: str = "train-00000-of-00001.parquet", **options: Any
) -> Any:
    write_mind2web(tmp_path / "data" / name, rows)
    counts = import_dataset("mind2web", tmp_path / "data", tmp_path / "out", Options(max_bad_share=1.0, **options))
    return load(tmp_path / "out").to_pylist(), rejects(tmp_path / "out").to_pylist(), counts


def test_a_row_becomes_a_step_with_history_and_the_block_of_its_target(tmp_path: Path) -> None:
    (step,), left_out, counts = imported(tmp_path, [mind2web_row(index=1)])
    assert not left_out and counts.rows == 1
    assert (step["step_id"], step["episode_id"], step["split"]) == ("t0_a1", "t0", "train")
    assert step["history"] == ["[textbox]  Search -> TYPE: wedding"]
    assert (step["action_type"], step["value"]) == ("TYPE", "10203")
    assert (step["episode_steps"], step["step_index"]) == (3, 1)
    assert (step["view"], step["view_rule"]) == ([0, 800, 1280, 1800], "block 1")
    assert step["boxes"] == [[100, 900, 300.5, 940]]
    image = Image.open(io.BytesIO(step["screenshot"]))
    assert image.size == (step["width"], step["height"]) == (1280, 1000)
    assert image.convert("L").getpixel((200, 920)) < 50 and image.convert("L").getpixel((200, 870)) > 200  # type: ignore[operator]


def test_target_crop_page_and_resize_move_the_box(tmp_path: Path) -> None:
    (crop,), _, _ = imported(tmp_path / "a", [mind2web_row()], view="target_crop")
    assert (crop["view"], crop["boxes"]) == ([0, 1220, 1280, 2220], [[100, 480, 300.5, 520]])
    (page,), _, _ = imported(tmp_path / "b", [mind2web_row()], view="page")
    assert page["height"] == 2600 and page["boxes"] == [[100, 1700, 300.5, 1740]]
    assert page["screenshot"] == mind2web_row()["screenshot"]["bytes"]  # untouched bytes
    (small,), _, _ = imported(tmp_path / "c", [mind2web_row()], view="page", shrink=True)
    assert small["width"] % 28 == small["height"] % 28 == 0 and small["width"] * small["height"] <= 1_843_200
    assert small["boxes"][0][0] == pytest.approx(100 * small["width"] / 1280, abs=1e-3)


def test_a_page_to_be_scrolled_is_whole_in_tests_and_a_block_in_training(tmp_path: Path) -> None:
    """At its own size, also where screenshots are made as small as the model takes them: its blocks are cut in evaluation."""
    (step,), _, _ = imported(tmp_path / "a", [mind2web_row()], name="test_task-0.parquet", view="scroll", shrink=True)
    assert (step["view_rule"], step["width"], step["height"]) == ("scroll", 1280, 2600)
    assert step["boxes"] == [[100, 1700, 300.5, 1740]] and step["screenshot"] == mind2web_row()["screenshot"]["bytes"]
    (trained,), _, _ = imported(tmp_path / "b", [mind2web_row()], view="scroll")
    (block,), _, _ = imported(tmp_path / "c", [mind2web_row()], view="target_block")
    assert trained == block and trained["view_rule"] == "block 1"


def test_hover_is_a_click_without_value_and_no_value_has_one_form(tmp_path: Path) -> None:
    rows = [
        mind2web_row(index=0, operation=json.dumps({"op": "CLICK", "original_op": "HOVER", "value": ""})),
        mind2web_row(index=1, operation=json.dumps({"op": "CLICK", "original_op": "CLICK", "value": "x"})),
        mind2web_row(index=2, operation=json.dumps({"op": "SELECT", "original_op": "SELECT", "value": " None "})),
    ]
    steps, _, _ = imported(tmp_path, rows)
    assert [(s["action_type"], s["value"]) for s in steps] == [("CLICK", ""), ("CLICK", ""), ("SELECT", "")]


def test_rows_without_target_stay_in_test_and_leave_training(tmp_path: Path) -> None:
    rows = [mind2web_row(index=0, pos_candidates=[])]
    steps, left_out, counts = imported(tmp_path / "a", rows)
    assert not steps and [r["reason"] for r in left_out] == ["no_target"] and counts.bad == 0
    (step,), _, counts = imported(tmp_path / "b", rows, "test_task-00000-of-00001.parquet")
    assert step["boxes"] == [] and step["view_rule"] == "block 0" and step["split"] == "test_task"
    assert counts.noticed["test_task: no_target"] == 1


def test_a_test_split_that_an_experiment_trains_on_has_targets_too(tmp_path: Path) -> None:
    rows = [mind2web_row(index=0, pos_candidates=[]), mind2web_row(index=1)]
    steps, left_out, _ = imported(tmp_path, rows, "test_task-0.parquet", trained=("test_task", "validation"))
    assert [s["step_id"] for s in steps] == ["t0_a1"] and [r["reason"] for r in left_out] == ["no_target"]


def test_several_targets_are_all_kept_when_they_share_a_block(tmp_path: Path) -> None:
    targets = [candidate(100, 1700, 20, 20), candidate(100, 1740, 20, 4), candidate(100, 100, 20, 20)]
    (step,), _, counts = imported(tmp_path, [mind2web_row(pos_candidates=targets[:2])])
    assert len(step["boxes"]) == 2 and counts.noticed == {"train: several_targets": 1}


def test_a_target_on_the_edge_of_the_page_is_cut_for_training_and_kept_for_tests(tmp_path: Path) -> None:
    edge = [mind2web_row(pos_candidates=[candidate(100, 2590, 20, 40)])]
    (step,), _, counts = imported(tmp_path / "a", edge)
    assert (step["view_rule"], step["boxes"]) == ("block 2", [[100, 990, 120, 1000]])
    assert counts.noticed["train: box_outside_image"] == 1
    (step,), _, _ = imported(tmp_path / "b", edge, "test_task-0.parquet")  # no block of UGround's holds all of it
    assert (step["view_rule"], step["boxes"]) == ("target crop", [[100, 990, 120, 1030]])
    (step,), _, _ = imported(tmp_path / "c", edge, "test_task-0.parquet", view="page")
    assert step["boxes"] == [[100, 2590, 120, 2630]]


def bad(**change: Any) -> dict[str, Any]:
    return mind2web_row(index=0, **change)


SMALL = picture(10, 10)
HEADER = SMALL[12:16] + (9000).to_bytes(4) + (9000).to_bytes(4) + SMALL[24:29]  # says 9000 x 9000 px
HUGE = SMALL[:12] + HEADER + zlib.crc32(HEADER).to_bytes(4) + SMALL[33:]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (bad(screenshot=None), "no_screenshot"),
        (bad(screenshot={"bytes": None, "path": None}), "no_screenshot"),
        (bad(screenshot={"bytes": b"no image", "path": None}), "bad_image"),
        (bad(screenshot={"bytes": picture(1280, 2600)[:4000], "path": None}), "bad_image"),
        (bad(screenshot={"bytes": HUGE, "path": None}), "image_too_large"),
        (bad(pos_candidates=["{"]), "bad_json"),
        (bad(pos_candidates=["[]"]), "bad_candidates"),
        (bad(pos_candidates=[json.dumps({"attributes": "{}"})]), "bad_candidates"),
        (bad(pos_candidates=[json.dumps({"attributes": "{"})]), "bad_json"),
        (
            bad(pos_candidates=[json.dumps({"attributes": json.dumps({"bounding_box_rect": "1,2,x,4"})})]),
            "bad_candidates",
        ),
        (bad(pos_candidates=[candidate(100, 2610, 20, 40)]), "box_outside_image"),
        (bad(pos_candidates=[candidate(-20, 10, 10, 10)]), "box_outside_image"),
        (bad(pos_candidates=[candidate(100, 100, 0, 40)]), "box_without_area"),
        (bad(operation="{"), "bad_json"),
        (bad(operation=json.dumps({"op": "SCROLL", "value": ""})), "unknown_action"),
        (bad(target_action_index="7"), "bad_field"),
        (bad(target_action_index=None), "bad_field"),
        (bad(action_reprs=None), "bad_field"),
    ],
)
def test_a_bad_row_is_left_out_with_its_reason_and_place(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    steps, left_out, counts = imported(tmp_path, [mind2web_row(index=1), row, mind2web_row(index=2)])
    assert [s["step_id"] for s in steps] == ["t0_a1", "t0_a2"]
    assert [(r["row"], r["reason"]) for r in left_out] == [("1", reason)]
    assert left_out[0]["file"].endswith("train-00000-of-00001.parquet") and counts.bad == 1


def test_duplicates_missing_columns_and_damaged_files(tmp_path: Path) -> None:
    _, left_out, _ = imported(tmp_path / "a", [mind2web_row(), mind2web_row()])
    assert [r["reason"] for r in left_out] == ["duplicate_id"]
    row = mind2web_row()
    del row["pos_candidates"]
    steps, left_out, _ = imported(tmp_path / "b", [row])
    assert not steps and [(r["reason"], r["row"]) for r in left_out] == [("missing_column", "0")]
    whole = write_mind2web(tmp_path / "c/train-0.parquet", [mind2web_row()])
    whole.write_bytes(whole.read_bytes()[:-200])
    counts = import_dataset("mind2web", tmp_path / "c", tmp_path / "c_out", LENIENT)
    assert counts.rejected == {"bad_file": 1}


def test_past_the_share_of_bad_rows_the_import_stops_and_says_why(tmp_path: Path) -> None:
    rows = [mind2web_row(f"t{i}", screenshot=None) if i % 4 == 0 else mind2web_row(f"t{i}") for i in range(24)]
    write_mind2web(tmp_path / "data/train-0.parquet", rows)
    with pytest.raises(ReaderError, match=r"no_screenshot.*max_bad_share"):
        import_dataset("mind2web", tmp_path / "data", tmp_path / "out")
    assert set(rejects(tmp_path / "out")["reason"].to_pylist()) == {"no_screenshot"}
    assert not list((tmp_path / "out").glob("*.arrow"))
    assert import_dataset("mind2web", tmp_path / "data", tmp_path / "out", Options(max_bad_share=0.3)).bad == 6


def test_the_share_of_bad_rows_is_that_of_the_whole_dataset(tmp_path: Path) -> None:
    """Wherever the bad ones stand; only very many end it early."""
    small = {"screenshot": {"bytes": picture(300, 300), "path": None}, "pos_candidates": [candidate(1, 1, 20, 20)]}
    good_row = mind2web_row(**small)
    rows = [good_row | {"annotation_id": f"t{i}"} | ({} if i > 1 else {"screenshot": None}) for i in range(40)]
    write_mind2web(tmp_path / "data/train-0.parquet", rows)
    assert import_dataset("mind2web", tmp_path / "data", tmp_path / "out", Options(max_bad_share=0.05)).bad == 2
    bad_row = mind2web_row(screenshot=None)
    rows = [bad_row | {"annotation_id": f"t{i}"} for i in range(2 * MANY_BAD)]
    write_mind2web(tmp_path / "data/train-0.parquet", rows)
    with pytest.raises(ReaderError, match=f"{MANY_BAD} of {MANY_BAD} rows are bad"):
        import_dataset("mind2web", tmp_path / "data", tmp_path / "out")


def test_an_import_goes_on_after_the_last_finished_file(tmp_path: Path) -> None:
    write_mind2web(tmp_path / "data/train-0.parquet", [mind2web_row("t0")])
    write_mind2web(tmp_path / "data/train-1.parquet", [mind2web_row("t1"), mind2web_row("t0")])
    first = import_dataset("mind2web", tmp_path / "data", tmp_path / "out", LENIENT)
    done = next((tmp_path / "out").glob("train-0-*.arrow"))
    stamp = done.stat().st_mtime_ns
    next((tmp_path / "out").glob("train-1-*.json")).unlink()  # as if it had been killed during the second file
    again = import_dataset("mind2web", tmp_path / "data", tmp_path / "out", LENIENT)
    assert again.to_json() == first.to_json() == again.to_json() | {"rows": 3}
    assert done.stat().st_mtime_ns == stamp
    assert load(tmp_path / "out")["step_id"].to_pylist() == ["t0_a0", "t1_a0"]


def test_imports_of_other_options_are_kept_apart(tmp_path: Path) -> None:
    write_mind2web(tmp_path / "data/train-0.parquet", [mind2web_row("t0")])
    blocks_of, _ = load_benchmark("mind2web", tmp_path / "data", tmp_path / "out")
    pages, counts = load_benchmark("mind2web", tmp_path / "data", tmp_path / "out", Options(view="page"))
    assert (blocks_of["height"].to_pylist(), pages["height"].to_pylist()) == ([1000], [2600])
    assert counts.steps == {"train": 1}


def test_validation_is_a_fixed_part_of_the_training_tasks(tmp_path: Path) -> None:
    rows = [
        mind2web_row(
            f"task{i}", screenshot={"bytes": picture(300, 300), "path": None}, pos_candidates=[candidate(1, 1, 20, 20)]
        )
        for i in range(60)
    ]
    steps, _, counts = imported(tmp_path, rows)
    assert 1 <= counts.steps["validation"] <= 10
    assert counts.steps["train"] + counts.steps["validation"] == 60
    assert len({(s["episode_id"], s["split"]) for s in steps}) == 60


@pytest.mark.parametrize(("height", "count"), [(150, 1), (999, 1), (1000, 2), (1800, 3), (2600, 4), (7412, 10)])
def test_blocks_follow_ugrounds_rule(height: int, count: int) -> None:
    tiles = blocks(1280, height)
    assert len(tiles) == count
    assert tiles[0][1] == 0 and tiles[-1][3] == height
    assert all(b[1] - a[1] == 800 for a, b in pairwise(tiles))


def test_a_target_in_no_block_gets_a_centred_crop() -> None:
    wide = (2000.0, 400.0, 2100.0, 440.0)  # right of the blocks
    view, held, rule = choose([wide], 2560, 1200, "target_block")
    assert (view, held, rule) == ((1280, 0, 2560, 1000), [wide], "target crop")


def test_a_target_larger_than_a_view_is_none() -> None:
    assert choose([(0.0, 0.0, 1280.0, 1200.0)], 1280, 3000, "target_block") == ((0, 0, 1280, 1000), [], "block 0")


def test_counts_add_up() -> None:
    counts = Counts()
    counts.rejected.update({"no_target": 2, "bad_json": 1})
    counts.steps.update({"train": 3})
    assert (counts.rows, counts.bad) == (6, 1)
