"""Other ways to infer with real models, and the coordinates of what a grounder sees in a crop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coepg_dagster import running
from coepg_dagster.artifacts import PAIR_PREDICTIONS, PAIRS, PREDICTIONS, write_steps
from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.schema import Evaluation
from coepg_dagster.geometry import Box, Point, Space
from coepg_dagster.inference.asking import AskedPair, planner_passes
from coepg_dagster.inference.predict import PREDICTION_SCHEMA
from coepg_dagster.jobs import EvaluationJob
from coepg_dagster.prompts import planner_answer
from tests.conftest import step, step_table
from tests.inference.scripted import Scripted, generation
from tests.jobs import quiet


def test_every_way_is_a_pair_beside_the_agent(
    trained: Callable[[str, int], Path], models: Models, steps: pa.Table, tmp_path: Path
) -> None:
    """A vote of almost greedy samples is the agent's own point; the agent's number is what it is without other ways."""
    validation = steps.set_column(1, steps.schema.field("split"), pa.array(["validation"] * steps.num_rows))
    write_steps(validation, tmp_path / "steps.arrow", ["validation"])
    ways = Evaluation(
        inference={
            "region_vote": {"samples": 3, "temperature": 0.01, "side": 9.0},
            "zoom": {},
            "best_of_plans": {"plans": 2},
            "consistency_check": {"retries": 1},
        }
    ).inference

    def evaluate(name: str, **change: Any) -> dict[str, Any]:
        places = {"out": tmp_path / name / "out", "scratch": tmp_path / name / "scratch"}
        for place in places.values():
            place.mkdir(parents=True)
        agent = {"planner": str(trained("planner", 0)), "grounder": str(trained("grounder", 0))}
        settings = {"max_steps": None, "protocol": "miniwob/point", "max_plan_tokens": 24, "max_point_tokens": 8}
        common: dict[str, Any] = {"models": models, "steps": tmp_path / "steps.arrow", "device": "cpu", "batch_size": 8}
        more = {"seed": 1, "splits": ["validation"], "processes": 1}
        return running.run(EvaluationJob(**common, **places, **agent, **settings, **more, **change), quiet)

    alone, together = evaluate("alone"), evaluate("together", inference=ways)
    pairs = together.pop(PAIRS)
    assert together == alone and set(pairs) == {f"by_{name}" for name in ways}
    greedy = pq.read_table(tmp_path / "alone" / "out" / PREDICTIONS).to_pylist()
    stored = pq.read_table(tmp_path / "together" / "out" / PAIR_PREDICTIONS)
    voted = stored.filter(pa.compute.equal(stored["pair"], "by_region_vote")).to_pylist()
    for row, same in zip(voted, greedy, strict=True):
        assert row["plan"] == same["plan"] and (row["x"] is None) == (same["x"] is None)
        assert row["x"] is None or (row["x"], row["y"]) == pytest.approx((same["x"], same["y"]))
        assert row["mean_logprob"] is None or row["mean_logprob"] == 0
    vote = pairs["by_region_vote"]["validation"]
    assert vote["metrics"] == alone["validation"]["metrics"] and vote["calibration"]["confidence"] == 1
    assert "calibration" not in pairs["by_zoom"]["validation"]


def test_a_point_in_a_crop_is_a_point_of_the_screenshot(models: Models) -> None:
    """The crop (42, 56)-(84, 112) is shown at 84 x 112 px; its middle is (63, 84) of the screenshot."""
    from tests.conftest import png

    table = step_table(step("a", screenshot=png()))
    answer = planner_answer("press OK", "CLICK", "")
    pi, phi = Scripted(lambda _: generation(answer)), Scripted(lambda _: generation("(", "42", ",", "56", ")"))
    pair = AskedPair(pi, phi, table, models, (16, 8), 0)
    crop = Box(42, 56, 84, 112, Space.ORIGINAL)
    [[(point, text)]] = pair.points([(0, "press OK")], crops=[crop])
    assert (point, text) == (Point(63, 84, Space.ORIGINAL), "(42,56)")
    assert phi.requests[0].image.size == (84, 112)
    [[(whole, _)]] = pair.points([(0, "press OK")])
    assert whole == Point(42, 56, Space.ORIGINAL)


def test_the_planner_passes_if_one_of_its_plans_has_the_labels_action() -> None:
    table = step_table(step("a"), step("b", action_type="TYPE", value="red"), step("c"))

    def attempt(*kinds: tuple[str | None, str]) -> pa.Table:
        rows = [
            {
                "step_id": name,
                "plan": kind and "p",
                "action_type": kind,
                "value": value,
                "planner_text": "",
                "grounder_text": "",
            }
            for name, (kind, value) in zip("abc", kinds, strict=True)
        ]
        return pa.Table.from_pylist(rows, PREDICTION_SCHEMA)

    wrong = attempt(("TYPE", ""), ("TYPE", "blue"), (None, ""))
    assert planner_passes(table, [wrong, attempt(("CLICK", ""), ("TYPE", "red"), (None, ""))]) == pytest.approx(200 / 3)
    assert planner_passes(table, [wrong]) == 0
