"""Tables 1 and 2: the paper's rows, half-up rounding, one protocol per table."""

from __future__ import annotations

import csv
import io

import pytest

from coepg_dagster.evaluation.case import Action, Case, ScoringError
from coepg_dagster.evaluation.protocols import PROTOCOLS
from coepg_dagster.evaluation.result import Result, result_of
from coepg_dagster.evaluation.tables import (
    TABLE_1,
    TABLE_2,
    android_control_table,
    half_up,
    mean,
    mind2web_table,
    results_table,
)


def result(protocol: str, right: int, wrong: int, episodes: int = 4) -> Result:
    box = (0.0, 0.0, 10.0, 10.0)
    cases = [
        Case(
            step_id=f"s{i}",
            episode_id=f"e{i % episodes}",
            label=Action("click" if "android" in protocol else "CLICK", "", (5.0, 5.0)),
            prediction=Action(
                "click" if "android" in protocol else "CLICK", "", (5.0, 5.0) if i < right else (90.0, 9.0)
            ),
            boxes=(box,),
            size=(100, 100),
        )
        for i in range(right + wrong)
    ]
    return result_of(PROTOCOLS[protocol], cases)


def test_halves_go_up_on_decimals() -> None:
    assert [half_up(v) for v in (74.05, 81.65, 0.05, 100.0, None)] == ["74.1", "81.7", "0.1", "100.0", "–"]
    assert f"{74.05:.1f}" == "74.0"  # what binary floats would print


def test_printed_averages_follow_from_printed_numbers() -> None:
    for name, (*splits, average) in TABLE_1.items():
        assert half_up(mean([split[2] for split in splits])) == (average or "–"), name  # type: ignore[index]
    for name, (high, low, average) in TABLE_2.items():
        assert half_up(mean([high, low])) == average, name


def test_our_rows_stand_beside_the_papers_in_every_form() -> None:
    table = mind2web_table({"ours_7B & more": {"test_task": result("mind2web/uground", 3, 1)}})
    assert len(table.rows) == len(TABLE_1) + 1
    assert table.rows[-1][:5] == ("ours_7B & more", "mind2web/uground, macro", "75.0", "100.0", "75.0")
    assert table.rows[-1][-1] == "–"  # two splits are missing
    assert table.markdown().count("\n| ") == len(table.rows) + 1
    read = list(csv.reader(io.StringIO(table.csv())))
    assert read[0][0] == "Planner + grounder" and read[-1][2] == "75.0" and read[-1][-1] == ""
    assert r"ours\_7B \& more" in table.latex()
    assert table.latex().count(r"\\") == len(table.rows) + 1


def test_android_control_average() -> None:
    both = {"high": result("android_control/strict14", 1, 1), "low": result("android_control/strict14", 3, 1)}
    assert android_control_table({"ours": both}).rows[-1] == (
        "ours",
        "android_control/strict14, micro",
        "50.0",
        "75.0",
        "62.5",
    )


@pytest.mark.parametrize(
    "splits",
    [
        {"test_task": result("mind2web/uground", 1, 1), "test_website": result("mind2web/seeclick", 1, 1)},
        {"test_task": result("android_control/strict14", 1, 1)},
        {"test": result("mind2web/uground", 1, 1)},
    ],
)
def test_protocols_and_splits_are_not_mixed(splits: dict[str, Result]) -> None:
    with pytest.raises(ScoringError):
        mind2web_table({"ours": splits})


def test_results_beside_each_other() -> None:
    table = results_table({"a": result("miniwob/point", 1, 3), "b": result("miniwob/point", 2, 2)})
    assert [row[2] for row in table.rows] == ["25.00", "50.00"]
    with pytest.raises(ScoringError, match="one table holds one protocol"):
        results_table({"a": result("miniwob/point", 1, 3), "b": result("mind2web/uground", 2, 2)})
