"""Predictions of the agent M_k = {π'_k, ϕ_k} on labelled steps: greedy plans, and the points of those plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from coepg_dagster.experiment.models import Models
from coepg_dagster.geometry import Point, Size, Space
from coepg_dagster.inference.agents import Grounder, Grounding, Plan, Planner, planner_inputs
from coepg_dagster.inference.engine import Engine, Failure, Request, Sampling
from coepg_dagster.inference.screens import Screens
from coepg_dagster.progress import Ended
from coepg_dagster.prompts import ACTION_TYPES, PlannerAnswer, parse_end_to_end

PREDICTION_SCHEMA = pa.schema(
    [
        pa.field("step_id", pa.string(), nullable=False),
        pa.field("plan", pa.string()),  # null: the planner's answer could not be parsed, or the agent is end-to-end
        pa.field("action_type", pa.string()),
        pa.field("value", pa.string(), nullable=False),
        pa.field("x", pa.float64()),  # pixels of the stored screenshot
        pa.field("y", pa.float64()),
        pa.field("mean_logprob", pa.float64()),  # of the grounder's coordinate tokens, Eq. 6; see `asking`
        pa.field("planner_text", pa.string(), nullable=False),
        pa.field("grounder_text", pa.string(), nullable=False),
    ]
)

UNPARSED: Final = "unparsed plan"
UNKNOWN_ACTION: Final = "unknown action"
NO_POINT: Final = "no point"
OFF_SCREEN: Final = "point off the screen"
NOT_REWARDED: Final = "not rewarded"
STEP_LIMIT: Final = "step limit"
"""Why an episode on live pages is not solved: one of the first four (`obstacle`) ends it before the step's action, NOT_REWARDED
is the page's verdict, STEP_LIMIT ours."""


def obstacle(prediction: Mapping[str, Any], screen: Size) -> str | None:
    """Why a prediction (PREDICTION_SCHEMA) cannot be performed on a web page of that size, px; None: it can."""
    if prediction["plan"] is None:
        return UNPARSED
    if prediction["action_type"] not in ACTION_TYPES:
        return UNKNOWN_ACTION
    if prediction["x"] is None:
        return NO_POINT
    x, y = prediction["x"], prediction["y"]
    return None if 0 <= x < screen.width and 0 <= y < screen.height else OFF_SCREEN


def predict(
    planner: Engine,
    grounder: Engine,
    steps: pa.Table,
    models: Models,
    max_plan_tokens: int,
    max_point_tokens: int,
) -> pa.Table:
    """One greedy prediction per step, in order (PREDICTION_SCHEMA). Raises Ended if a model gives no answer."""
    sampling = Sampling(max_plan_tokens)
    [[table]] = predict_samples(planner, [grounder], steps, models, sampling, max_point_tokens)
    return table


def predict_samples(
    planner: Engine,
    grounders: Sequence[Engine],
    steps: pa.Table,
    models: Models,
    sampling: Sampling,
    max_point_tokens: int,
) -> list[list[pa.Table]]:
    """For each grounder a table for each sampled plan of a step (PREDICTION_SCHEMA), with a row per step, in order.

    All grounders get the same plans. Raises Ended if a model gives no answer.
    """
    pi = Planner(planner, Screens(steps, planner.resize), models.prompts)
    tasks = planner_inputs(steps)
    plans = pi.plan(tasks, sampling)
    pairs = [(task.step_id, plan) for task, answers in zip(tasks, plans, strict=True) for plan in answers]
    predictions, n = [], sampling.samples
    for engine in grounders:
        rows = _grounded(engine, pairs, steps, models, max_point_tokens)
        predictions.append([pa.Table.from_pylist(rows[i::n], PREDICTION_SCHEMA) for i in range(n)])
    return predictions


def predict_with_plans(
    grounder: Engine, plans: Mapping[str, str], steps: pa.Table, models: Models, max_point_tokens: int
) -> pa.Table:
    """One prediction per step, in order (PREDICTION_SCHEMA): the label's action, at the point of the plan given for its id.

    `planner_text` is that plan. Raises Ended if the grounder gives no answer.
    """
    labels = steps.select(["step_id", "action_type", "value"]).to_pylist()
    pairs = [
        (row["step_id"], Plan(plan := plans[row["step_id"]], PlannerAnswer(plan, row["action_type"], row["value"])))
        for row in labels
    ]
    return pa.Table.from_pylist(_grounded(grounder, pairs, steps, models, max_point_tokens), PREDICTION_SCHEMA)


def _grounded(
    engine: Engine, pairs: Sequence[tuple[str, Plan]], steps: pa.Table, models: Models, max_point_tokens: int
) -> list[dict[str, Any]]:
    """The row of each (step id, plan), with the grounder's point if it is a plan."""
    phi = Grounder(engine, Screens(steps, engine.resize), models.prompts, models.coordinates, max_point_tokens)
    groundings = iter(phi.ground([(step_id, plan.answer.plan) for step_id, plan in pairs if plan.answer]))
    return [prediction_row(step_id, plan, next(groundings) if plan.answer else None) for step_id, plan in pairs]


def prediction_row(step_id: str, plan: Plan, grounding: Grounding | None) -> dict[str, Any]:
    """A row of PREDICTION_SCHEMA. Raises Ended if the grounder gave no answer."""
    if grounding and grounding.failure:
        raise Ended(f"step {step_id}: the grounder gave no answer: {grounding.failure}")
    return {
        "step_id": step_id,
        "plan": plan.answer and plan.answer.plan,
        "action_type": plan.answer and plan.answer.action_type,
        "value": plan.answer.value if plan.answer else "",
        "x": grounding and grounding.point and grounding.point.x,
        "y": grounding and grounding.point and grounding.point.y,
        "mean_logprob": grounding and grounding.mean_logprob,
        "planner_text": plan.text,
        "grounder_text": grounding.text if grounding else "",
    }


def predict_end_to_end(engine: Engine, steps: pa.Table, models: Models, max_tokens: int) -> pa.Table:
    """Greedy predictions of an end-to-end agent on labelled steps: one per step, in order (PREDICTION_SCHEMA).

    `planner_text` is its answer; `plan` and the grounder's columns are empty. Raises Ended if it gives no answer.
    """
    screens = Screens(steps, engine.resize)
    tasks = planner_inputs(steps)
    requests = [Request(screens.image(task.step_id), task.end_to_end_messages(models.prompts)) for task in tasks]
    rows: list[dict[str, Any]] = []
    for task, answers in zip(tasks, engine.generate(requests, Sampling(max_tokens)), strict=True):
        answer = answers[0]
        if isinstance(answer, Failure):
            raise Ended(f"step {task.step_id}: the agent gave no answer: {answer.reason}")
        action = parse_end_to_end(answer.text)
        point = None
        if action is not None and action.point is not None:
            point = screens.viewport(task.step_id).point(Point(*action.point, models.coordinates), Space.ORIGINAL)
        rows.append(
            {
                "step_id": task.step_id,
                "plan": None,
                "action_type": action and action.action_type,
                "value": action.value if action else "",
                "x": point and point.x,
                "y": point and point.y,
                "mean_logprob": None,
                "planner_text": answer.text,
                "grounder_text": "",
            }
        )
    return pa.Table.from_pylist(rows, PREDICTION_SCHEMA)
