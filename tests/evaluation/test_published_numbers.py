"""Numbers that others published, or that an independent implementation found, come out exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from coepg_dagster.evaluation import android_control, mind2web, statistics
from coepg_dagster.evaluation.android_control import within_14_percent_of_diagonal
from coepg_dagster.evaluation.case import Case, Protocol, ScoringError
from coepg_dagster.evaluation.mind2web import judge_uground, pad
from coepg_dagster.evaluation.protocols import PROTOCOLS
from coepg_dagster.evaluation.result import Metric, Result, mean_of, result_of
from coepg_dagster.evaluation.score import compare, differing_steps, score_under_every

from .shared import PREDICTIONS, SAMPLES, needs_data, protocols_table, read_predictions, score_file, score_under_all

pytestmark = needs_data


@pytest.fixture(autouse=True)
def _few_resamples(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts do not depend on the bootstrap; only the test of the speed runs all of it."""
    if "two_seconds" not in request.node.name:
        monkeypatch.setattr(statistics, "RESAMPLES", 20)


GUI_R1 = {level: PREDICTIONS / f"gui_r1/guir1_3b.androidcontrol_{level}.jsonl.gz" for level in ("high", "low")}
SCREENSPOT = PREDICTIONS / "gui_r1/guir1_3b_cpt55_a.screenspot.jsonl.gz"
PLANS = PREDICTIONS / "uground_gpt4o/cross_task_plan.jsonl"
QUERIES = PREDICTIONS / "uground_gpt4o/cross_task_query.jsonl"
BLOCKS = SAMPLES / "mind2web_uground/cross_task_blocks.jsonl"
UI_GENIE = PREDICTIONS / "ui_genie_7b_high"


def hits(metric: Metric) -> tuple[int, int]:
    """(hits, rows) behind the micro average, which must be whole numbers."""
    assert metric.micro is not None
    count = metric.micro * metric.n / 100
    assert count == pytest.approx(round(count), abs=1e-6)
    return round(count), metric.n


def class_hits(metric: Metric) -> dict[str, int]:
    return {name: round(mean * n / 100) for name, (mean, n) in metric.groups.items()}


@pytest.mark.parametrize(
    ("level", "rows", "type_hits", "step_hits", "grounding_hits"),
    [("high", 7706, (5286, 7706), (3349, 6865), (2951, 4605)), ("low", 7660, (6417, 7660), (4225, 6823), (3715, 4576))],
)
def test_gui_r1_android_control(
    level: str, rows: int, type_hits: tuple[int, int], step_hits: tuple[int, int], grounding_hits: tuple[int, int]
) -> None:
    result = score_file(GUI_R1[level], "gui_r1", "android_control/gui_r1")
    assert (result.rows, result.scored, dict(result.skipped)) == (rows, rows, {})
    assert hits(result.metrics["type_acc"]) == type_hits
    assert hits(result.metrics["step_acc"]) == step_hits
    assert hits(result.metrics["grounding_acc"]) == grounding_hits


@pytest.mark.parametrize(
    ("level", "rows", "type_hits", "argument_hits"),
    [
        ("high", (4598, 1137, 569, 554, 526, 315, 7), (3896, 384, 472, 271, 245, 15, 3), (2949, 39, 356, 3, 2)),
        ("low", (4569, 1135, 562, 550, 523, 314, 7), (4382, 1033, 512, 154, 143, 187, 6), (3712, 87, 421, 2, 3)),
    ],
)
def test_gui_r1_android_control_by_class(
    level: str, rows: tuple[int, ...], type_hits: tuple[int, ...], argument_hits: tuple[int, ...]
) -> None:
    result = score_file(GUI_R1[level], "gui_r1", "android_control/gui_r1")
    classes = ("click", "scroll", "type", "open_app", "wait", "back", "long_press")
    types = result.metrics["type_acc"]
    assert {name: n for name, (_, n) in types.groups.items()} == dict(zip(classes, rows, strict=True))
    assert class_hits(types) == dict(zip(classes, type_hits, strict=True))
    arguments = dict(zip(("click", "scroll", "type", "open_app", "long_press"), argument_hits, strict=True))
    assert class_hits(result.metrics["step_acc"]) == arguments


OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


