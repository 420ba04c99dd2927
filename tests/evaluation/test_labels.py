"""Predictions that carry only ids, beside the label files of a board; and lists of wrong labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coepg_dagster.cli import app
from coepg_dagster.evaluation import statistics
from coepg_dagster.evaluation.case import NO_PREDICTION, Rows, ScoringError
from coepg_dagster.evaluation.exclusions import question, read_exclusions, shipped
from coepg_dagster.evaluation.result import Result
from coepg_dagster.evaluation.score import PredictionFile, score_predictions
from coepg_dagster.geometry import Space
from coepg_dagster.readers.boards import BOARDS
from tests.readers.samples import ASKED, SIZE, write_board

from .shared import PREDICTIONS, SAMPLES, needs_data


@pytest.fixture(scope="module", autouse=True)
def _few_resamples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "RESAMPLES", 5)
        yield


def scored(
    folder: Path, rows: list[dict[str, Any]], protocol: str, labels: Path, format: str = "mai_ui", **more: Any
) -> Result:
    path = folder / "predictions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return score_predictions(PredictionFile(path, format, labels, **more), protocol)


def by_item(result: Result) -> dict[str, float | None]:
    return dict(zip(result.steps["step_id"].to_pylist(), result.steps["acc"].to_pylist(), strict=True))


ITEMS = {
    "screenspot_v1": ("screenspot_mobile_0", "screenspot_mobile_1"),
    "screenspot_v2": ("screenspot_mobile_v2_0", "screenspot_mobile_v2_1"),
    "screenspot_pro": ("vscode_macos_0", "vscode_macos_1"),
    "osworld_g": ("X-0", "X-1"),
    "osworld_g_refined": ("X-0", "X-1"),
    "mmbench_gui": ("os_mac_0", "os_mac_1"),
    "ui_vision": ("element_grounding_basic_0", "element_grounding_basic_1"),
}


@pytest.mark.parametrize("board", BOARDS)
def test_ids_and_points_are_enough(tmp_path: Path, board: str) -> None:
    labels, (first, second) = write_board(tmp_path / "board", board), ITEMS[board]
    family = board.removesuffix("_v1")
    protocol = f"{family}/{'uground' if family == 'screenspot' else 'items'}"
    inside, outside = [130, 220], [99, 220]
    rows = [{"id": first, "pred": inside}, {"id": second, "pred": outside}]
    assert by_item(scored(tmp_path, rows, protocol, labels)) == {first: 1, second: 0}
    mine = [{"step_id": row["id"], "prediction": {"action_type": "", "point": row["pred"]}} for row in rows]
    assert by_item(scored(tmp_path, mine, protocol, labels, "coepg")) == {first: 1, second: 0}


def test_what_does_not_fit_the_labels_is_named(tmp_path: Path) -> None:
    labels = write_board(tmp_path / "board", "screenspot_pro", {"id": "c", "bbox": "no box"}, {"id": "d"}, {"id": "e"})
    rows = [
        {"id": "vscode_macos_0", "pred": [130, 220], "bbox": [100, 200, 160, 240]},
        {"id": "vscode_macos_0", "pred": [0, 0]},
        {"id": "vscode_macos_9", "pred": [130, 220]},
        {"id": "vscode_macos_1", "pred": [130, 220], "prompt_to_evaluate": "open it", "bbox": [0, 0, 10, 10]},
        {"id": "d", "pred": None},
    ]
    result = scored(tmp_path, rows, "screenspot_pro/items", labels)
    assert by_item(result) | {} == by_item(result) and result.scored == 4 and result.metrics["acc"].micro == 50
    assert dict(result.skipped) == {
        "further rows of an item": 1,
        "predictions for no item of the board": 1,
        "rows whose label cannot be read": 1,
    }
    assert "'vscode_macos_9' is no item of" in str(result.notes["predictions for no item of the board, the first"])
    assert "entry 2" in str(result.notes["rows whose label cannot be read, the first"])
    noted = {name: note.names for name, note in result.notes.items() if isinstance(note, Rows)}
    assert noted == {
        "items without a prediction, which count as wrong": ["e"],
        "rows whose own box is another than that of the labels: are they of one version?": ["vscode_macos_1"],
        "rows whose own instruction is another than that of the labels: are they of one version?": ["vscode_macos_1"],
    }
    assert json.loads(result.to_json())["listed"] == noted and result.notes[NO_PREDICTION] == 1
    mine = [{"step_id": row["id"], "prediction": {"action_type": "", "point": row["pred"]}} for row in rows]
    again = scored(tmp_path, mine, "screenspot_pro/items", labels, "coepg")
    assert by_item(again) == by_item(result) | dict.fromkeys(by_item(again).keys() - by_item(result).keys())


def test_labels_of_another_version_leave_no_row(tmp_path: Path) -> None:
    labels = write_board(tmp_path / "board", "screenspot_v2")
    rows = [{"id": "screenspot_mobile_0", "pred": [130, 220]}]
    with pytest.raises(ScoringError, match=r"no row is about one of the 2 items .* another version"):
        scored(tmp_path, rows, "screenspot_v2/items", labels)
    with pytest.raises(ScoringError, match="holds no labels of screenspot_pro"):
        scored(tmp_path, rows, "screenspot_pro/items", labels)
    with pytest.raises(ScoringError, match=r"label files of .* only, not of aitw"):
        scored(tmp_path, [], "aitw/action_matching", labels, "coepg")


@pytest.mark.parametrize("format", ["mai_ui", "coepg"])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        # the board's own files lack the size that a stated space needs
        ({"space": "norm_1000"}, r"row 1: a point in the space norm_1000 needs the size of the screenshot"),
        ({"space": "thousandths"}, r"row 1: field 'space' must be one of"),
        (None, r"row 1: must be a JSON object"),
        ({"id": "x", "step_id": "x"}, "no row is about one of the 2 items"),
    ],
)
def test_where_no_row_can_be_scored_the_real_reason_is_given(
    tmp_path: Path, format: str, row: dict[str, Any] | None, message: str
) -> None:
    labels, (item, _) = write_board(tmp_path / "board", "screenspot_v1"), ITEMS["screenspot_v1"]
    about = {"id": item, "pred": [9, 9]} if format == "mai_ui" else {"step_id": item, "prediction": {"point": [9, 9]}}
    with pytest.raises(ScoringError, match=message):
        scored(tmp_path, [row and about | row] * 3, "screenspot/uground", labels, format)  # type: ignore[list-item]


@pytest.mark.parametrize("own", [{}, {"id": 7}, {"id": "mine-7", "step_id": 7}, {"index": "7"}])
@pytest.mark.parametrize("asked", [ASKED, f" {ASKED}", f"{ASKED}\n"])
def test_an_id_of_another_kind_is_no_obstacle(tmp_path: Path, own: dict[str, Any], asked: str) -> None:
    labels = write_board(tmp_path / "board", "osworld_g")
    file = labels / "benchmark/OSWorld-G.json"
    entries = json.loads(file.read_text())
    file.write_text(json.dumps([entries[0], entries[1] | {"instruction": "open"}]))
    image = entries[0].get("image_path", "a.png")
    row = own | {"img_path": f"/else/where/{image}", "prompt_to_evaluate": asked, "pred": [130, 220]}
    assert by_item(scored(tmp_path, [row], "osworld_g/polygons", labels))["X-0"] == 1


def test_a_row_without_an_id_goes_by_image_and_instruction(tmp_path: Path) -> None:
    labels = write_board(tmp_path / "board", "osworld_g")
    file = labels / "benchmark/OSWorld-G.json"
    entries = json.loads(file.read_text())
    file.write_text(json.dumps([entries[0], entries[1] | {"instruction": "open"}]))
    row = {"img_path": "/else/where/a.png", "pred": [130, 220]}
    rows = [row | {"prompt_to_evaluate": text} for text in ("open", ASKED, "nothing that was asked")]
    result = scored(tmp_path, rows, "osworld_g/polygons", labels)
    assert by_item(result)["X-0"] == 1 and by_item(result)["X-1"] == 0  # outside of the triangle
    assert result.skipped == {"predictions for no item of the board": 1}


@pytest.mark.parametrize(
    ("space", "point"), [("unit", [0.5, 0.5]), ("norm_1000", [500, 500]), ("original", [150, 130])]
)
def test_a_stated_space_is_taken_and_nothing_is_refused(tmp_path: Path, space: str, point: list[float]) -> None:
    centre = [SIZE[0] / 2 - 1, SIZE[1] / 2 - 1, SIZE[0] / 2 + 1, SIZE[1] / 2 + 1]
    labels = write_board(tmp_path / "board", "screenspot_pro", {"id": "c", "bbox": centre})
    raw = {"raw_response": json.dumps({"coordinate": point})}
    rows = [{"id": "c", "pred": point} | raw]
    assert by_item(scored(tmp_path, rows, "screenspot_pro/items", labels, space=Space(space)))["c"] == 1
    assert by_item(scored(tmp_path, [rows[0] | {"space": space}], "screenspot_pro/items", labels))["c"] == 1
    if space != "original":
        with pytest.raises(ScoringError, match=r"fit two spaces.*0 of them are right.*1 of them are right"):
            scored(tmp_path, rows, "screenspot_pro/items", labels)


def test_abilities_are_averages_of_their_own(tmp_path: Path) -> None:
    labels = write_board(tmp_path / "board", "osworld_g")
    classified = {
        "classified": {"text_matching": [{"id": "X-0"}], "layout_understanding": [{"id": "X-0"}, {"id": "X-1"}]}
    }
    (labels / "benchmark/classification_result.json").write_text(json.dumps(classified))
    rows = [{"id": "X-0", "pred": [130, 220]}, {"id": "X-1", "pred": [0, 0]}]
    by = scored(tmp_path, rows, "osworld_g/items", labels).metrics["acc"].by
    assert by["ability"] == {"layout_understanding": (50, 2), "text_matching": (100, 1)}


# wrong labels


def test_a_list_by_question_and_box(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    item = {"question": question("Mobile", " close  it "), "box": [0, 0, 10, 10]}
    head = {"name": "n", "version": "2", "source": "s"}
    path.write_text(json.dumps(head | {"items": [item, "an-id"]}))
    found = read_exclusions(path)
    assert found.name == "n 2" and found.items == {"an-id"} and found.boxes == {"mobile: close it": ((0, 0, 10, 10),)}
    for broken in ([5], [{"question": "x"}], [{"question": "x", "box": [1, 2]}], []):
        path.write_text(json.dumps(head | {"items": broken}))
        with pytest.raises(ScoringError):
            read_exclusions(path)


def test_changes_between_two_versions_make_a_list(tmp_path: Path) -> None:
    old = write_board(tmp_path / "old", "screenspot_v1", {"bbox": [1, 1, 5, 5], "instruction": "moved"})
    new = write_board(tmp_path / "new", "screenspot_v2", {"bbox": [3.5, 1, 5, 5], "instruction": "moved"})
    command = ["label-changes", "screenspot", str(old), "screenspot_v2", str(new), "--source", "a paper"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0
    assert json.loads(found.output) == {
        "name": "screenspot: changed in screenspot_v2",
        "version": "1",
        "source": "a paper",
        "items": [{"question": "mobile: moved", "box": [1, 1, 6, 6]}],
    }
    same = CliRunner().invoke(app, ["label-changes", "screenspot", str(old), "screenspot", str(old), "--source", "s"])
    assert same.exit_code == 1 and "nothing to exclude" in " ".join(same.output.split())


@needs_data
def test_the_shipped_list_of_screenspot_names_items_of_both_copies_of_v1() -> None:
    listed = shipped("screenspot/gui_r1")
    assert listed is not None and "OS-Copilot/ScreenSpot-v2" in listed.source
    assert sum(map(len, listed.boxes.values())) == 161 and shipped("aitw/action_matching") is None
    log = str(PREDICTIONS / "gui_r1/guir1_3b_cpt55_a.screenspot.jsonl.gz")
    command = ["score", log, "--format", "gui_r1", "--protocol", "screenspot/gui_r1", "--json"]
    found = json.loads(CliRunner().invoke(app, command).output)
    other = found["without exclusions"]
    assert found["metrics"]["acc"]["n"] == 1272 and other["metrics"]["acc"]["n"] == 1111
    items = SAMPLES / "screenspot_uground/re_gpt-4o.jsonl"
    rows = [json.loads(line) for line in items.read_text().splitlines()]
    asked = {question(row["platform"], row["instruction"]) for row in rows}
    assert listed.boxes.keys() <= asked


@pytest.mark.parametrize("board", BOARDS)
def test_files_with_ids_alone_are_compared_on_every_board(tmp_path: Path, board: str) -> None:
    labels, (first, second) = write_board(tmp_path / "board", board), ITEMS[board]
    family = board.removesuffix("_v1")
    protocol = f"{family}/{'uground' if family == 'screenspot' else 'items'}"
    inside, outside = [130, 220], [99, 220]
    (a, b), files = ((inside, outside), (inside, inside)), (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    for path, points in zip(files, (a, b), strict=True):
        rows = [{"id": item, "pred": point} for item, point in zip((first, second), points, strict=True)]
        path.write_text("\n".join([*map(json.dumps, rows), "no JSON"]))
    # an unanswered item is wrong, as an unreadable row of it
    files[0].write_text(json.dumps({"id": first, "pred": inside}))
    command = ["compare", *map(str, files), "--format", "mai_ui", "--protocol", protocol, "--labels", str(labels)]
    out = CliRunner().invoke(app, [*command, "--json"])
    assert out.exit_code == 0, out.output
    (compared,) = json.loads(out.stdout)["splits"].values()
    of = compared["differences"]["acc"]
    assert (compared["steps"], compared["left_out"], of["micro"]) == (2, {"a": 0, "b": 1}, 50)
    assert "left out: 0 of A, 1 of B" in CliRunner().invoke(app, command).stdout


def test_points_in_another_space_are_compared_and_an_iteration_has_no_labels(tmp_path: Path) -> None:
    labels, path = write_board(tmp_path / "board", "screenspot_pro"), tmp_path / "a.jsonl"
    path.write_text(json.dumps({"id": ITEMS["screenspot_pro"][0], "pred": [130 / SIZE[0], 220 / SIZE[1]]}))
    command = ["compare", str(path), str(path), "--format", "mai_ui", "--protocol", "screenspot_pro/items"]
    out = CliRunner().invoke(app, [*command, "--labels", str(labels), "--space", "unit", "--json"])
    (compared,) = json.loads(out.stdout)["splits"].values()
    assert compared["differences"]["acc"]["a"] == 50
    assert CliRunner().invoke(app, ["compare", "a@1", "a@2", "--labels", str(labels)]).exit_code == 2


@pytest.mark.parametrize("bad", ['{"id": "vscode_macos_1", "pred": [1, 2]', '{"id": "vscode_macos_1"', "[]", '"x"'])
def test_a_step_that_one_file_has_unreadable_is_named(tmp_path: Path, bad: str) -> None:
    row = {"img_size": list(SIZE), "bbox": [100, 200, 160, 240], "pred": [130, 220], "group": "Dev"}
    rows = [json.dumps(row | {"id": f"vscode_macos_{i}"}) for i in range(2)]
    files = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, lines in zip(files, (rows, [rows[0], bad]), strict=True):
        path.write_text("\n".join(lines))
    out = CliRunner().invoke(
        app, ["compare", *map(str, files), "--format", "mai_ui", "--protocol", "screenspot_pro/items"]
    )
    assert out.exit_code == 1 and "differ in 1 steps, for example 'vscode_macos_1" in out.output


@pytest.mark.parametrize("protocol", ["strict14", "os_atlas", "gui_r1", "ui_genie", "qwen"])
def test_a_users_list_of_wrong_labels_of_android_control(tmp_path: Path, protocol: str) -> None:
    rows = [
        {
            **{"step_id": f"17_{i}", "episode_id": "17", "step_index": i, "width": 100, "height": 100},
            **{"seen_width": 100, "seen_height": 100},
            "label": {"action_type": "click", "value": "", "point": [50, 50], "boxes": [[40, 40, 60, 60]]},
            "prediction": {"action_type": "click", "value": "", "point": [50 if i else 99, 50]},
        }
        for i in range(4)
    ]
    file, wrong = tmp_path / "mine.jsonl", tmp_path / "wrong.json"
    file.write_text("\n".join(map(json.dumps, rows)))
    wrong.write_text(json.dumps({"name": "mine", "version": "3", "source": "looked at", "items": ["17_0", "99_1"]}))
    command = ["score", str(file), "--format", "coepg", "--protocol", f"android_control/{protocol}"]
    out = CliRunner().invoke(app, [*command, "--exclude", str(wrong), "--json"])
    assert out.exit_code == 0, out.output
    whole = json.loads(out.stdout)
    rest = whole["without exclusions"]
    of = [result["metrics"]["step_acc"]["micro"] for result in (whole, rest)]
    assert (whole["scored"], rest["scored"], of) == (4, 3, [75, 100])
    assert rest["notes"]["excluded"] == "1 items by mine 3 (looked at)"
    whole_tasks = CliRunner().invoke(app, [*command[:-1], f"sop/android_control/{protocol}", "--exclude", str(wrong)])
    assert whole_tasks.exit_code == 1 and f"exclude under android_control/{protocol}" in whole_tasks.output
    # nothing is left out silently, and a list of another board is refused
    assert "without exclusions" not in json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    wrong.write_text(json.dumps({"name": "other", "version": "1", "source": "x", "items": ["vscode_1"]}))
    other = CliRunner().invoke(app, [*command, "--exclude", str(wrong)])
    assert other.exit_code == 1 and "is it for this board?" in " ".join(other.output.split())
