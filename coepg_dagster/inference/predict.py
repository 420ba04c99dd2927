"""What the agent M_k = {π'_k, ϕ_k} does on labelled steps: greedy plans, and the points of those plans."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from coepg_dagster.experiment import Models
from coepg_dagster.inference.agents import Grounder, Planner, tasks_of
from coepg_dagster.inference.engine import Engine, Sampling
from coepg_dagster.inference.screens import Screens

PREDICTION_SCHEMA = pa.schema(
    [
        pa.field("step_id", pa.string(), nullable=False),
        pa.field("plan", pa.string()),  # null: the planner's answer could not be read
        pa.field("action_type", pa.string()),
        pa.field("value", pa.string(), nullable=False),
        pa.field("x", pa.float64()),  # pixels of the stored screenshot
        pa.field("y", pa.float64()),
        pa.field("mean_logprob", pa.float64()),  # of the grounder's coordinate tokens, Eq. 6
        pa.field("planner_text", pa.string(), nullable=False),
        pa.field("grounder_text", pa.string(), nullable=False),
    ]
)


def predict(
    planner: Engine,
    grounder: Engine,
    steps: pa.Table,
    models: Models,
    max_plan_tokens: int,
    max_point_tokens: int,
) -> pa.Table:
    """One prediction per step, in order (PREDICTION_SCHEMA). Raises RuntimeError where a model gives no answer."""
    pi = Planner(planner, Screens(steps, planner.resize), models.prompts)
    phi = Grounder(grounder, Screens(steps, grounder.resize), models.prompts, models.coordinates, max_point_tokens)
    tasks = tasks_of(steps)
    plans = [answers[0] for answers in pi.plan(tasks, Sampling(max_plan_tokens))]
    asked = [(task.step_id, plan.answer.plan) for task, plan in zip(tasks, plans, strict=True) if plan.answer]
    readings = iter(phi.ground(asked))
    rows: list[dict[str, Any]] = []
    for task, plan in zip(tasks, plans, strict=True):
        reading = next(readings) if plan.answer else None
        if reading and reading.failure:
            raise RuntimeError(f"step {task.step_id}: the grounder gave no answer: {reading.failure}")
        rows.append(
            {
                "step_id": task.step_id,
                "plan": plan.answer and plan.answer.plan,
                "action_type": plan.answer and plan.answer.action_type,
                "value": plan.answer.value if plan.answer else "",
                "x": reading and reading.point and reading.point.x,
                "y": reading and reading.point and reading.point.y,
                "mean_logprob": reading and reading.mean_logprob,
                "planner_text": plan.text,
                "grounder_text": reading.text if reading else "",
            }
        )
    return pa.Table.from_pylist(rows, PREDICTION_SCHEMA)
