"""Grounding boards: their rules on worked rows, the traps of their logs, and files with broken rows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from coepg_dagster.cli import app
from coepg_dagster.evaluation import statistics
from coepg_dagster.evaluation.case import UNREADABLE, Action, Case, ScoringError
from coepg_dagster.evaluation.exclusions import Exclusions
from coepg_dagster.evaluation.grounding import BOARDS, in_polygon
from coepg_dagster.evaluation.grounding_logs import board_of
from coepg_dagster.evaluation.protocols import PROTOCOLS
from coepg_dagster.evaluation.result import Result, result_of
from coepg_dagster.evaluation.rows import BAD_LABEL
from coepg_dagster.evaluation.score import PredictionFile, compare, score_predictions
from coepg_dagster.evaluation.statistics import interval, sampled_averages
from coepg_dagster.geometry import Point, Size, Space, Viewport

from .shared import score_file


@pytest.fixture(scope="module", autouse=True)
def _few_resamples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "RESAMPLES", 20)
        yield


LOCAL: dict[str, Any] = {
    "group": "Dev",
    "platform": "windows",
    "application": "vscode",
    "lang": "en",
    "instruction_style": "instruction",
    "prompt_to_evaluate": "close",
    "gt_type": "positive",
    "ui_type": "icon",
    "task_filename": "vscode_windows",
    "bbox": [100, 200, 140, 220],
    "pred": [120, 210],
}
SERVER: dict[str, Any] = {
    "img_filename": "os_web/a.png",
    "instruction": "close",
    "application": "shop",
    "platform": "os_web",
    "img_size": [2000, 1000],
    "ui_type": "text",
    "group": "basic",
    "bbox": [100, 200, 140, 220],
    "pred": [120, 210],
    "raw_response": '<answer>{"coordinate": [60, 210]}</answer>',
}
PRO, MMBENCH = "screenspot_pro/items", "mmbench_gui/items"


def scored(folder: Path, rows: list[dict[str, Any]], protocol: str = PRO) -> Result:
    path = folder / "log.jsonl"
    path.write_text("\n".join(json.dumps({"id": n} | row) for n, row in enumerate(rows)))
    return score_file(path, "mai_ui", protocol)


def values(result: Result) -> list[float | None]:
    found: list[float | None] = result.steps["acc"].to_pylist()
    return found


def test_every_side_of_the_box_belongs_to_it(tmp_path: Path) -> None:
    points = [[100, 200], [140, 220], [100, 210], [140, 210.0], [99.999, 210], [140.001, 210], [120, 220.001]]
    assert values(scored(tmp_path, [LOCAL | {"pred": point} for point in points])) == [1, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("pred", "value", "note"),
    [
        (None, 0, "rows without a prediction"),
        ([], 0, "rows without a prediction"),
        ([[120, 210], [0, 0]], 1, "rows with several predictions, of which the first counts"),
        ([[0, 0], [120, 210]], 0, "rows with several predictions, of which the first counts"),
        ([100, 200, 140, 220], 1, "rows with a box as prediction, whose centre counts"),
        ([120], 0, UNREADABLE),
        ("(120, 210)", 0, UNREADABLE),
        ([float("nan"), 210], 0, UNREADABLE),
        ([True, 210], 0, UNREADABLE),
    ],
)
def test_what_a_prediction_may_be(tmp_path: Path, pred: Any, value: int, note: str) -> None:
    result = scored(tmp_path, [LOCAL, LOCAL | {"pred": pred}])
    assert values(result) == [1, value] and str(result.notes[note]).startswith("1")


def test_an_answer_without_a_point_is_unreadable_however_the_log_marks_it(tmp_path: Path) -> None:
    result = scored(tmp_path, [LOCAL, LOCAL | {"pred": [-1.28, -0.72], "raw_response": "I cannot see it"}])
    assert values(result) == [1, 0] and result.notes[UNREADABLE] == 1


def test_labels_without_a_target_and_polygons_by_both_rules(tmp_path: Path) -> None:
    world = LOCAL | {"application": "osworld-g", "group": "os_g", "ui_type": ["Icon"]}
    # a triangle (0, 0), (100, 0), (0, 100), whose first four numbers the log made corners of a box: 0, 0, 100, 0
    triangle = [0, 0, 100, 0, 0, 100]
    rows = [
        world | {"bbox": [0, 0, 0, 0]},
        world | {"bbox": [0, 0, 0, 0], "pred": None},
        world | {"bbox": triangle, "pred": [20, 20]},
        world | {"bbox": triangle, "pred": [60, 60]},
        world | {"bbox": triangle, "pred": [60, 0]},
    ]
    items = scored(tmp_path, rows, "osworld_g/items")
    assert values(items) == [0, 0, 0, 0, 1]
    assert items.metrics["acc"].by["target"] == {"refusal": (0, 2), "target": (pytest.approx(100 / 3), 3)}
    assert values(scored(tmp_path, rows, "osworld_g/polygons")) == [0, 1, 1, 0, 1]


@given(st.floats(-5, 15), st.floats(-5, 15))
def test_a_rectangle_as_polygon_is_the_box_but_for_its_right_and_lower_side(x: float, y: float) -> None:
    assert in_polygon((x, y), [(0, 0), (10, 0), (10, 10), (0, 10)]) == (0 <= x < 10 and 0 <= y < 10)


def test_corners_in_any_order_are_ui_vision_s_alone(tmp_path: Path) -> None:
    row = LOCAL | {"bbox": [140, 220, 100, 200], "task_filename": "element_grounding_basic", "group": "x"}
    result = scored(tmp_path, [row], "ui_vision/items")
    assert values(result) == [1] and list(result.metrics["acc"].groups) == ["basic"]


def test_boxes_of_width_and_height_are_refused_and_a_few_cost_their_rows(tmp_path: Path) -> None:
    """Also where some are corners in order by chance."""
    wide, by_chance = LOCAL | {"bbox": [100, 200, 40, 20]}, LOCAL | {"bbox": [10, 20, 40, 30]}
    boxes = LOCAL | {"bbox": [[0, 0, 9, 9], [100, 200, 40, 20]]}
    wrong = r"row 1: field 'bbox': the corners .* of \[100.*are not in order; is it x, y, width, height\?"
    for rows in ([wide], [boxes], [*[wide] * 3, *[by_chance] * 20]):
        with pytest.raises(ScoringError, match=wrong):
            scored(tmp_path, rows)
    few = scored(tmp_path, [wide, *[LOCAL] * 3, boxes])
    assert dict(few.skipped) == {BAD_LABEL: 2} and few.metrics["acc"].micro == 100


def test_averages_by_name(tmp_path: Path) -> None:
    rows = [
        SERVER,
        SERVER | {"group": "advanced"},
        SERVER | {"group": "advanced", "pred": [0, 0], "raw_response": '{"coordinate": [0, 0]}'},
    ]
    metric = scored(tmp_path, rows, MMBENCH).metrics["acc"]
    assert metric.micro == pytest.approx(200 / 3) and metric.macro == 75  # the mean of basic and advanced
    assert metric.by["platform × group"] == {"os_web × advanced": (50, 2), "os_web × basic": (100, 1)}


def test_a_raw_answer_that_gives_another_point_is_listed_with_what_it_changes(tmp_path: Path) -> None:
    other = SERVER | {"raw_response": '{"coordinate": [61, 210]}'}
    changed = SERVER | {"raw_response": '{"coordinate": [71, 210]}'}
    notes = scored(tmp_path, [SERVER, other, changed, SERVER | {"pred_norm": [0.5, 0.21]}], MMBENCH).notes
    assert str(notes["rows whose raw answer gives another point, with the same verdict"]).startswith("1 (1-")
    assert str(notes["rows whose raw answer gives another point, with another verdict"]).startswith("1 (2-")
    assert str(notes["rows whose `pred` and `pred_norm` differ; `pred` counts"]).startswith("1 (3-")
    # a local log has no size, but a side of the image must be a whole number of pixels
    raw = {"pred": [120, 210], "raw_response": '{"coordinate": [60, 210]}'}
    assert not scored(tmp_path, [LOCAL | raw]).notes.keys() - {"items"}
    assert (
        "rows whose `pred` does not follow from the raw answer"
        in scored(tmp_path, [LOCAL | raw | {"pred": [120.31, 210]}]).notes
    )


def test_what_the_file_says_of_itself_is_compared(tmp_path: Path) -> None:
    said = [LOCAL | {"correctness": text} for text in ("Correct ", "wrong", "wrong_format", "correct", "CORRECT")]
    assert str(scored(tmp_path, said).notes["rows that the file itself judges otherwise"]).startswith("2 (1-")


def test_points_that_fit_two_spaces_are_refused_with_both_readings(tmp_path: Path) -> None:
    parts = [SERVER | {"pred": point, "raw_response": ""} for point in ([0.06, 0.21], [0.9, 0.9])]
    with pytest.raises(ScoringError, match=r"all 2 points .* pixels 0 of them .* \(0..1\) 1 of them"):
        scored(tmp_path, parts, MMBENCH)
    with pytest.raises(ScoringError, match="lack the `img_size`"):
        scored(tmp_path, [LOCAL | {"pred": [0.06, 0.21]}])
    unconverted = [SERVER | {"pred": [60, 210]}]
    with pytest.raises(ScoringError, match=r"pixels 0 of them .* \(0..1000\) 1 of them"):
        scored(tmp_path, unconverted, MMBENCH)
    far = [LOCAL | {"bbox": [1500 + n, 1200, 1540 + n, 1220], "pred": [700, 600 + n]} for n in range(20)]
    with pytest.raises(ScoringError, match=r"all 20 points .* \(0..1000\) the rows lack the `img_size`"):
        scored(tmp_path, far)
    assert values(scored(tmp_path, far[1:])) == [0] * 19  # too few to say
    # labels in the same parts of the screen make one reading
    assert values(scored(tmp_path, [LOCAL | {"bbox": [0.1, 0.1, 0.2, 0.2], "pred": [0.1, 0.2]}])) == [1]


@pytest.mark.parametrize("said", ["row", "option"])
@pytest.mark.parametrize("space", list(Space))
def test_a_raw_answer_is_in_the_space_that_is_said(tmp_path: Path, space: Space, said: str) -> None:
    seen = {"seen_width": 400, "seen_height": 100}
    there = Viewport(Size(2000, 1000), Size(400, 100)).point(Point(1200, 900, Space.ORIGINAL), space)
    row = {name: value for name, value in SERVER.items() if name != "pred"} | {"bbox": [1195, 895, 1205, 905]} | seen
    row |= {"raw_response": json.dumps({"coordinate": [there.x, there.y]})}
    path = tmp_path / "log.jsonl"
    rows = [{"id": n} | row | ({"space": space} if said == "row" else {}) for n in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    file = PredictionFile(path, "mai_ui", space=space if said == "option" else None)
    assert values(score_predictions(file, MMBENCH)) == [1, 1, 1]
    unsaid = [each | {"space": None} for each in rows]
    if space in (Space.ORIGINAL, Space.UNIT):
        with pytest.raises(ScoringError, match=r"read as 0..1000, but 3 of 3 are (beyond 1000|in 0..1); .*--space"):
            scored(tmp_path, unsaid, MMBENCH)
        assert len(values(scored(tmp_path, [*unsaid[:2], *[row | {"raw_response": "[600, 900]"}] * 8], MMBENCH))) == 10
    else:
        assert values(scored(tmp_path, unsaid, MMBENCH)) == [float(space == Space.NORM_1000)] * 3


def test_a_broken_row_costs_itself_and_is_counted_with_its_reason(tmp_path: Path) -> None:
    good = json.dumps({"id": "a"} | LOCAL)
    lines = [
        good,
        "{half a li",
        "[]",
        json.dumps({"id": "b"} | LOCAL | {"bbox": [1, 2, 3]}),
        json.dumps({"id": "c"} | LOCAL | {"bbox": None}),
        json.dumps({"id": "d"} | LOCAL | {"gt_type": "negative"}),
        json.dumps({"id": "e"} | LOCAL | {"application": "screenspot_web_v2", "platform": "v2"}),
        good,
        json.dumps({"id": "f"} | LOCAL | {"pred": [0, 0]}),
    ]
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    result = score_file(path, "mai_ui", PRO)
    assert (result.rows, result.scored, result.metrics["acc"].micro) == (9, 2, 50)
    assert dict(result.skipped) == {
        "further rows of an item": 1,
        "rows of another board": 1,
        "rows that are no JSON object": 2,
        "rows whose label cannot be read": 2,
        "rows with a negative label, which no point answers": 1,
    }
    assert f"{path}: row 8: item a-" in str(result.notes["further rows of an item, the first"])
    assert "screenspot_v2" in str(result.notes["rows of another board, the first"])
    assert result.notes["items"] == "9 rows; the published board has 1,581 items"


def test_rows_without_an_id_are_items_of_their_own(tmp_path: Path) -> None:
    result = scored(tmp_path, [LOCAL | {"id": None}] * 3)
    assert values(result) == [1, 1, 1] and len(set(result.steps["step_id"].to_pylist())) == 3


def test_a_file_of_another_board_or_version_is_refused_by_name(tmp_path: Path) -> None:
    rows = [LOCAL | {"application": "screenspot_web", "task_filename": "screenspot_web"}]
    with pytest.raises(ScoringError, match="name the board screenspot, not screenspot_v2"):
        scored(tmp_path, rows, "screenspot_v2/items")
    assert board_of(SERVER) == "mmbench_gui" and board_of(LOCAL) == "screenspot_pro"
    with pytest.raises(ScoringError, match="mai_ui files hold"):
        scored(tmp_path, [LOCAL], "mind2web/seeclick")


def test_the_log_of_the_evaluator_itself_is_one_json_object(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    for text in (json.dumps({"details": [LOCAL]}), json.dumps({"metrics": {}, "details": [LOCAL]}, indent=4)):
        path.write_text(text)
        assert values(score_file(path, "mai_ui", PRO)) == [1]


def test_two_logs_of_the_same_items_are_compared_whatever_their_kind(tmp_path: Path) -> None:
    mine = [LOCAL | {"pred": [120, 210 if n < 30 else 0]} for n in range(40)]
    others = [LOCAL | {"pred": [120, 210 if n < 20 else 0], "lang": None} for n in range(40)]
    difference = compare(scored(tmp_path, others), scored(tmp_path, mine)).differences["acc"]
    assert difference.micro == 25 and difference.ci95_micro is not None and difference.ci95_micro[0] > 0
    assert difference.detectable_micro is not None and 15 <= difference.detectable_micro < 40  # 6 of 40 are 15 %
    with pytest.raises(ScoringError, match="differ in 2 steps"):
        compare(scored(tmp_path, mine), scored(tmp_path, [*mine[:-1], LOCAL | {"bbox": [0, 0, 1, 1]}]))


@pytest.mark.parametrize("board", [board.name for board in BOARDS])
@settings(max_examples=40)
@given(data=st.data())
def test_any_space_back_and_forth_gives_the_same_verdict(
    tmp_path_factory: Any, board: str, data: st.DataObject
) -> None:
    side, offset = st.integers(1, 5000), st.integers(-1, 1)
    width, height, seen_width, seen_height = (data.draw(side) for _ in range(4))
    x1, x2 = sorted(data.draw(st.integers(0, width)) for _ in range(2))
    y1, y2 = sorted(data.draw(st.integers(0, height)) for _ in range(2))
    x = data.draw(st.sampled_from([x1, x2, (x1 + x2) / 2])) + data.draw(offset)
    y = data.draw(st.sampled_from([y1, y2, (y1 + y2) / 2])) + data.draw(offset)
    viewport = Viewport(Size(width, height), Size(seen_width, seen_height))
    folder = tmp_path_factory.getbasetemp()
    lines = []
    for space in Space:
        there = viewport.point(Point(x, y, Space.ORIGINAL), space)
        row = {
            "step_id": space.value,
            "space": space.value,
            "group": "any",
            "width": width,
            "height": height,
            "seen_width": seen_width,
            "seen_height": seen_height,
            "label": {"action_type": "click", "boxes": [[x1, y1, x2, y2]]},
            "prediction": {"action_type": "click", "point": [there.x, there.y]},
        }
        lines.append(json.dumps(row))
    path = folder / "spaces.jsonl"
    path.write_text("\n".join(lines))
    assert values(score_file(path, "coepg", board)) == [float(x1 <= x <= x2 and y1 <= y <= y2)] * len(Space)


def test_many_clusters_are_drawn_by_kind_with_the_same_averages_and_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    n = 600
    values = (rng.random((n, 1)) < 0.6).astype(float)
    values[::7] = np.nan
    groups, clusters = rng.integers(0, 3, n), np.arange(n) // 2
    monkeypatch.setattr(statistics, "RESAMPLES", 4000)
    weights = (~np.isnan(values)).astype(float)
    for more in ({}, {"groups": groups, "n_groups": 3}):
        plain = sampled_averages(values, weights, clusters, **more)
        monkeypatch.setattr(statistics, "MANY_CLUSTERS", 10)
        kinds = sampled_averages(values, weights, clusters, **more)
        monkeypatch.setattr(statistics, "MANY_CLUSTERS", 20_000)
        np.testing.assert_allclose(kinds.micro, plain.micro)
        np.testing.assert_allclose(kinds.macro, plain.macro)
        np.testing.assert_allclose(interval(kinds.micros), interval(plain.micros), atol=0.006)
        np.testing.assert_allclose(interval(kinds.macros), interval(plain.macros), atol=0.006)


def test_cases_are_judged_as_they_come_and_not_kept() -> None:
    alive = most = 0

    class Counted(Action):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def cases() -> Iterator[Case]:
        nonlocal alive, most
        for n in range(20_000):
            alive += 1
            most = max(most, alive)
            yield Case(str(n), None, Action("click"), Counted("click", "", (1, 1)), boxes=((0, 0, 2, 2),), group="g")

    assert result_of(PROTOCOLS[PRO], cases()).scored == 20_000
    assert most < 12_000


def test_the_command_prints_averages_by_name_differences_and_every_protocol(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(json.dumps(LOCAL | {"id": n}) for n in range(3)))
    command = ["score", str(path), "--format", "mai_ui"]
    one = CliRunner().invoke(app, [*command, "--protocol", PRO])
    assert one.exit_code == 0 and "acc by application, mean of 1: 100.00; vscode 100.00 (3)" in one.output
    against = ["compare", str(path), str(path), "--format", "mai_ui", "--protocol", PRO]
    [paired] = json.loads(CliRunner().invoke(app, [*against, "--json"]).output)["splits"].values()
    assert paired["differences"]["acc"]["micro"] == 0
    every = CliRunner().invoke(app, [*command, "--all", "--json"])
    assert list(json.loads(every.output)["protocols"]) == [PRO]
    assert CliRunner().invoke(app, command).exit_code == 2


def test_items_with_wrong_labels_are_left_out_beside_the_whole_score_and_never_silently(tmp_path: Path) -> None:
    log, wrong = tmp_path / "log.jsonl", tmp_path / "wrong.json"
    log.write_text("\n".join(json.dumps(LOCAL | {"id": f"vscode-{n}", "pred": [120, 210 * n]}) for n in (0, 1)))
    wrong.write_text(json.dumps({"name": "noise", "version": "1", "source": "a paper", "items": ["vscode-0"]}))
    command = ["score", str(log), "--format", "mai_ui", "--protocol", PRO, "--exclude", str(wrong)]
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    other = found["without exclusions"]
    assert (found["metrics"]["acc"]["micro"], other["metrics"]["acc"]["micro"]) == (50, 100)
    assert other["notes"]["excluded"] == "1 items by noise 1 (a paper)"
    assert "excluded: 1 items by noise 1 (a paper)" in CliRunner().invoke(app, command).output
    for broken in ({"items": ["x"]}, {"name": "n", "version": "1", "source": "", "items": ["vscode-0"]}):
        wrong.write_text(json.dumps(broken))
        assert CliRunner().invoke(app, command).exit_code == 1
    for other_item in ("another", "vscode", "vscode-", "scode-0", "vscode-0-1", "VSCODE-0"):
        wrong.write_text(json.dumps({"name": "noise", "version": "1", "source": "a paper", "items": [other_item]}))
        assert "none of the 2 items" in " ".join(CliRunner().invoke(app, command).output.split())


def test_a_list_of_wrong_labels_has_whole_ids() -> None:
    """`X` is not `X-1`: both are items of ScreenSpot-Pro."""
    listed, click = Exclusions("noise 1", "a paper", frozenset({"vscode_1"})), Action("click")

    def covers(step_id: str, **facts: str) -> bool:
        return listed.covers(Case(step_id, None, click, None, facts=facts))

    assert covers("vscode_1") and covers("vscode_1-0a1b2c3d", item_id="vscode_1")
    assert not covers("vscode_1-1") and not covers("vscode_1-1-0a1b2c3d", item_id="vscode_1-1")
    assert not covers("vscode_12") and not covers("vscode")


@given(
    st.sampled_from(sorted({*SERVER, "id"})),
    st.sampled_from(['"\\ud800"', '["\\udc00"]', '{"a": "\\ud83d"}', '"caf\xe9"']),
)
def test_a_text_that_no_table_can_hold_costs_its_row(tmp_path_factory: Any, field: str, value: str) -> None:
    """JSON can spell half a surrogate pair, and bytes that are no UTF-8 are read as such."""
    file = tmp_path_factory.getbasetemp() / "halves.jsonl"
    odd = json.dumps(SERVER | {field: "@"}).replace('"@"', value)
    file.write_bytes(odd.encode("latin-1") + b"\n" + json.dumps(SERVER | {"instruction": "open"}).encode())
    result = score_file(file, "mai_ui", "mmbench_gui/items")
    assert result.rows == 2 and result.to_json()