def inverted(case: Case) -> Case:
    """Its scroll in the other convention: the finger's direction instead of the content's."""
    predicted = case.prediction
    if predicted is None or predicted.type not in android_control.SCROLLS:
        return case
    direction = predicted.value.strip().lower()
    return replace(case, prediction=replace(predicted, value=OPPOSITE.get(direction, predicted.value)))


@pytest.mark.parametrize(
    ("level", "strict", "inverted_scroll", "diagonal"), [("high", 3223, 3489, 3601), ("low", 4407, 5225, 4784)]
)
def test_strict14_and_what_one_rule_is_worth(level: str, strict: int, inverted_scroll: int, diagonal: int) -> None:
    cases, _ = read_predictions(GUI_R1[level], "gui_r1", "android_control/strict14")
    rule = PROTOCOLS["android_control/strict14"]
    laxer = replace(rule, judge=partial(android_control.judge_strict14, click_rule=within_14_percent_of_diagonal))
    for protocol, predictions, expected in (
        (rule, cases, strict),
        (rule, [inverted(case) for case in cases], inverted_scroll),
        (laxer, cases, diagonal),
    ):
        assert hits(result_of(protocol, predictions).metrics["step_acc"]) == (expected, len(cases))


def test_every_down_label_is_scrolled_up_in_the_low_file() -> None:
    cases, _ = read_predictions(GUI_R1["low"], "gui_r1", "android_control/gui_r1")
    predicted = [
        case.prediction.value.lower()
        for case in cases
        if case.label.type == "scroll" and case.label.value == "DOWN"
        if case.prediction is not None and case.prediction.type == "scroll"
    ]
    assert len(predicted) == 853 and set(predicted) == {"up"}


def test_screenspot_border_and_average() -> None:
    excluded = score_file(SCREENSPOT, "gui_r1", "screenspot/gui_r1").metrics["acc"]
    included = score_file(SCREENSPOT, "gui_r1", "screenspot/uground").metrics["acc"]
    assert hits(excluded) == (1050, 1272)
    assert hits(included) == (1051, 1272)
    assert excluded.macro == pytest.approx(80.66, abs=0.005)
    assert class_hits(excluded) == {
        "mobile_text": 269,
        "mobile_icon": 172,
        "desktop_text": 185,
        "desktop_icon": 84,
        "web_text": 199,
        "web_icon": 141,
    }
    assert {name: n for name, (_, n) in excluded.groups.items()} == {
        "mobile_text": 273,
        "mobile_icon": 229,
        "desktop_text": 194,
        "desktop_icon": 140,
        "web_text": 230,
        "web_icon": 206,
    }


MAI_UI = PREDICTIONS / "mai_ui"


@pytest.mark.parametrize(
    ("file", "board", "right", "rows", "macro", "groups"),
    [
        ("SSPro.local", "screenspot_pro", 1046, 1581, 66.69, 6),
        ("SSV2.local", "screenspot_v2", 1210, 1272, 94.63, 6),
        ("OS_G.local", "osworld_g", 344, 564, 67.18, 2),
        ("OS_G.local", "osworld_g_refined", 344, 564, 67.18, 2),
        ("MMBench.server.first200", "mmbench_gui", 183, 200, 91.5, 1),
    ],
)
def test_grounding_boards_row_for_row(file: str, board: str, right: int, rows: int, macro: float, groups: int) -> None:
    result = score_file(MAI_UI / f"{file}.jsonl.gz", "mai_ui", f"{board}/items")
    metric = result.metrics["acc"]
    assert (result.rows, result.scored, dict(result.skipped)) == (rows, rows, {})
    assert hits(metric) == (right, rows)
    assert metric.macro == pytest.approx(macro, abs=0.005) and len(metric.groups) == groups
    said = [text == "correct" for text in result.steps["file_says"].to_pylist()]
    assert [value == 1 for value in result.steps["acc"].to_pylist()] == said
    assert not any("judges otherwise" in note or "raw answer" in note for note in result.notes)


