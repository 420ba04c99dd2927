"""A test split keeps its steps, whatever their boxes are; what cannot be kept is counted, and results say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coepg_dagster.evaluation.score import score_steps
from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.geometry import Box, Space
from coepg_dagster.inference.predict import PREDICTION_SCHEMA
from coepg_dagster.jobs import EvaluationJob
from coepg_dagster.provenance import Record, Ref
from coepg_dagster.readers import android_control, jsonl, mind2web, screenspot
from coepg_dagster.readers.files import Files
from coepg_dagster.readers.images import Resize
from coepg_dagster.readers.importing import Counts, Options, import_dataset, lost_of, rejects
from coepg_dagster.readers.rows import Reject, RejectedRow, Step, target_boxes
from coepg_dagster.reports.paper import table_2
from coepg_dagster.results import Cells, rows_of
from coepg_dagster.running import AGENT, chunked, of_pair
from tests.project import REPOSITORY

from .samples import (
    ACTIONS,
    IMAGE,
    SCREEN,
    candidate,
    episode,
    forest,
    load,
    mind2web_row,
    picture,
    user_row,
    write_android_control,
    write_mind2web,
    write_user_rows,
)

WIDE, HIGH = 160, 1900  # two blocks
PAGE = picture(WIDE, HIGH)
EDGES = (
    st.integers(-500, 2500).map(float) | st.floats(-500, 2500, width=32) | st.sampled_from([0.0, WIDE, HIGH, WIDE + 4])
)
BOXES = st.tuples(EDGES, EDGES, EDGES, EDGES)
ORDERED = BOXES.map(lambda b: (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3])))

few = settings(max_examples=25)


def hits(step: Step, x: float, y: float) -> bool:
    point = Box(x, y, x, y, Space.ORIGINAL).centre
    return any(Box(*box, Space.ORIGINAL).contains(point) for box in step.values["boxes"])


@given(st.lists(BOXES | st.just((0.0, 0.0, float("inf"), 5.0)), max_size=4))
def test_boxes_are_kept_for_tests_and_cut_for_training(given_boxes: list[Any]) -> None:
    faulty = RejectedRow("bad_candidates", "unreadable")
    kept, facts = target_boxes([*given_boxes, faulty], (WIDE, HIGH), trained=False)
    order = [b for b in given_boxes if b[0] <= b[2] and b[1] <= b[3] and float("inf") not in b]
    assert kept == list(dict.fromkeys(order)) and "bad_candidates" in facts
    try:
        cut, _ = target_boxes([*given_boxes, faulty], (WIDE, HIGH), trained=True)
    except RejectedRow as left_out:
        seen = [b for b in order if min(b[2], WIDE) > max(b[0], 0) and min(b[3], HIGH) > max(b[1], 0)]
        assert not seen and left_out.reason in ("bad_candidates", "box_outside_image", "box_without_area")
    else:
        assert cut and all(0 <= x1 < x2 <= WIDE and 0 <= y1 < y2 <= HIGH for x1, y1, x2, y2 in cut)
        inside = [b for b in order if 0 <= b[0] < b[2] <= WIDE and 0 <= b[1] < b[3] <= HIGH]
        assert set(inside) <= set(cut)


@few
@given(ORDERED, st.sampled_from(["target_block", "target_crop", "page"]), st.booleans())
def test_a_mind2web_test_row_stays_whatever_its_boxes_are(box: Any, view: Any, with_good: bool) -> None:
    x1, y1, x2, y2 = box
    faulty = [candidate(x1, y1, x2 - x1, y2 - y1), "{", candidate(1, 2, 3, "x")]  # type: ignore[arg-type]
    good = [candidate(100, 1700, 40, 40)] if with_good else []
    row = mind2web_row(pos_candidates=[*faulty, *good], screenshot={"bytes": PAGE, "path": None})
    step = mind2web.convert(row, Path("test_task-0.parquet"), view, Resize(), False)
    assert {"bad_json", "bad_candidates"} <= set(step.noticed)
    if with_good:
        assert step.values["boxes"]  # a target in an earlier block is shown instead, as UGround's rule says
        assert view != "page" or hits(step, 110, 1710)
        trained = mind2web.convert(row, Path("train-0.parquet"), view, Resize(), False)
        width, height = trained.values["width"], trained.values["height"]
        assert trained.values["boxes"]
        assert all(0 <= a < c <= width and 0 <= b < d <= height for a, b, c, d in trained.values["boxes"])


@few
@given(ORDERED)
def test_a_step_of_ugrounds_blocks_stays_whatever_its_boxes_are(box: Any) -> None:
    x1, y1, x2, y2 = box
    row = {"annotation_id": "t", "action_uid": "a", "task": "Rent", "website": "w", "operation": "CLICK", "value": ""}
    row |= {"previous_actions": [], "step": 0, "total_steps": 1, "split": "task", "blocks_path": "."}
    row |= {"target_blocks": {"0": [[x1, y1, x2 - x1, y2 - y1], [1, 2], [5, 5, 9, 9]]}}
    step = mind2web.convert_block(json.dumps(row).encode(), Files(BLOCKS), Resize())
    assert step.values["boxes"][-1] == (5, 5, 14, 14) and "bad_field" in step.noticed


@pytest.fixture(scope="module", autouse=True)
def _blocks(tmp_path_factory: pytest.TempPathFactory) -> None:
    global BLOCKS
    BLOCKS = tmp_path_factory.mktemp("images")
    (BLOCKS / "0.png").write_bytes(PAGE)


BLOCKS: Path


@few
@given(ORDERED)
def test_an_item_of_screenspot_stays_whatever_its_box_is(box: Any) -> None:
    x1, y1, x2, y2 = box
    item = {
        "img_filename": "0.png",
        "bbox": [x1, y1, x2, y2],
        "instruction": "close",
        "group": "CAD",
        "ui_type": "icon",
    }
    step = screenspot.convert(item | {"img_size": [WIDE, HIGH]}, 0, Path("pro.json"), Files(BLOCKS), Resize(), False)
    assert step.values["boxes"] == [(x1, y1, x2, y2)]


def test_an_item_of_the_hubs_screenspot_stays(tmp_path: Path) -> None:
    texts = {"file_name": "a.png", "instruction": "close", "data_type": "icon", "data_source": "ios"}
    shown = {"image": {"bytes": picture(200, 100), "path": None}}
    boxes = [[0.9, 0.1, 1.2, 0.2], [1.5, 0.1, 1.7, 0.2], [0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.4, 0.4]]
    columns = [(name, pa.string()) for name in texts]
    schema = pa.schema([*columns, ("image", IMAGE), ("bbox", pa.list_(pa.float64()))])
    table = pa.Table.from_pylist([texts | shown | {"bbox": box} for box in boxes], schema)
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data/test-0.parquet")
    counts = import_dataset("screenspot", tmp_path / "data", tmp_path / "out")
    assert counts.steps == {"test": 4} and counts.noticed["test: box_outside_image"] == 2
    assert [len(boxes) for boxes in load(tmp_path / "out")["boxes"].to_pylist()] == [1, 1, 1, 0]


def android_step(split: str, *, tree: bytes | None = None, click: tuple[int, int] = (50, 120), **change: Any) -> Any:
    """What becomes of an episode of one click."""
    action = [{"action_type": "click", "x": click[0], "y": click[1]}]
    trees = {} if tree is None else {"accessibility_trees": [tree] * 2}
    record, splits = episode(7, action, **trees, **change), android_control.Splits({7: split}, {})
    [item] = android_control.convert(record, Path("f"), 0, splits, "high", Resize(), False)
    return item


@few
@given(st.integers(-900, 270), st.integers(-900, 600), st.integers(1, 3000), st.integers(1, 3000))
def test_a_click_stays_whatever_the_node_around_it_is(x: int, y: int, right: int, down: int) -> None:
    node = (x, y, x + right, y + down)
    click = max(x, 0), max(y, 0)
    if not (click[0] <= node[2] and click[1] <= node[3]):
        click = node[2], node[3]  # off the screen, where the node is
    tested = android_step("test", tree=forest((node, True, 1, "Add")), click=click)
    assert tested.values["boxes"] == [node] and tested.values["point"] == list(click)
    trained = android_step("train", tree=forest((node, True, 1, "Add")), click=click)
    if isinstance(trained, Reject):
        assert trained.reason == "box_outside_image" and (node[2] <= 0 or node[3] <= 0 or x >= 270 or y >= 600)
    else:
        assert trained.values["boxes"] == [(max(x, 0), max(y, 0), min(node[2], SCREEN[0]), min(node[3], SCREEN[1]))]


@pytest.mark.parametrize(
    ("change", "reason", "fact"),
    [
        ({"tree": b"\xff\xff"}, "bad_field", "bad_field"),
        ({"click": (900, 900)}, "no_enclosing_node", "no_enclosing_node"),
        ({"screenshot_widths": [7, 7]}, "bad_field", "another_size_stated"),
    ],
)
def test_what_no_protocol_needs_costs_no_step_of_a_test_split(change: dict[str, Any], reason: str, fact: str) -> None:
    assert android_step("train", **change).reason == reason
    tested = android_step("test", **change)
    assert fact in tested.noticed and (tested.values["width"], tested.values["height"]) == SCREEN


def test_an_instruction_that_no_model_sees_costs_nothing() -> None:
    assert isinstance(android_step("train", step_instructions=[b"\xff"]), Step)


def test_user_data_is_strict_for_training_only(tmp_path: Path) -> None:
    def boxes_of(split: str, box: list[float]) -> Any:
        write_user_rows(tmp_path, [])
        try:
            line = json.dumps(user_row(split=split, boxes=[box])).encode()
            return jsonl.convert(line, Files(tmp_path), Resize(), False).values["boxes"]
        except RejectedRow as left_out:
            return left_out.reason

    for box in ([0, 0, 500, 30], [200, 10, 300, 20]):
        assert (boxes_of("train", box), boxes_of("test", box)) == ("box_outside_image", [tuple(box)])
    assert boxes_of("train", [0, 0, 100.5, 30]) == [(0, 0, 100, 30)]  # a fraction of a pixel is no fault
    assert boxes_of("test", [50, 10, 10, 30]) == "box_without_area"  # no box at all


BROKEN = picture(*SCREEN)[:90]


def broken(tmp_path: Path) -> Counts:
    """An import of two whole test episodes and some that are damaged: a screenshot, all of a record, the end of the file."""
    records = [
        episode(3),
        episode(4, ACTIONS[:3], screenshots=[picture(*SCREEN), BROKEN, picture(*SCREEN), b""]),
        episode(0, ACTIONS[:2], screenshots=[BROKEN] * 3),
        episode(4, ACTIONS[:5], accessibility_trees=[forest()]),
        b"\xff",
    ]
    write_android_control(tmp_path / "data", records)
    return import_dataset("android_control", tmp_path / "data", tmp_path / "out", Options(max_bad_share=1.0))


def test_what_a_split_lacks_is_counted_by_split_and_in_steps(tmp_path: Path) -> None:
    counts = broken(tmp_path)
    assert counts.lost == {
        "test: bad_image": 1,
        "test: lengths_differ": 5,
        "train: bad_image": 2,
        "unknown split: bad_field": 1,
    }
    lacks = lost_of(counts.lost, "test")
    assert lacks == {"bad_image": 1, "lengths_differ": 5, "bad_field, unknown split": 1}
    assert counts.steps["test"] + lacks["bad_image"] + lacks["lengths_differ"] == len(ACTIONS) + 3 + 5
    table = [(r["reason"], r["split"], r["steps"]) for r in rejects(tmp_path / "out").to_pylist()]
    assert ("lengths_differ", "test", 5) in table and ("bad_field", None, 1) in table
    assert import_dataset("android_control", tmp_path / "data", tmp_path / "out", Options(max_bad_share=1.0)) == counts
    # the action before the damaged screenshot was read: later steps see it
    after = {step["step_id"]: step["history"] for step in load(tmp_path / "out").to_pylist()}["4_2"]
    assert after == ["OPEN_APP Drive", "CLICK"]


@pytest.mark.parametrize("reader", ["mind2web", "mind2web_blocks", "screenspot", "jsonl"])
def test_a_step_that_no_model_can_see_is_counted(reader: Any, tmp_path: Path) -> None:
    data, options = tmp_path / "data", Options(max_bad_share=1.0)
    if reader == "mind2web":
        write_mind2web(data / "test_task-0.parquet", [mind2web_row(), mind2web_row("t1", screenshot=None)])
        split, why = "test_task", "no_screenshot"
    elif reader == "mind2web_blocks":
        row = {
            "annotation_id": "t",
            "action_uid": "a",
            "task": "Rent",
            "website": "w",
            "operation": "CLICK",
            "value": "",
        }
        row |= {"previous_actions": [], "step": 0, "total_steps": 1, "split": "domain", "blocks_path": "gone"}
        data.mkdir()
        (data / "x_blocks.jsonl").write_text(json.dumps(row | {"target_blocks": {}}))
        split, why = "test_domain", "bad_path"
    elif reader == "screenspot":
        data.mkdir()
        (data / "screenspot_web.json").write_text(json.dumps([{"img_filename": "gone.png"}]))
        split, why = "test", "bad_path"
    else:
        write_user_rows(data, [user_row(split="test"), user_row("s1", split="test", image="images/gone.png")])
        split, why = "test", "bad_path"
    counts = import_dataset(reader, data, tmp_path / "out", options)
    assert counts.lost == {f"{split}: {why}": 1}


def predictions_of(steps: pa.Table) -> pa.Table:
    """No answer to any step."""
    answers = [
        {"step_id": name, "value": "", "planner_text": "", "grounder_text": ""} for name in steps["step_id"].to_pylist()
    ]
    return pa.Table.from_pylist(answers, PREDICTION_SCHEMA)


def test_an_evaluation_says_that_its_denominator_is_short(tmp_path: Path) -> None:
    counts = broken(tmp_path)
    models = load_experiment(REPOSITORY / "experiments" / "mobile_3b.yaml").models
    steps = load(tmp_path / "out").filter(pa.compute.field("split") == "test")
    with pa.OSFile(str(tmp_path / "steps.arrow"), "wb") as sink, pa.ipc.new_file(sink, steps.schema) as writer:
        writer.write_table(steps)
    job = EvaluationJob(
        out=tmp_path,
        scratch=tmp_path,
        steps=tmp_path / "steps.arrow",
        models=models,
        device="cpu",
        batch_size=1,
        seed=0,
        planner="p",
        grounder="g",
        splits=["test"],
        max_steps=None,
        protocol="android_control/os_atlas",
        max_plan_tokens=8,
        max_point_tokens=8,
        processes=1,
        lost=dict(counts.lost),
    )
    scores = chunked(job).finish({AGENT: [of_pair(AGENT, [predictions_of(steps)])]})
    assert scores["test"]["notes"]["lost"] == (
        "7 steps could not be read (1 bad_field, unknown split, 1 bad_image, 5 lengths_differ); "
        "a published denominator holds them"
    )


def test_the_tables_name_a_short_denominator(tmp_path: Path) -> None:
    broken(tmp_path)
    steps = load(tmp_path / "out")
    experiment = load_experiment(REPOSITORY / "experiments" / "mobile_3b.yaml")
    records = {}
    for k, lost in enumerate(({}, {"bad_image": 2})):
        scored = score_steps("android_control/os_atlas", steps, predictions_of(steps), lost=lost)
        records[Ref("evaluation", k)] = evaluated(k, {"test": json.loads(scored.to_json())})
    cells = Cells(rows_of(experiment, 13, records), ["test"])
    rows = table_2(cells, {"high": "mobile_3b"}, 1).rows[-2:]
    assert [row[1] for row in rows] == [
        "android_control/os_atlas, macro",
        "android_control/os_atlas, macro (steps lost)",
    ]
    assert all(row[2] != "–" for row in rows)


def evaluated(k: int, figures: dict[str, Any]) -> Record:
    about = {"data_version": "v", "run_id": "r", "folder": "f", "inputs": [], "code_version": "1", "config": {}}
    return Record(asset="evaluation", iteration=k, **about, seed=13, seconds=1, device="cpu", figures=figures)
