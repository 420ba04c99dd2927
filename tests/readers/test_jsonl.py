"""A user's own labels: what a perfect agent answers is right, whatever the spelling of the file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from coepg_dagster.prompts import parse_planner, planner_answer
from coepg_dagster.readers.importing import check_data, load_benchmark
from coepg_dagster.readers.rows import ALL_ACTIONS, ReaderError
from coepg_dagster.rewards.gate import gate_of
from coepg_dagster.steps import GATE_PASSED

from .samples import picture, user_row, write_user_rows


@pytest.mark.parametrize("action", sorted(ALL_ACTIONS))
def test_a_planner_can_be_right_about_every_value(tmp_path: Path, action: str) -> None:
    given = ["", " ", "None", "no input text", " NONE ", " Rome ", "left"]
    rows = [user_row(f"{i}", action_type=action, value=value) for i, value in enumerate(given)]
    table, counts = load_benchmark("jsonl", write_user_rows(tmp_path, list(rows)), tmp_path / "out")
    takes_none = action in ("CLICK", "LONG_PRESS", "BACK", "HOME", "WAIT")
    assert table["value"].to_pylist() == ["", "", "", "", "", *(["", ""] if takes_none else ["Rome", "left"])]
    assert counts.noticed["train: value_dropped"] == (2 if takes_none else 0)
    for value in table["value"].to_pylist():
        assert gate_of(parse_planner(planner_answer("it", action, value)), action, value) == GATE_PASSED
    assert check_data(tmp_path).ok


def scaled(split: str, width: float, height: float) -> list[dict[str, Any] | str]:
    """Steps whose boxes are spread over a screen of this size, in its unit."""
    spots = [i / 40 for i in range(40)]
    boxes = [[x * width, x * height, (x + 0.025) * width, (x + 0.025) * height] for x in spots]
    return [user_row(f"{i}", split=split, boxes=[box]) for i, box in enumerate(boxes)]


@pytest.mark.parametrize("split", ["train", "test"])
def test_boxes_in_another_unit_are_refused(tmp_path: Path, split: str) -> None:
    def of(width: int, height: int, rows: list[dict[str, Any] | str]) -> Path:
        write_user_rows(tmp_path / "data", rows)
        (tmp_path / "data/images/1.png").write_bytes(picture(width, height))
        return tmp_path / "data"

    for size in ((100, 60), (1010, 1200), (800, 800)):
        pixels = of(*size, scaled(split, *size))
        report = check_data(pixels)
        assert report.ok and "thousandths" not in report.text()
        assert load_benchmark("jsonl", pixels, tmp_path / "out")[1].steps == {split: 40}

    unit = of(1280, 720, scaled(split, 1, 1))
    why = "steps.jsonl: all boxes lie in 0..1: the format has pixels of the image; multiply by its width and height"
    assert not check_data(unit).ok and why in check_data(unit).text()
    with pytest.raises(ReaderError, match=re.escape(why)):
        load_benchmark("jsonl", unit, tmp_path / "out")
    points = of(1280, 720, [user_row(point=[0.5, 0.5]), "not json", "[]", user_row("b", boxes=[[1]])])
    assert "all points lie in 0..1" in check_data(points).text()

    small = of(300, 400, scaled(split, 1000, 1000))
    assert not check_data(small).ok and "if these are thousandths, multiply" in check_data(small).text()
    if split == "train":
        with pytest.raises(ReaderError, match=r"box_outside_image.*if these are thousandths.*Rejected rows"):
            load_benchmark("jsonl", small, tmp_path / "out")
    large = check_data(of(1010, 1200, scaled(split, 1000, 1000)))
    assert large.ok and "look whether these are thousandths" in large.text()
    (tmp_path / "data/images/1.png").unlink()
    assert "thousandths" not in check_data(tmp_path / "data").text(), "nothing is known of images that are not there"


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_fault_of_a_picture_names_its_file(tmp_path: Path, split: str) -> None:
    rows: dict[str, Any] = {
        "bad_image": user_row("a", image="images/page.png", split=split),
        "extreme_aspect": user_row("b", image="images/wide.png", split=split, boxes=[[1, 1, 9, 8]]),
        "bad_field": user_row("c", split=split, point=[500, 1]),
        "box_outside_image": user_row("d", boxes=[[0, 0, 500, 30]]),
    }
    write_user_rows(tmp_path, list(rows.values()))
    (tmp_path / "images/page.png").write_bytes(b"<html></html>")
    (tmp_path / "images/wide.png").write_bytes(picture(2048, 9))
    left_out = check_data(tmp_path).rejects.to_pylist()
    assert [row["reason"] for row in left_out] == list(rows)
    for row, given in zip(left_out, rows.values(), strict=True):
        assert row["detail"].startswith(repr(given["image"]))


def test_lines_are_counted_as_editors_do(tmp_path: Path) -> None:
    write_user_rows(tmp_path, ["", user_row(), " ", "{", user_row()])
    text = check_data(tmp_path).text()
    assert "steps.jsonl: line 4: bad_json: " in text and "steps.jsonl: line 5: duplicate_id: " in text
