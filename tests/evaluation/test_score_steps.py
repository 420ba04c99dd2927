"""miniwob/point and the Mind2Web protocols over step tables."""

from __future__ import annotations

import json
import time
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.evaluation.protocols import PROTOCOLS
from coepg_dagster.evaluation.score import score_attempts, score_steps
from coepg_dagster.steps import STEP_SCHEMA


def step(step_id: str, episode: str = "e0", **change: Any) -> dict[str, Any]:
    return {
        "step_id": step_id,
        "split": "test",
        "episode_id": episode,
        "step_index": 0,
        "family": "click-button",
        "seed": 1,
        "goal": "Click OK",
        "history": [],
        "screenshot": b"",
        "width": 100,
        "height": 100,
        "boxes": [[10.0, 10.0, 20.0, 20.0]],
        "action_type": "CLICK",
        "value": "",
    } | change


def steps_of(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=STEP_SCHEMA)


def predict(*rows: tuple[Any, ...]) -> pa.Table:
    names = ("step_id", "action_type", "value", "x", "y")
    types = (pa.string(), pa.string(), pa.string(), pa.float64(), pa.float64())
    return pa.table([pa.array([r[i] for r in rows], types[i]) for i in range(5)], names=list(names))


def test_point_type_and_value_decide() -> None:
    steps = steps_of(
        step("border"),
        step("outside"),
        step("two", boxes=[[0, 0, 1, 1], [50, 50, 60, 60]], episode="e1"),
        step("value", action_type="TYPE", value="Anna B.", episode="e1"),
        step("none", boxes=[], episode="e1"),
        step("unparsed", episode="e2"),
    )
    result = score_steps(
        "miniwob/point",
        steps,
        predict(
            ("border", "CLICK", "", 20, 10),
            ("outside", "CLICK", "", 20.5, 10),
            ("two", "CLICK", "", 55, 55),
            ("value", "TYPE", "anna B.", 15, 15),
            ("none", "CLICK", "", 15, 15),
            ("unparsed", None, "", None, None),
        ),
    )
    assert (result.rows, result.scored, dict(result.skipped)) == (6, 5, {"no_target": 1})
    assert result.steps["ele_acc"].to_pylist() == [1, 0, 1, 1, None, 0]
    assert result.steps["op_f1"].to_pylist() == pytest.approx([1, 1, 1, 2 / 3, None, 0])
    assert result.steps["step_sr"].to_pylist() == [1, 0, 1, 0, None, 0]
    assert result.metrics["ele_acc"].micro == pytest.approx(60)
    assert result.metrics["ele_acc"].macro == pytest.approx(50)  # (1/2 + 1 + 0) / 3
    low, high = result.metrics["ele_acc"].ci95 or (None, None)
    assert low is not None and high is not None and 0 <= low <= 50 <= high <= 100
    assert json.loads(result.to_json())["metrics"]["step_sr"]["n"] == 5


@pytest.mark.parametrize(
    ("predictions", "message"),
    [
        (predict(), "'a' has none"),
        (predict(("a", "CLICK", "", 1, 1), ("a", "CLICK", "", 1, 1)), "'a' comes twice"),
        (predict(("a", "CLICK", "", 1, 1), ("b", "CLICK", "", 1, 1)), "'b' is not among"),
        (predict(("a", "CLICK", "", 1, None)), "give both or neither"),
    ],
)
def test_wrong_prediction_tables_name_the_step(predictions: pa.Table, message: str) -> None:
    with pytest.raises(ScoringError, match=message):
        score_steps("miniwob/point", steps_of(step("a")), predictions)


@pytest.mark.parametrize("far", [float("inf"), float("nan"), 1e200, -1e308])
@pytest.mark.parametrize("protocol", [name for name, rule in PROTOCOLS.items() if not rule.needs])
def test_a_point_on_no_screen_is_a_miss_under_every_protocol(protocol: str, far: float) -> None:
    steps = steps_of(step("a", family="web_text", boxes=[[50, 50, 60, 60]]))
    steps = steps.append_column("point", pa.array([[55.0, 55.0]], pa.list_(pa.float32())))
    result = score_steps(protocol, steps, predict(("a", "CLICK", "", far, 55)))
    [metric] = {"acc", "ele_acc", "step_acc"} & result.metrics.keys()
    assert not result.steps[metric][0].as_py()


def test_unknown_protocol_lists_the_known_ones() -> None:
    with pytest.raises(ScoringError, match="miniwob/point"):
        score_steps("miniwob/points", steps_of(step("a")), predict(("a", "CLICK", "", 1, 1)))


def test_intervals_come_from_the_seed_and_fast() -> None:
    rows = [step(f"s{i}", episode=f"e{i % 300}") for i in range(1000)]
    table = steps_of(*rows)
    predictions = predict(*[(f"s{i}", "CLICK", "", 15 if i % 3 else 50, 15) for i in range(1000)])
    start = time.perf_counter()
    first = score_steps("miniwob/point", table, predictions, seed=7)
    assert time.perf_counter() - start < 1
    assert first.to_json() == score_steps("miniwob/point", table, predictions, seed=7).to_json()
    assert (
        first.metrics["ele_acc"].ci95
        != score_steps("miniwob/point", table, predictions, seed=8).metrics["ele_acc"].ci95
    )


def test_one_episode_has_no_interval() -> None:
    result = score_steps("miniwob/point", steps_of(step("a")), predict(("a", "CLICK", "", 15, 15)))
    assert result.metrics["ele_acc"].ci95 is None
    assert result.metrics["ele_acc"].macro == 100


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_best_of_several_attempts_counts(right: list[list[bool]]) -> None:
    """`right[i][j]`: whether attempt i is right on step j."""
    steps = steps_of(*(step(f"s{j}", episode=f"e{j}") for j in range(3)))
    tables = [predict(*((f"s{j}", "CLICK", "", 15 if hit else 50, 15) for j, hit in enumerate(row))) for row in right]
    best = score_attempts("miniwob/point", steps, tables)
    assert best.steps["step_sr"].to_pylist() == [float(any(column)) for column in zip(*right, strict=True)]
    assert best.metrics["step_sr"].macro == pytest.approx(100 * sum(map(any, zip(*right, strict=True))) / 3)
    assert best.rows == 3
    if len(tables) == 1:
        assert best.to_json() == score_steps("miniwob/point", steps, tables[0]).to_json()