def test_screenspot_pro_by_kind_of_target_and_application() -> None:
    metric = score_file(MAI_UI / "SSPro.local.jsonl.gz", "mai_ui", "screenspot_pro/items").metrics["acc"]
    kinds, applications = metric.by["ui_type"], metric.by["application"]
    assert {name: (round(mean, 2), n) for name, (mean, n) in kinds.items()} == {
        "text": (79.73, 977),
        "icon": (44.21, 604),
    }
    assert len(applications) == 26 and mean_of(applications) == pytest.approx(64.83, abs=0.005)


def test_osworld_g_with_and_without_refusals_and_with_its_polygons() -> None:
    items, polygons = (
        score_file(MAI_UI / "OS_G.local.jsonl.gz", "mai_ui", f"osworld_g/{rule}") for rule in ("items", "polygons")
    )
    target, refusal = (items.metrics["acc"].by["target"][name] for name in ("target", "refusal"))
    assert target == (pytest.approx(67.45, abs=0.005), 510) and refusal == (0, 54)
    assert hits(polygons.metrics["acc"]) == (357, 564)  # 14 more polygons, 1 fewer, 1 query that was not answered


def test_every_protocol_that_fits_a_log_and_the_rows_on_which_they_differ() -> None:
    results, refused = score_under_every(MAI_UI / "OS_G.local.jsonl.gz", "mai_ui")
    assert list(results) == [f"osworld_g{which}/{rule}" for which in ("", "_refined") for rule in ("items", "polygons")]
    assert len(differing_steps(results)) == 15 and len(refused) == len(PROTOCOLS) - 4


BADCASES = [("click", 1269, 744), ("swipe", 426, 82), ("type", 91, 55), ("open", 70, 40)]


@pytest.mark.parametrize(("name", "wrong", "type_equal"), BADCASES)
def test_every_ui_genie_badcase_is_wrong(name: str, wrong: int, type_equal: int) -> None:
    result = score_file(UI_GENIE / f"{name}_badcase.json", "ui_genie", "android_control/ui_genie")
    assert (result.rows, result.scored) == (wrong, wrong)
    assert hits(result.metrics["step_acc"]) == (0, wrong)
    assert hits(result.metrics["type_acc"]) == (type_equal, wrong)


def test_ui_genie_accuracy_follows_from_the_judged_badcases() -> None:
    summary = json.loads((UI_GENIE / "acc.json").read_text())
    listed = {
        name: score_file(UI_GENIE / f"{name}_badcase.json", "ui_genie", "android_control/ui_genie")
        for name, _, _ in BADCASES
    }
    judged = sum(r.scored - hits(r.metrics["step_acc"])[0] for r in listed.values())
    assert judged == 1856
    assert sum(r.scored - hits(r.metrics["type_acc"])[0] for r in listed.values()) == 935
    others = ("terminate", "system_button", "wait", "long_press")
    counted = [round((1 - summary[f"{name}_acc"]) * summary[f"all_{name}"]) for name in others]
    assert counted == [288, 140, 238, 7]
    assert 1 - (judged + sum(counted)) / summary["all_actions"] == pytest.approx(summary["action_acc"], abs=1e-12)


def test_ui_genie_clicks_and_swipes_as_far_as_they_can_be_checked() -> None:
    cases, _ = read_predictions(UI_GENIE / "click_badcase.json", "ui_genie", "android_control/ui_genie")
    distances = []
    for case in cases:
        assert case.label.point is not None and case.prediction is not None
        if case.prediction.type == "click" and case.prediction.point is not None:
            distances.append(android_control.distance(case.label.point, case.prediction.point))
    assert min(distances) == pytest.approx(172.0, abs=0.05)
    swipes, _ = read_predictions(UI_GENIE / "swipe_badcase.json", "ui_genie", "android_control/ui_genie")
    pairs = [
        (case.label.value, case.prediction.value)
        for case in swipes
        if case.prediction is not None and case.prediction.type == "swipe"
    ]
    opposite = [pair for pair in pairs if OPPOSITE.get(pair[0]) == pair[1]]
    assert not any(label == answer for label, answer in pairs)
    kinds = (("right", "left"), ("left", "right"), ("up", "down"), ("down", "up"))
    assert [opposite.count(kind) for kind in kinds] == [9, 7, 3, 15]  # so the run was judged without reversal


