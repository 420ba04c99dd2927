"""Whatever a model wrote is a case; what is damaged is named with file and row; nothing else ends the reading of a file."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from coepg_dagster.cli import app
from coepg_dagster.evaluation import statistics
from coepg_dagster.evaluation.case import NO_PREDICTION, UNREADABLE, ScoringError
from coepg_dagster.evaluation.protocols import PROTOCOLS
from coepg_dagster.evaluation.result import Result
from coepg_dagster.evaluation.rows import BAD_LABEL

from .shared import score_file


@pytest.fixture(scope="module", autouse=True)
def _few_resamples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "RESAMPLES", 5)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


# A right row of each format: a file for `coepg score`, its labels and its answers. {n} is the row's number.

CLICK = {"action_type": "CLICK", "value": "", "point": [5, 5]}
COEPG = {
    "step_id": "{n}",
    "episode_id": "e",
    "step_index": 0,
    "width": 100,
    "height": 100,
    "group": "web_text",
    "label": CLICK | {"boxes": [[0, 0, 9, 9]], "positives": [["7", 1]]},
    "nodes": [{"box": [0, 0, 9, 9], "text": "OK"}],
    "prediction": CLICK | {"element": "7"},
}
GUI_R1 = {
    "instruction": "{n}",
    "gt_action": "click",
    "gt_bbox": [5, 5],
    "gt_input_text": "no input text",
    "group": "web",
    "ui_type": "text",
    "image_size": [100, 100],
    "orig_w": 100,
    "orig_h": 100,
    "pred_coord": [5, 5],
    "pred_action": "click",
    "pred_input_text": "no input text",
}
GUI_R1_WEB = GUI_R1 | {"gt_bbox": [0, 0, 9, 9]}
SCREENSPOT = {
    "img_filename": "{n}",
    "bbox": [0, 0, 9, 9],
    "platform": "web",
    "data_type": "text",
    "scale": 1,
    "output": "(5, 5)",
}
PLAN = {
    "annotation_id": "{n}",
    "action_uid": "a",
    "operation": "CLICK",
    "value": "",
    "bbox": [[0, 0, 9, 9]],
    "step": 0,
    "total_steps": 1,
    "target_blocks": {"0": [[0, 0, 9, 9]]},
    "ans_block": 0,
    "gpt_action": "CLICK",
    "gpt_value": "None",
    "description": "OK",
    "output": "(5, 5)",
    "scale": 1,
}
STEP = {"episode_id": "{n}", "step": 0, "action": {"action_type": "click", "x": 5, "y": 5}}
TREE = [[{"bbox_pixels": {"x_min": 0, "y_min": 0, "x_max": 9, "y_max": 9}, "text": None}]]
GENIE = {"questionID": "{n}_0", "gt": '{"action": "click", "coordinate": [5, 5]}'}

ROWS = {"coepg": COEPG, "gui_r1": GUI_R1, "gui_r1_web": GUI_R1_WEB, "screenspot": SCREENSPOT, "plan": PLAN}

PREDICTED = [
    ("coepg", protocol, "coepg", path)
    for protocol in PROTOCOLS
    for path in (
        "prediction",
        "prediction.action_type",
        "prediction.value",
        "prediction.point",
        "prediction.element",
    )
]
PREDICTED += [
    ("gui_r1", protocol, "gui_r1", path)
    for protocol in ("android_control/gui_r1", "android_control/strict14", "android_control/qwen")
    for path in ("pred_coord", "pred_action", "pred_input_text")
]
PREDICTED += [("gui_r1", "screenspot/gui_r1", "gui_r1_web", "pred_coord")]
PREDICTED += [("uground", "screenspot/uground", "screenspot", "output")]
PREDICTED += [
    ("uground", "mind2web/uground", "plan", path)
    for path in ("gpt_action", "gpt_value", "description", "ans_block", "output")
]

NUMBER = st.sampled_from(["1e999", "-1e999", "NaN", "9" * 5000, "-" + "9" * 400, "1e200", "0.5", "1" + "0" * 18])
MAD = st.recursive(
    NUMBER
    | st.sampled_from(["null", "true", "{}", "[]", '""', '"None"', '"\\ud800"', '"(5, "', '"(NaN, 5)"', '"(1e999,5)"'])
    | st.sampled_from(['"I cannot see it"', '"\u2028\x85"', '"click"', "[" * 300 + "]" * 300, '"5,5"', "[5, 5, 5]"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5).map(json.dumps),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda each: f"[{', '.join(each)}]")
        | inner.map(lambda value: f'{{"x": {value}}}')
        | inner.map(lambda value: f"[{value}, 5]")
    ),
    max_leaves=4,
).map(str.encode) | st.sampled_from([b'"\xff\xfe"', b'"caf\xe9"', b'[5, "\xc3"]', b'"\xef\xbb\xbf"'])
"""Anything that may stand where JSON has a value, and bytes that are no UTF-8."""


def with_value(row: dict[str, Any], path: str, value: bytes, n: int) -> bytes:
    """The row as JSON, with `value` where the path of fields leads."""
    row = json.loads(json.dumps(row).replace("{n}", str(n)))
    *outer, last = path.split(".")
    at = row
    for key in outer:
        at = at[key]
    at[last] = "@here@"
    return json.dumps(row).encode().replace(b'"@here@"', value)


def plain(row: dict[str, Any], n: int) -> bytes:
    return json.dumps(row).replace("{n}", str(n)).encode()


def values(result: Result, row: int) -> list[Any]:
    return [result.steps[metric].to_pylist()[row] for metric in result.metrics]


@given(st.sampled_from(PREDICTED), MAD)
def test_whatever_was_predicted_is_a_case_and_costs_no_other_row(
    folder: Path, what: tuple[str, str, str, str], mad: bytes
) -> None:
    format, protocol, name, path = what
    row = ROWS[name]
    file = folder / "mad.jsonl"
    file.write_bytes(with_value(row, path, mad, 1) + b"\n" + plain(row, 2))
    result = score_file(file, format, protocol)
    file.write_bytes(plain(row, 1) + b"\n" + plain(row, 2))
    right = score_file(file, format, protocol)
    assert result.rows == right.rows == 2
    if protocol != "android_control/gui_r1":  # whose classes without a hit drop out of all rows
        assert values(result, 1) == values(right, 1)
    assert result.to_json()


@given(
    st.sampled_from(["action", "action.action_type", "action.text", "action.x", "output"]), MAD, st.sampled_from([1, 2])
)
def test_whatever_was_predicted_of_a_phone_is_a_case(folder: Path, path: str, mad: bytes, scale: int) -> None:
    (folder / "samples.json").write_text(
        json.dumps([json.loads(plain(STEP | {"accessibility_tree": TREE}, n)) for n in (1, 2)])
    )
    answer, plan = STEP | {"output": "(5, 5)", "scale": scale}, STEP
    plans, answers = [plain(plan, 1), plain(plan, 2)], [plain(answer, 1), plain(answer, 2)]
    (answers if path == "output" else plans)[0] = with_value(answer if path == "output" else plan, path, mad, 1)
    (folder / "plans.jsonl").write_bytes(b"\n".join(plans))
    (folder / "answers.jsonl").write_bytes(b"\n".join(answers))
    files = {"labels": folder / "samples.json", "answers": folder / "answers.jsonl"}
    result = score_file(folder / "plans.jsonl", "uground", "android_control/uground500", **files)
    assert result.rows == 2 and values(result, 1) == [1, 1, 1]


@given(MAD, st.booleans())
def test_whatever_was_answered_of_a_badcase_is_a_case(folder: Path, mad: bytes, whole: bool) -> None:
    """The answer itself, or the point in the JSON that it holds."""
    inside = json.dumps(f'{{"action": "click", "coordinate": {mad.decode(errors="replace")}}}').encode()
    mad = mad if whole else inside
    rows = [with_value(GENIE | {"answer": ""}, "answer", mad, 1), plain(GENIE | {"answer": GENIE["gt"]}, 2)]
    listed = b'{"actiontype_match_details": [%s]}' % b", ".join(rows)
    unlisted = b'{"actiontype_notmatch_details": []}'
    file = folder / "click_badcase.json"
    file.write_bytes(b'{"actiontype_match_gt": %s, "actiontype_notmatch_gt": %s}' % (listed, unlisted))
    result = score_file(file, "ui_genie", "android_control/ui_genie")
    assert result.rows == 2 and result.steps["type_acc"].to_pylist()[1] == 1


LABELS = [
    ("coepg", "android_control/uground500", "coepg", path)
    for path in (
        *("step_id", "episode_id", "step_index", "episode_steps", "width", "height", "group", "label", "nodes"),
        *("label.action_type", "label.value", "label.point", "label.boxes", "label.positives"),
    )
]
LABELS += [
    ("gui_r1", protocol, row, path)
    for protocol, row in (("android_control/strict14", "gui_r1"), ("screenspot/gui_r1", "gui_r1_web"))
    for path in ("instruction", "gt_action", "gt_bbox", "gt_input_text", "group", "ui_type", "image_size", "orig_w")
]
LABELS += [("uground", "screenspot/uground", "screenspot", path) for path in SCREENSPOT if path != "output"]
LABELS += [
    ("uground", "mind2web/uground", "plan", path)
    for path in ("annotation_id", "operation", "value", "bbox", "step", "total_steps", "target_blocks", "scale")
]


@given(st.sampled_from(LABELS), MAD)
def test_a_damaged_label_costs_its_row_which_is_named(
    folder: Path, what: tuple[str, str, str, str], mad: bytes
) -> None:
    format, protocol, name, path = what
    row = ROWS[name]
    file = folder / "labels.jsonl"
    file.write_bytes(plain(row, 1) + b"\n" + with_value(row, path, mad, 2))
    try:
        result = score_file(file, format, protocol)
    except ScoringError as error:
        str(error).encode()
        if "none of mobile_text" not in str(error):  # a group that the protocol does not know
            assert "row 2" in str(error) or "step " in str(error) or "more than once" in str(error)
    else:
        assert result.rows == 2 and result.to_json()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("label.point", b"[1e999, 2]"),
        ("label.point", b"[" + b"9" * 5000 + b", 2]"),
        ("label.point", b"[NaN, 2]"),
        ("label.boxes", b"[[0, 0, 1e999, 9]]"),
        ("step_id", b'"caf\xe9"'),
        ("step_id", b'"\\ud800"'),
        ("label.action_type", b'"\xff"'),
        ("width", b"9" * 5000),
        ("step_index", b"99999999999"),
        ("episode_steps", b"99999999"),
        ("label", b"[]"),
        ("nodes", b"[5]"),
    ],
)
def test_damaged_labels_by_example(folder: Path, path: str, value: bytes) -> None:
    file = folder / "example.jsonl"
    file.write_bytes(plain(COEPG, 1) + b"\n\n" + with_value(COEPG, path, value, 3))
    result = score_file(file, "coepg", "android_control/uground500")
    assert (result.rows, result.scored, dict(result.skipped)) == (2, 1, {BAD_LABEL: 1})
    assert "example.jsonl: row 3: " in str(result.notes[f"{BAD_LABEL}, the first"])
    assert values(result, 0) == [1, 1, 1]
    file.write_bytes(with_value(COEPG, path, value, 1))
    with pytest.raises(ScoringError, match=r"example\.jsonl: row 1: .*none of 1 rows can be scored"):
        score_file(file, "coepg", "android_control/uground500")


@pytest.mark.parametrize("unread", [b"{", with_value(COEPG, "label", b"[]", 2), with_value(COEPG, "step_id", b"5", 2)])
def test_a_row_that_cannot_be_read_says_nothing_about_the_tasks_of_the_others(folder: Path, unread: bytes) -> None:
    file = folder / "tasks.jsonl"
    file.write_bytes(plain(COEPG, 1) + b"\n" + unread)
    assert "tasks" not in score_file(file, "coepg", "android_control/strict14").notes
    file.write_bytes(plain(COEPG, 1) + b"\n" + with_value(COEPG, "episode_id", b"null", 2))
    assert "tasks" in score_file(file, "coepg", "android_control/strict14").notes


def test_a_field_that_no_model_wrote_is_an_error(folder: Path) -> None:
    """In one prediction of several it is the model's, in all of them the script's."""
    file = folder / "misspelt.jsonl"
    rows = [plain(COEPG | {"prediction": {"action_type": "CLICK", "coords": [5, 5]}}, n) for n in (1, 2)]
    file.write_bytes(b"\n".join(rows))
    with pytest.raises(ScoringError, match="row 1: prediction: field 'coords' is not known"):
        score_file(file, "coepg", "android_control/strict14")
    file.write_bytes(b"\n".join([*rows, plain(COEPG, 3)]))
    assert score_file(file, "coepg", "android_control/strict14").notes[UNREADABLE] == 2


def test_marks_and_line_ends_of_unicode_are_text(folder: Path) -> None:
    rows = [COEPG | {"step_id": f"{{n}}{mark}"} for mark in ("\u2028", "\x85", "\u2029", "\ufeff")]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False).replace("{n}", str(i)) for i, row in enumerate(rows))
    for name, content in (("marked.jsonl", text), ("list.json", f"[{text.replace(chr(13), ',')}]")):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        result = score_file(folder / name, "coepg", "android_control/strict14")
        assert (result.rows, result.metrics["step_acc"].micro) == (4, 100)


def test_a_damaged_archive_is_named_with_the_row(folder: Path) -> None:
    """One flipped bit anywhere: deflate, its checksum, its header."""
    whole = gzip.compress(b"\n".join(plain(COEPG, n) for n in range(40)), mtime=0)
    file, rows = folder / "flipped.jsonl.gz", set()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            assert (
                score_file(file, "coepg", "android_control/strict14").rows == 40
            )  # a bit of the header that says nothing
        except ScoringError as error:
            assert "flipped.jsonl.gz" in str(error)
            rows |= {part for part in str(error).split(":") if part.startswith(" row")}
    assert len(rows) > 2
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ScoringError, match=r"gz: row \d+: damaged or cut-short"):
        score_file(file, "coepg", "android_control/strict14")


# rows without a prediction

LACKING: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("coepg", "android_control/strict14", COEPG, {"prediction": None}),
    ("coepg", "screenspot/uground", COEPG, {"prediction": {"action_type": None, "value": "", "point": None}}),
    ("gui_r1", "android_control/strict14", GUI_R1, {"pred_coord": None, "pred_action": None}),
    ("uground", "screenspot/uground", SCREENSPOT, {"output": ""}),
    ("uground", "mind2web/uground", PLAN, {"output": None, "gpt_action": None}),
]


@pytest.mark.parametrize(("format", "protocol", "row", "change"), LACKING)
def test_rows_without_a_prediction_are_counted_and_a_file_without_any_is_refused(
    folder: Path, format: str, protocol: str, row: dict[str, Any], change: dict[str, Any]
) -> None:
    file = folder / "lacking.jsonl"
    lacking = [plain(row | change, n) for n in range(3)]
    file.write_bytes(b"\n".join([*lacking, plain(row, 3)]))
    result = score_file(file, format, protocol)
    assert result.rows == 4 and result.notes[NO_PREDICTION] == 3
    assert json.loads(result.to_json())["notes"][NO_PREDICTION] == 3
    file.write_bytes(b"\n".join(lacking))
    with pytest.raises(ScoringError, match=r"lacking\.jsonl: none of its 3 rows has a prediction"):
        score_file(file, format, protocol)


MAI_UI = {"id": "{n}", "bbox": [0, 0, 9, 9], "pred": [5, 5], "group": "Dev", "ui_type": "text"}
UNREAD: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    *(
        ("coepg", "android_control/strict14", COEPG, {"prediction": CLICK | {"point": point}}, "point")
        for point in (["5", "5"], "[5, 5]", {"x": 5, "y": 5}, [5, 5, 5], [None, 5])
    ),
    ("coepg", "screenspot/uground", COEPG, {"prediction": "click"}, "prediction"),
    ("coepg", "omniact/action_score", COEPG, {"prediction": {"actions": ["import os"]}}, "actions"),
    *(("mai_ui", "screenspot_pro/items", MAI_UI, {"pred": pred}, "pred") for pred in (["5", "5"], "[5, 5]", {"x": 5})),
    ("mai_ui", "screenspot_pro/items", MAI_UI, {"pred": [-1, -1], "raw_response": "no"}, "raw_response"),
    ("gui_r1", "screenspot/uground", GUI_R1_WEB, {"pred_coord": "5, 5"}, "pred_coord"),
    ("uground", "screenspot/uground", SCREENSPOT, {"output": "in the middle"}, "output"),
    ("uground", "mind2web/uground", PLAN, {"gpt_action": ["CLICK"]}, "gpt_action"),
]


@pytest.mark.parametrize(("format", "protocol", "row", "change", "field"), UNREAD)
def test_unreadable_predictions_are_named_and_a_file_of_nothing_else_is_refused(
    folder: Path, format: str, protocol: str, row: dict[str, Any], change: dict[str, Any], field: str
) -> None:
    if "omniact" in protocol:
        row = row | {"label": {"actions": [CLICK | {"box": [0, 0, 9, 9]}]}, "prediction": {"actions": [CLICK]}}
    file = folder / "unread.jsonl"
    unread = [plain(row | change, n) for n in range(3)]
    file.write_bytes(b"\n".join([plain(row, 3), *unread]))
    notes = score_file(file, format, protocol).notes
    named = rf"unread\.jsonl: row {{}}: .*field '{field}' must be .*, not "
    assert notes[UNREADABLE] == 3 and re.search(named.format(2), str(notes[f"{UNREADABLE}, the first"]))
    file.write_bytes(b"\n".join(unread))
    with pytest.raises(ScoringError, match=named.format(1) + ".*none of 3 rows has a prediction that can be read"):
        score_file(file, format, protocol)


def test_the_printed_table_counts_what_lacks(folder: Path) -> None:
    file = folder / "printed.jsonl"
    changes: list[dict[str, Any]] = [
        {},
        {"prediction": None},
        {"prediction": "a sentence"},
        {"prediction": {"value": [1]}},
    ]
    file.write_bytes(b"\n".join(plain(COEPG | change, n) for n, change in enumerate(changes)))
    command = ["score", str(file), "--format", "coepg", "--protocol", "android_control/strict14"]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0
    assert f"{NO_PREDICTION}: 1" in printed.output and f"{UNREADABLE}: 2" in printed.output
    file.write_bytes(plain(COEPG | {"prediction": None}, 0))
    assert CliRunner().invoke(app, command).exit_code == 1


def test_a_file_that_unpacks_to_much_more_is_not_read_to_its_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coepg_dagster.evaluation.rows.MAX_JSON", 1 << 20)
    for format, start in (("ui_genie", b'{"a": "'), ("coepg", b'["')):
        file = folder / "bomb.json.gz"
        file.write_bytes(gzip.compress(start + b"x" * (1 << 24)))
        with pytest.raises(ScoringError, match=r"more than 1,048,576 bytes of JSON|no JSON|longer|invalid"):
            score_file(file, format, "android_control/ui_genie")
