"""A user's own labels: what a perfect agent answers is right, whatever the spelling of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from coepg_dagster.prompts import parse_planner, planner_answer
from coepg_dagster.readers.importing import check_data, load_benchmark
from coepg_dagster.readers.rows import ALL_ACTIONS
from coepg_dagster.rewards.gate import gate_of
from coepg_dagster.steps import GATE_PASSED

from .samples import user_row, write_user_rows


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