@pytest.mark.parametrize(
    ("padded", "lowercase", "empty_boxes", "steps", "op_f1", "ele_acc", "step_sr"),
    [
        (True, True, "fail", 1339, (72.01, 70.82), (75.28, 73.95), (60.57, 60.93)),
        (False, True, "fail", 1338, (72.06, 70.91), (75.34, 74.04), (60.61, 61.01)),
        (True, False, "fail", 1339, (71.14, 70.09), (75.28, 73.95), (59.45, 59.98)),
        (False, True, "skip", 1257, (72.89, 71.51), (80.19, 77.79), (64.52, 63.81)),
    ],
)
def test_gpt4o_plans_under_each_switch(
    padded: bool,
    lowercase: bool,
    empty_boxes: str,
    steps: int,
    op_f1: tuple[float, float],
    ele_acc: tuple[float, float],
    step_sr: tuple[float, float],
) -> None:
    cases, notes = read_predictions(PLANS, "uground", "mind2web/uground", labels=BLOCKS, answers=QUERIES)
    assert "oracle" in str(notes["grounder"])
    judge = partial(judge_uground, lowercase=lowercase, empty_boxes=empty_boxes)
    protocol: Protocol = replace(mind2web.UGROUND, judge=judge)
    result = result_of(protocol, pad(cases) if padded else cases)
    assert result.scored == steps
    for name, expected in (("op_f1", op_f1), ("ele_acc", ele_acc), ("step_sr", step_sr)):
        metric = result.metrics[name]
        assert metric.n == steps
        assert (metric.micro, metric.macro) == (
            pytest.approx(expected[0], abs=0.005),
            pytest.approx(expected[1], abs=0.005),
        )


def test_gpt4o_plans_alone_give_the_same_numbers_as_with_all_files() -> None:
    alone = score_file(PLANS, "uground", "mind2web/uground")
    full = score_file(PLANS, "uground", "mind2web/uground", labels=BLOCKS, answers=QUERIES)
    assert (alone.rows, alone.scored) == (full.rows, full.scored) == (1339, 1339)
    assert {k: (m.micro, m.macro) for k, m in alone.metrics.items()} == {
        k: (pytest.approx(m.micro), pytest.approx(m.macro)) for k, m in full.metrics.items()
    }


def test_gpt4o_plans_in_our_format_give_the_same_operation_f1(tmp_path: Path) -> None:
    rows = []
    for line in PLANS.read_text().splitlines():
        plan = json.loads(line)
        label = {"action_type": plan["operation"], "value": plan["value"]}
        planned = {"action_type": plan["gpt_action"], "value": plan["gpt_value"]}
        row = {"step_id": plan["action_uid"], "episode_id": plan["annotation_id"], "step_index": plan["step"]}
        rows.append(row | {"episode_steps": plan["total_steps"], "label": label, "prediction": planned})
    path = tmp_path / "plans.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    metric = score_file(path, "coepg", "mind2web/uground").metrics["op_f1"]
    assert (metric.n, metric.micro) == (1339, pytest.approx(72.01, abs=0.005))


def test_gpt4o_operation_f1_by_class() -> None:
    metric = score_file(PLANS, "uground", "mind2web/uground", labels=BLOCKS).metrics["op_f1"]
    means = {name: mean for name, (mean, _) in metric.groups.items()}
    assert {name: means[name] for name in ("CLICK", "SELECT", "TYPE")} == {
        "CLICK": pytest.approx(75.83, abs=0.005),
        "SELECT": pytest.approx(25.67, abs=0.005),
        "TYPE": pytest.approx(62.71, abs=0.005),
    }
    assert metric.class_mean == pytest.approx(54.73, abs=0.01)


def test_the_same_predictions_under_every_protocol() -> None:
    results: dict[str, Result] = score_under_all(GUI_R1["high"], "gui_r1", "android_control")
    accuracies = {name.split("/")[1]: r.metrics["step_acc"].micro or 0.0 for name, r in results.items()}
    assert list(accuracies) == ["os_atlas", "gui_r1", "ui_genie", "qwen", "strict14"]
    assert max(accuracies.values()) - min(accuracies.values()) > 10  # what a protocol is worth
    assert all(r.rows == 7706 for r in results.values())
    table = protocols_table(results)
    assert [row[0] for row in table.rows] == list(results)
    with pytest.raises(ScoringError, match="different protocols"):
        compare(*list(results.values())[:2])
