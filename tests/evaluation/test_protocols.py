"""Each protocol's own rules and quirks, on small cases; the arithmetic of averages and intervals."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from coepg_dagster.cli import app
from coepg_dagster.evaluation.android_control import TreeNode, canonical, os_atlas_text, smallest_node
from coepg_dagster.evaluation.case import Action, Case, ScoringError
from coepg_dagster.evaluation.metrics import gui_r1_f1, operation_f1, set_f1, token_f1, value_f1
from coepg_dagster.evaluation.protocols import PROTOCOLS, find_protocol, protocols_markdown
from coepg_dagster.evaluation.result import UNJUDGED, result_of, sop, summarise
from coepg_dagster.evaluation.score import compare
from coepg_dagster.evaluation.statistics import interval, sampled_averages

from .shared import read_predictions, score_file

settings.register_profile("evaluation", deadline=None)
settings.load_profile("evaluation")


def case(label: Action, prediction: Action | None, **more: Any) -> Case:
    values: dict[str, Any] = {"step_id": "s", "episode_id": "e", "size": (1000, 2000), **more}
    return Case(label=label, prediction=prediction, **values)


def judge(protocol: str, *args: Any, **more: Any) -> tuple[float | None, ...]:
    return PROTOCOLS[protocol].judge(case(*args, **more)).values


def tap(x: float, y: float) -> Action:
    return Action("click", "", (x, y))


# --- text -------------------------------------------------------------------------------------------------------------

words = st.text("ab -.,[]", max_size=8)


@given(words, words)
def test_f1_is_symmetric_bounded_and_one_for_itself(a: str, b: str) -> None:
    for f1 in (operation_f1, token_f1, gui_r1_f1, value_f1):
        assert f1(a, b) == f1(b, a) and 0 <= f1(a, b) <= 1
    assert operation_f1(a, a) == value_f1(a, a) == 1


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
def test_set_f1_is_twice_the_overlap_over_the_sizes(a: set[int], b: set[int]) -> None:
    sets = ({str(v) for v in a}, {str(v) for v in b})
    expected = 1.0 if not a and not b else 2 * len(a & b) / (len(a) + len(b))
    assert set_f1(*sets) == pytest.approx(expected)


def test_f1_variants_differ_where_the_field_differs() -> None:
    assert operation_f1("TYPE x", "TYPE y") == 0.5
    assert operation_f1("Click", "CLICK") == 0 and operation_f1("Click", "CLICK", lowercase=True) == 1
    assert operation_f1("TYPE a - b", "TYPE a b", drop_punctuation=True) == 1
    assert operation_f1("TYPE a, b", "TYPE a b", drop_punctuation=True) < 1  # "a," stays
    assert gui_r1_f1("down", "DOWNWARDS") == 1 and value_f1("down", "DOWNWARDS") == 0
    assert gui_r1_f1("", "") == token_f1("", "") == 0 and value_f1("", "") == operation_f1("", "") == 1


# --- Mind2Web ---------------------------------------------------------------------------------------------------------

BOX = (100.0, 100.0, 200.0, 140.0)
CLICK = Action("CLICK")


def test_uground_missing_point_is_the_origin_and_empty_boxes_fail() -> None:
    assert judge("mind2web/uground", CLICK, Action("click", "", (100, 140)), boxes=(BOX,)) == (1, 1, 1)
    assert judge("mind2web/uground", CLICK, Action("click"), boxes=((0, 0, 5, 5),)) == (1, 1, 1)
    assert judge("mind2web/uground", CLICK, Action("CLICK", "", (1, 1)), boxes=()) == (0, 1, 0)
    assert judge("mind2web/uground", CLICK, None, boxes=(BOX,)) == (0, 0, 0)


@pytest.mark.parametrize("value", ["None", "none", "NONE", ""])
def test_uground_none_is_no_value_whatever_the_format(tmp_path: Path, value: str) -> None:
    point = (BOX[0], BOX[1])
    assert judge("mind2web/uground", CLICK, Action("CLICK", value, point), boxes=(BOX,)) == (1, 1, 1)
    typed = judge("mind2web/uground", Action("TYPE", "x"), Action("TYPE", value, point), boxes=(BOX,))
    assert typed == (1, pytest.approx(2 / 3), 0)
    row = coepg_row(case(CLICK, Action("CLICK", value, point), boxes=(BOX,)))
    assert score_file(written(tmp_path, row), "coepg", "mind2web/uground").metrics["step_sr"].micro == 100


def test_seeclick_rounds_the_box_skips_no_box_and_lowers_only_the_value() -> None:
    label = Action("TYPE", "Anna")
    assert judge("mind2web/seeclick", label, Action("TYPE", "anna", (150, 120)), boxes=(BOX,)) == (1, 1, 1)
    assert judge("mind2web/seeclick", label, Action("SELECT", "anna", (150, 120)), boxes=(BOX,))[1] == 0.5
    assert judge("mind2web/seeclick", CLICK, Action("CLICK", "ignored", (150, 120)), boxes=(BOX,)) == (1, 1, 1)
    thin = (100.4, 100.0, 200.0, 140.0)  # x1 / 1000 rounds to 0.1
    assert judge("mind2web/seeclick", CLICK, Action("CLICK", "", (100.1, 120)), boxes=(thin,))[0] == 1
    assert (
        judge("mind2web/seeclick", CLICK, Action("CLICK", "", (500, 500)), boxes=(thin, (490, 490, 510, 510)))[0] == 0
    )
    verdict = PROTOCOLS["mind2web/seeclick"].judge(case(CLICK, CLICK))
    assert verdict.skipped == "no_target" and verdict.values == (None, None, None)


def test_seeclick_operation_f1_is_the_mean_of_the_class_means() -> None:
    cases = [case(CLICK, replace(CLICK, point=(150, 120)), boxes=(BOX,), step_id=f"c{i}") for i in range(9)] + [
        case(Action("TYPE", "x"), Action("TYPE", "y", (150, 120)), boxes=(BOX,), step_id="t")
    ]
    metric = result_of(PROTOCOLS["mind2web/seeclick"], cases).metrics["op_f1"]
    assert metric.class_mean == pytest.approx(75) and metric.micro == pytest.approx(95)


def test_seeact_knows_candidates_below_rank_fifty() -> None:
    facts = {"positives": [("7", 3), ("8", 50)], "element": "7"}
    assert judge("mind2web/seeact", Action("CLICK", "x"), CLICK, facts=facts) == (1, 1, 1)
    assert judge("mind2web/seeact", CLICK, CLICK, facts=facts | {"element": "8"}) == (0, 1, 0)
    assert judge("mind2web/seeact", CLICK, CLICK, facts=facts | {"element": None}) == (0, 0, 0)
    assert judge("mind2web/seeact", CLICK, CLICK, facts={"positives": [("8", 50)], "element": "8"}) == (0, 0, 0)
    assert judge("mind2web/seeact", CLICK, Action("SCROLL"), facts=facts)[1] == 0
    with pytest.raises(ScoringError, match="element"):
        judge("mind2web/seeact", CLICK, CLICK)


# --- AndroidControl ---------------------------------------------------------------------------------------------------


def test_click_rules_from_strict_to_lax() -> None:
    """139 px right of the label on a screen of 1000 × 2000 px; then 200 px; then down, where the screen is longer."""
    expected = {
        "strict14": (1, 0, 1, 0),
        "gui_r1": (1, 0, 1, 0),
        "os_atlas": (1, 0, 1, 0),
        "ui_genie": (1, 1, 1, 1),
        "qwen": (0, 0, 0, 0),
    }
    for name, wanted in expected.items():
        points = ((639, 500), (700, 500), (500, 779), (500, 790))
        got = [judge(f"android_control/{name}", tap(500, 500), tap(*p))[1] for p in points]
        assert tuple(got) == wanted, name
    assert judge("android_control/qwen", tap(500, 500), tap(579, 500))[1] == 1  # 4 % of 2000 px are 80


def test_gui_r1_does_not_need_the_type_and_leaves_wait_out_of_the_steps() -> None:
    assert judge("android_control/gui_r1", tap(5, 5), Action("type", "x", (5, 5))) == (0, 1, 1)
    assert judge("android_control/gui_r1", Action("wait"), Action("wait")) == (1, None, None)
    assert judge("android_control/strict14", tap(5, 5), Action("type", "x", (5, 5))) == (0, 0, 1)
    assert judge("android_control/strict14", Action("wait"), Action("wait")) == (1, 1, None)
    wide = case(tap(5, 5), tap(140, 5), seen_size=(1100, 2000))
    assert PROTOCOLS["android_control/gui_r1"].judge(wide).values[1] == 1  # the image that the model saw counts
    assert PROTOCOLS["android_control/strict14"].judge(replace(wide, size=(900, 2000))).values[1] == 0


def test_gui_r1_drops_classes_without_a_hit() -> None:
    cases = [
        case(tap(5, 5), tap(5, 5), step_id="hit"),
        case(tap(5, 5), tap(999, 1999), step_id="miss"),
        case(Action("scroll", "DOWN"), Action("scroll", "up"), step_id="scroll"),
        case(Action("wait"), tap(5, 5), step_id="wait"),
    ]
    metrics = result_of(PROTOCOLS["android_control/gui_r1"], cases).metrics
    assert (metrics["step_acc"].micro, metrics["step_acc"].n) == (50, 2)  # the scroll has no hit
    assert (metrics["type_acc"].micro, metrics["type_acc"].n) == (100, 3)  # neither has wait


def test_os_atlas_compares_the_second_word_alone() -> None:
    assert os_atlas_text(Action("type", "Leonardo da Vinci")) == "TYPE [Leonardo da Vinci]"
    assert os_atlas_text(Action("back")) == "PRESS_BACK"
    name = "android_control/os_atlas"
    assert judge(name, Action("type", "Leonardo da Vinci"), Action("type", "leonardo or somebody"))[1] == 1
    assert judge(name, Action("type", "da Vinci"), Action("type", "Vinci"))[1] == 0
    assert judge(name, Action("scroll", "DOWN"), Action("scroll", "down"))[1] == 1
    assert judge(name, Action("long_press", "", (5, 5)), Action("long_press", "", (5, 5))) == (1, 1, None)


def test_ui_genie_contains_also_accepts_nothing() -> None:
    name = "android_control/ui_genie"
    assert judge(name, Action("type", "New  York"), Action("type", "new york city"))[1] == 1
    assert judge(name, Action("type", "x"), Action("type", ""))[1] == 1
    assert judge(name, Action("open_app", "Google Maps"), Action("open_app", "maps by google"))[1] == 1
    assert judge(name, Action("back"), Action("home")) == (1, 0, None)  # both are system buttons
    assert PROTOCOLS[name].judge(case(tap(1, 1), None)).skipped == "unparsed_answer"
    assert judge(name, Action("finish", "success"), Action("finish", "failure"))[1] == 0


def test_qwen_boxes_icons_and_terminate() -> None:
    name, box = "android_control/qwen", (100.0, 100.0, 200.0, 200.0)
    assert judge(name, tap(900, 1900), tap(209, 150), boxes=(box,))[1] == 1  # enlarged by 1.2
    assert judge(name, tap(900, 1900), tap(211, 150), boxes=(box,))[1] == 0
    assert judge(name, Action("open_app", "Maps"), tap(150, 150), boxes=(box,)) == (1, 1, 1)
    assert judge(name, Action("open_app", "Maps"), tap(150, 150)) == (0, 0, None)
    assert PROTOCOLS[name].judge(case(Action("finish"), None)).skipped == "terminate"
    cases = [
        case(tap(900, 1900), tap(5, 5), step_id="a"),
        case(Action("open_app", "Maps"), tap(150, 150), boxes=(box,), step_id="b"),
    ]
    assert result_of(PROTOCOLS[name], cases).metrics["grounding_acc"].micro == 100  # one hit over one labelled click


NODES = [
    TreeNode((0, 0, 1000, 2000), "screen"),
    TreeNode((100, 100, 200, 200), "Maps app"),
    TreeNode((120, 120, 180, 180), "", "Back to maps"),
]


def test_uground500_smallest_node_and_equivalences() -> None:
    name, facts = "android_control/uground500", {"nodes": NODES}
    assert smallest_node(NODES, (150, 150)) is NODES[2] and smallest_node(NODES, (110, 110)) is NODES[1]
    assert judge(name, tap(110, 110), tap(195, 195), facts=facts) == (1, 1, 1)
    assert judge(name, tap(150, 150), tap(195, 195), facts=facts)[1] == 0
    typed = Action("type", "x", (150, 150))
    assert judge(name, typed, Action("type", "x", (150, 150)), facts=facts)[1] == 1
    assert judge(name, typed, Action("type", "X", (150, 150)), facts=facts)[1] == 0
    assert judge(name, Action("open_app", "maps"), tap(110, 110), facts=facts)[1] == 1
    assert judge(name, Action("open_app", "Clock"), tap(110, 110), facts=facts)[1] == 0
    assert judge(name, Action("back"), tap(150, 150), facts=facts)[1] == 1
    assert judge(name, tap(5, 5), Action("open_app", "Clock", (110, 110)), facts=facts)[1] == 1  # "" is in every text
    assert judge(name, Action("scroll", "down"), Action("scroll", "up"), facts=facts)[:2] == (1, 0)
    with pytest.raises(ScoringError, match="accessibility tree"):
        judge(name, tap(1, 1), tap(1, 1))


def test_uground500_reads_its_three_files(tmp_path: Path) -> None:
    tree = [[{"bbox_pixels": {"x_min": 0, "y_min": 0, "x_max": 100, "y_max": 100}, "text": None}]]
    sample = [
        {"episode_id": 1, "step": 0, "action": {"action_type": "click", "x": 5, "y": 5}, "accessibility_tree": tree},
        {
            "episode_id": 1,
            "step": 1,
            "action": {"action_type": "status", "goal_status": "successful"},
            "accessibility_tree": tree,
        },
    ]
    plans = [
        {"episode_id": 1, "step": 0, "action": {"action_type": "click", "element": "OK"}},
        {"episode_id": 1, "step": 1, "action": {"action_type": "status", "goal_status": "successful"}},
        {"episode_id": 9, "step": 0, "action": {"action_type": "wait"}},
    ]
    answers = [{"episode_id": 1, "step": 0, "output": "(140, 10)", "scale": 1.5}]
    (tmp_path / "s.json").write_text(json.dumps(sample))
    for name, rows in (("p.jsonl", plans), ("a.jsonl", answers)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    files = {"labels": tmp_path / "s.json", "answers": tmp_path / "a.jsonl"}
    result = score_file(tmp_path / "p.jsonl", "uground", "android_control/uground500", **files)
    assert (result.rows, result.metrics["step_acc"].micro, result.metrics["grounding_acc"].n) == (2, 100, 1)
    with pytest.raises(ScoringError, match="sample file"):
        score_file(tmp_path / "p.jsonl", "uground", "android_control/uground500")


def test_names_and_conventions() -> None:
    assert canonical(Action("Press_Back")).type == canonical(Action("NAVIGATE_BACK")).type == "back"
    assert canonical(Action("long press")).type == "long_press"


# --- averages, SOP, comparison ----------------------------------------------------------------------------------------

tables = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0, float("nan")])), min_size=1, max_size=40)


@given(tables, st.integers(0, 3))
def test_averages_are_means_of_means_and_intervals_hold_them(rows: list[tuple[int, float]], seed: int) -> None:
    clusters = np.unique([c for c, _ in rows], return_inverse=True)[1]
    values = np.array([[v] for _, v in rows])
    weights = (~np.isnan(values)).astype(float)
    got = sampled_averages(values, weights, clusters, seed=seed)
    per_task = [values[clusters == c] for c in sorted(set(clusters))]
    per_task = [task[~np.isnan(task)] for task in per_task]
    means = [task.mean() for task in per_task if len(task)]
    if not means:
        assert np.isnan(got.micro[0]) and np.isnan(got.macro[0])
        return
    assert got.macro[0] == pytest.approx(np.mean(means))
    assert got.micro[0] == pytest.approx(np.nanmean(values))
    if len(per_task) > 1:
        low, high = interval(got.macros)[:, 0]
        assert min(means) - 1e-9 <= low <= high <= max(means) + 1e-9
        again = sampled_averages(values, weights, clusters, seed=seed)
        assert np.array_equal(got.macros, again.macros, equal_nan=True)


def test_intervals_cover_about_as_often_as_they_say() -> None:
    rng, covered, clusters = np.random.default_rng(3), 0, np.repeat(np.arange(60), 5)
    for trial in range(100):
        tasks = rng.beta(4, 4, 60)
        values = (rng.random((300, 1)) < tasks[clusters, None]).astype(float)
        low, high = interval(sampled_averages(values, np.ones_like(values), clusters, seed=trial).macros)[:, 0]
        covered += low <= 0.5 <= high
    assert 88 <= covered <= 100


def result(right: list[bool], protocol: str = "android_control/strict14") -> Any:
    cases = [
        case(tap(5, 5), tap(5, 5) if ok else tap(999, 1999), step_id=f"s{i}", episode_id=f"e{i // 3}", step_index=i % 3)
        for i, ok in enumerate(right)
    ]
    return result_of(find_protocol(protocol), cases)


def test_sop_ends_a_trajectory_at_its_first_miss() -> None:
    got = sop(result([True, True, True, True, False, True, False, True, True]))
    assert got.rows == 3
    assert got.metrics["pg"].micro == pytest.approx(100 * (1 + 1 / 3 + 0) / 3)
    assert got.metrics["tsr"].micro == pytest.approx(100 / 3)
    assert got.metrics["score"].micro == pytest.approx((got.metrics["pg"].micro + got.metrics["tsr"].micro) / 2)


def test_sop_refuses_what_it_cannot_judge() -> None:
    no_order = result_of(PROTOCOLS["android_control/strict14"], [case(tap(1, 1), tap(1, 1))])
    with pytest.raises(ScoringError, match="position"):
        sop(no_order)
    undecided = result_of(PROTOCOLS["android_control/gui_r1"], [case(Action("wait"), Action("wait"), step_index=0)])
    with pytest.raises(ScoringError, match="undecided"):
        sop(undecided)


def sop_of(tmp_path: Path, rows: list[Any], base: str = "strict14") -> tuple[float, float, dict[str, str]]:
    """PG, TSR and notes of a file."""
    got = score_file(written(tmp_path, *rows), "coepg", f"sop/android_control/{base}")
    said = {name: str(note) for name, note in json.loads(got.to_json())["notes"].items()}
    return got.metrics["pg"].micro or 0.0, got.metrics["tsr"].micro or 0.0, said


def sop_rows(tasks: int, steps: int, **more: Any) -> list[dict[str, Any]]:
    """Rows of tasks whose every step is right."""
    right = case(tap(5, 5), tap(5, 5))
    ids = [(t, i) for t in range(tasks) for i in range(steps)]
    return [coepg_row(replace(right, step_id=f"{t}_{i}", episode_id=f"e{t}", step_index=i)) | more for t, i in ids]


LACK = "trajectories that lack steps, which count as missed"


def test_sop_loses_no_row_silently(tmp_path: Path) -> None:
    rows: list[Any] = sop_rows(4, 3)
    assert sop_of(tmp_path, rows) == (100, 100, {"rows": "trajectories"})
    unread, none = [*rows[:4], "{", *rows[5:]], [*rows[:4], rows[4] | {"prediction": None}, *rows[5:]]
    pg, tsr, notes = sop_of(tmp_path, unread)
    assert (pg, tsr) == (pytest.approx(100 * (3 + 1 / 3) / 4), 75) == sop_of(tmp_path, none)[:2]
    assert notes["steps not judged, rows that are no JSON object"] == "1" and notes[LACK] == "1 (e1)"
    assert "row 5" in notes["rows that are no JSON object, the first"]
    assert sop_of(tmp_path, none)[2]["rows without a prediction"] == "1"


def test_sop_counts_an_unparsed_answer_as_missed_where_the_steps_leave_it_out(tmp_path: Path) -> None:
    rows = [row | ({"prediction": None} if row["step_index"] == 1 else {}) for row in sop_rows(4, 3)]
    pg, tsr, notes = sop_of(tmp_path, rows, "ui_genie")
    assert (pg, tsr) == (pytest.approx(100 / 3), 0) and notes["steps missed, unparsed_answer"] == "4"


def test_sop_takes_the_length_of_the_task(tmp_path: Path) -> None:
    rows = sop_rows(2, 3, episode_steps=3)
    for at, pg in ((0, 50), (1, 200 / 3), (2, 500 / 6)):  # the first task lacks a step
        assert sop_of(tmp_path, rows[:at] + rows[at + 1 :])[::2] == (
            pytest.approx(pg),
            {"rows": "trajectories", LACK: "1 (e0)"},
        )
    far = [*rows[:5], rows[5] | {"step_index": 2**31 - 1}]
    assert sop_of(tmp_path, [row | {"episode_steps": None} for row in far])[1] == 50
    from_one = [row | {"step_index": row["step_index"] + 1} for row in rows]
    assert sop_of(tmp_path, from_one)[0] == 100
    terminate = {"label": {"action_type": "terminate"}, "prediction": {"action_type": "terminate"}}
    last = [row | (terminate if row["step_index"] == 2 else {}) for row in rows]
    assert sop_of(tmp_path, last, "qwen")[:2] == (100, 100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_index": 1}, "task 'e1' has several steps of index 1"),
        ({"step_index": 3}, "task 'e1' has steps of index 0 to 3, but 3 steps"),
        ({"episode_steps": 4}, "has 4 steps here and 3 in a row before"),
    ],
)
def test_sop_refuses_positions_that_contradict_each_other(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    *rows, last = sop_rows(2, 3, episode_steps=3)
    with pytest.raises(ScoringError, match=message):
        sop_of(tmp_path, [*rows, last | change])


def test_comparison_is_paired() -> None:
    a, b = result([True, False] * 150), result([True, True, True, False] * 75)
    forth, back = compare(a, b).differences["step_acc"], compare(b, a).differences["step_acc"]
    assert forth.micro == pytest.approx(25) and forth.macro == pytest.approx(-(back.macro or 0))
    assert forth.differs and forth.ci95 is not None and forth.ci95[0] > 0
    same = compare(a, a).differences["step_acc"]
    assert same.ci95 == (0, 0) and same.differs is False
    assert compare(sop(a), sop(b)).differences["pg"].micro is not None


def test_comparison_refuses_other_protocols_and_other_steps() -> None:
    with pytest.raises(ScoringError, match="different protocols"):
        compare(result([True]), result([True], "android_control/os_atlas"))
    with pytest.raises(ScoringError, match="same steps"):
        compare(result([True] * 3), result([True] * 4))


def test_a_result_comes_back_from_its_stored_steps() -> None:
    for name in ("android_control/qwen", "android_control/strict14"):
        first = result([True, False, True], name)
        assert summarise(find_protocol(name), first.steps).to_json() == first.to_json()


def test_twice_the_same_step_and_nothing_are_errors() -> None:
    with pytest.raises(ScoringError, match="more than once"):
        result_of(PROTOCOLS["miniwob/point"], [case(CLICK, CLICK), case(CLICK, CLICK)])
    with pytest.raises(ScoringError, match="no prediction"):
        result_of(PROTOCOLS["miniwob/point"], [])


def test_every_protocol_is_described() -> None:
    text = protocols_markdown()
    assert all(f"`{name}`" in text for name in PROTOCOLS) and "sop/" in text
    assert all(p.element and p.text and p.denominator and p.source for p in PROTOCOLS.values())
    with pytest.raises(ScoringError, match="choose from"):
        find_protocol("mind2web")


SIX = [f"{device}_{kind}" for device in ("mobile", "desktop", "web") for kind in ("text", "icon")]


@pytest.mark.parametrize(
    ("protocol", "group", "classes", "said"),
    [
        ("screenspot/gui_r1", "group", SIX, "acc by group, mean of 6"),
        ("screenspot/uground", "group", SIX, "acc by group, mean of 6"),
        ("mind2web/seeclick", "action", ["CLICK", "SELECT", "TYPE"], "op_f1 by action, mean of 3"),
        ("aitz/action_matching", "action", ["click", "press", "type"], "step_acc by action, mean of 3"),
    ],
)
def test_the_command_prints_every_class_with_their_mean(
    tmp_path: Path, protocol: str, group: str, classes: list[str], said: str
) -> None:
    rows = []
    for n, name in enumerate(classes):
        action = name if group == "action" else "click"
        label, predicted = Action(action, "x", (6, 6)), Action(action, "x" if n else "y", (6, 6) if n else (80, 80))
        row = coepg_row(case(label, predicted, step_id=name, group=name, boxes=((5, 5, 7, 7),), size=(100, 100)))
        rows.append(row | {"step_id": name, "episode_id": None})
    command = ["score", str(written(tmp_path, *rows)), "--format", "coepg", "--protocol", protocol]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    told = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["metrics"][said.split()[0]]
    assert f"{said}: {told['class_mean']:.2f}" in printed.output
    for name, of in told["groups"].items():
        assert f"{name} {of['mean']:.2f} ({of['n']})" in printed.output
    assert sorted(told["groups"]) == sorted(classes)


# --- files ------------------------------------------------------------------------------------------------------------

COEPG: dict[str, Any] = {
    "step_id": "1_0",
    "episode_id": "1",
    "step_index": 0,
    "width": 1000,
    "height": 2000,
    "label": {"action_type": "click", "value": "", "point": [5, 5], "boxes": [[0, 0, 10, 10]]},
    "prediction": {"action_type": "CLICK", "value": "", "point": [6, 6]},
}


def written(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "predictions.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_the_coepg_format(tmp_path: Path) -> None:
    path = written(tmp_path, COEPG, COEPG | {"step_id": "1_1", "step_index": 1, "prediction": None})
    got = json.loads(score_file(path, "coepg", "android_control/strict14").to_json())
    assert (got["rows"], got["scored"], got["metrics"]["step_acc"]["micro"]) == (2, 2, 50)
    assert score_file(path, "coepg", "sop/android_control/strict14").metrics["pg"].micro == 50
    seeact = COEPG | {
        "label": {"action_type": "CLICK", "value": "", "positives": [["7", 0]]},
        "prediction": {"action_type": "CLICK", "value": "", "element": "7"},
    }
    assert score_file(written(tmp_path, seeact), "coepg", "mind2web/seeact").metrics["step_sr"].micro == 100
    tree = COEPG | {"nodes": [{"box": [0, 0, 10, 10], "text": "OK"}]}
    assert score_file(written(tmp_path, tree), "coepg", "android_control/uground500").metrics["step_acc"].micro == 100


def coepg_row(case: Case) -> dict[str, Any]:
    """`case` as a row of the coepg format, which `read_coepg` reads back."""
    label: dict[str, Any] = {"action_type": case.label.type, "value": case.label.value, "point": case.label.point}
    label["boxes"] = case.boxes
    prediction: dict[str, Any] | None = None
    if case.prediction is not None:
        action = case.prediction
        prediction = {"action_type": action.type, "value": action.value, "point": action.point}
    row: dict[str, Any] = {"step_id": case.step_id, "episode_id": case.episode_id, "group": case.group}
    row |= {"step_index": case.step_index, "episode_steps": case.episode_steps}
    for prefix, size in (("", case.size), ("seen_", case.seen_size)):
        row |= {f"{prefix}width": size and size[0], f"{prefix}height": size and size[1]}
    if "positives" in case.facts:
        label["positives"] = [list(pair) for pair in case.facts["positives"]]
        if prediction is not None:
            prediction["element"] = case.facts["element"]
    if "nodes" in case.facts:
        row["nodes"] = [asdict(node) for node in case.facts["nodes"]]
    return row | {"label": label, "prediction": prediction}


def test_rows_of_the_coepg_format_come_back(tmp_path: Path) -> None:
    facts = {"positives": [("7", 3)], "element": "7", "nodes": NODES}
    first = case(tap(5, 5), tap(6, 6), boxes=(BOX,), seen_size=(500, 1000), facts=facts, step_index=2, group="g")
    second = case(Action("wait"), None, step_id="t", episode_id=None, size=None)
    path = written(tmp_path, coepg_row(first), coepg_row(second))
    assert read_predictions(path, "coepg", "android_control/strict14")[0] == [first, second]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{"], "row 1: invalid JSON"),
        (["5"], "row 1: must be a JSON object"),
        (["[5]"], "objects only"),
        ([COEPG, COEPG | {"surprise": 1}], "row 2: field 'surprise' is not known"),
        ([COEPG | {"label": {"action_type": "click", "boxes": [[1, 2, 3]]}}], "row 1: label: .*boxes"),
        ([COEPG | {"width": "wide"}], "'width' must be int"),
        ([COEPG | {"width": 0}], "is not a size"),
        (
            [COEPG | {"label": {"action_type": "click", "point": [1, None]}}],
            "row 1: label: .*'point' must be 2 numbers",
        ),
        ([{k: v for k, v in COEPG.items() if k != "step_id"}], "'step_id' is missing"),
        ([COEPG, COEPG], "more than once"),
        ([], "holds no rows"),
    ],
)
def test_files_that_break_the_format_are_named_with_row_and_field(
    tmp_path: Path, rows: list[Any], message: str
) -> None:
    with pytest.raises(ScoringError, match=message):
        score_file(written(tmp_path, *rows), "coepg", "android_control/strict14")


LABEL = {"action_type": "click", "value": "", "point": [5, 5], "boxes": [[0, 0, 9, 9]], "positives": [["7", 0]]}
LACKS: list[tuple[str, dict[str, Any], str]] = [
    ("android_control/strict14", {"label": LABEL | {"point": None}}, "needs the point of the label 'click'"),
    ("android_control/gui_r1", {"label": LABEL | {"point": None}}, "needs the point of the label 'click'"),
    ("android_control/os_atlas", {"width": None}, "needs the screenshot's width and height"),
    ("gui_odyssey/ams", {"width": None, "label": LABEL | {"boxes": []}}, "needs the screenshot's `width`"),
    ("mind2web/seeclick", {"label": LABEL | {"action_type": "HOVER"}}, "label operation 'HOVER' is none of"),
    ("mind2web/seeact", {"label": {"action_type": "CLICK"}}, "give `positives` and `element`"),
    ("screenspot/uground", {"group": "watch_text"}, "group 'watch_text' is none of mobile_text"),
]


@pytest.mark.parametrize(("protocol", "change", "message"), LACKS)
def test_a_row_that_lacks_what_the_protocol_judges_costs_itself(
    tmp_path: Path, protocol: str, change: dict[str, Any], message: str
) -> None:
    name = "CLICK" if protocol.startswith(("mind2web", "gui_odyssey")) else "click"
    right = COEPG | {"width": 100, "height": 100, "group": "web_text", "label": LABEL | {"action_type": name}}
    right |= {"prediction": {"action_type": name, "value": "", "point": [5, 5], "element": "7"}}
    if change.get("label", {}).get("action_type") == "click":
        change = change | {"label": change["label"] | {"action_type": name}}
    rows = [right | {"step_id": str(n)} for n in range(3)]
    whole = score_file(written(tmp_path, *rows), "coepg", protocol)
    result = score_file(written(tmp_path, *rows, right | change | {"step_id": "bad"}), "coepg", protocol)
    assert (result.rows, result.scored, dict(result.skipped)) == (4, 3, {UNJUDGED: 1})
    assert re.search(f"step bad: .*{message}", str(result.notes[f"{UNJUDGED}, the first"]))
    assert {k: m.micro for k, m in result.metrics.items()} == {k: m.micro for k, m in whole.metrics.items()}
    # where no row of the action has it, the file is refused, and named
    bad = [row | change for row in rows]
    wait = right | {"step_id": "w", "label": {"action_type": "wait"}, "prediction": {"action_type": "wait"}}
    with pytest.raises(ScoringError, match=rf"predictions\.jsonl: step 0: .*{message}.*none of 3 rows"):
        score_file(written(tmp_path, *bad, *([wait] if "android" in protocol else [])), "coepg", protocol)


def test_steps_that_come_twice_are_named_with_the_file(tmp_path: Path) -> None:
    for rows, message in (
        ([COEPG] * 2, "more than once; keep one"),
        ([COEPG, COEPG | {"step_id": "2"}] * 2, "1 others"),
    ):
        with pytest.raises(ScoringError, match=rf"predictions\.jsonl: step '.*' comes .*{message}"):
            score_file(written(tmp_path, *rows), "coepg", "android_control/strict14")


def test_json_lines_that_are_cut_lose_their_last_row_alone(tmp_path: Path) -> None:
    path = written(tmp_path, COEPG, COEPG | {"step_id": "2"})
    path.write_bytes(path.read_bytes()[:-20])
    result = score_file(path, "coepg", "android_control/strict14")
    assert (result.rows, result.scored) == (2, 1) and "row 2" in str(
        result.notes["rows that are no JSON object, the first"]
    )


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    for path, message in (
        (tmp_path / "cut.jsonl.gz", "gzip"),
        (tmp_path / "none.jsonl", "cannot be read"),
        (tmp_path, "cannot"),
    ):
        with pytest.raises(ScoringError, match=message):
            score_file(path, "coepg", "android_control/strict14")
    with pytest.raises(ScoringError, match="format 'csv'"):
        score_file(tmp_path, "csv", "miniwob/point")
    with pytest.raises(ScoringError, match="gui_r1 files hold"):
        score_file(written(tmp_path, COEPG), "gui_r1", "mind2web/uground")
    with pytest.raises(ScoringError, match="score them with android_control/ui_genie"):
        score_file(written(tmp_path, COEPG), "ui_genie", "android_control/qwen")


def test_gui_r1_files_of_other_runs_are_read(tmp_path: Path) -> None:
    """Some have null actions, four coordinates, no original size."""
    row = {
        "instruction": "x",
        "gt_action": "click",
        "gt_bbox": [5, 5],
        "gt_input_text": "no input text",
        "group": "android",
        "ui_type": "click",
        "image_size": [1092, 2408],
        "pred_coord": [5.0, 6.0, 0, 0],
        "pred_action": None,
        "pred_input_text": "no input text",
    }
    metrics = score_file(written(tmp_path, row), "gui_r1", "android_control/gui_r1").metrics
    assert (metrics["step_acc"].micro, metrics["type_acc"].n) == (100, 0)
    with pytest.raises(ScoringError, match="width and height"):
        score_file(written(tmp_path, row), "gui_r1", "android_control/strict14")


def test_runs_in_another_order_are_compared_step_by_step(tmp_path: Path) -> None:
    item = {"group": "web", "ui_type": "icon", "gt_bbox": [0, 0, 10, 10], "image_size": [100, 100]}
    rows = [item | {"instruction": f"i{n}", "pred_coord": [5, 5]} for n in range(6)] * 2
    (tmp_path / "a").mkdir()
    first = score_file(written(tmp_path / "a", *rows), "gui_r1", "screenspot/gui_r1")
    other = [row | {"pred_coord": [50, 5]} for row in reversed(rows)]
    (tmp_path / "b.json").write_text(json.dumps(other))
    second = score_file(tmp_path / "b.json", "gui_r1", "screenspot/gui_r1")
    assert compare(first, second).differences["acc"].micro == -100


def test_screenspot_answers_of_uground(tmp_path: Path) -> None:
    item = {
        "bbox": [10, 10, 20, 10],
        "data_type": "icon",
        "platform": "web",
        "scale": 2,
        "image": "a.png",
        "output": "(20, 40)",
    }
    path = written(
        tmp_path, item, item | {"image": "b.png", "output": "(19, 40)"}, item | {"image": "c.png", "output": ""}
    )
    got = score_file(path, "uground", "screenspot/uground")
    assert got.steps["acc"].to_pylist() == [1, 0, 0]
    assert got.metrics["acc"].macro == pytest.approx(100 / 3 / 6) and "groups without rows" in str(got.notes)


def test_uground_answers_replace_the_oracle(tmp_path: Path) -> None:
    plan = {
        "annotation_id": "t",
        "action_uid": "a",
        "operation": "CLICK",
        "value": "",
        "bbox": [[10, 10, 20, 10]],
        "step": 0,
        "total_steps": 2,
        "target_blocks": {"0": [[10, 10, 20, 10]]},
        "ans_block": 0,
        "gpt_action": "CLICK",
        "gpt_value": "None",
        "description": "OK",
    }
    path = written(tmp_path, plan)
    oracle = score_file(path, "uground", "mind2web/uground")
    assert oracle.metrics["ele_acc"].micro == 50 and "oracle" in str(oracle.notes["grounder"])
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"id": "t_a", "bbox": [[10, 10, 20, 10]], "scale": 1.05, "output": "(300, 12)"}))
    real = score_file(path, "uground", "mind2web/uground", answers=answers)
    assert real.metrics["ele_acc"].micro == 0 and real.notes == {"padded": 1}
    with pytest.raises(ScoringError, match="oracle"):
        compare(oracle, real)
