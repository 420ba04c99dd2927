"""Predictions on web pages that an agent scrolls through: UGround's block protocol.

The planner sees the first block of the page. Where its action is SCROLL, it sees the next one, until it does something else, or
the last block that holds a target is reached; a page without one shows its first block only. ϕ_k then grounds the plan on the
block that the planner stopped at. A plan that still scrolls names no element, and is not grounded.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from coepg_dagster.experiment.models import Models
from coepg_dagster.inference.agents import Grounder, Plan, Planner, planner_inputs
from coepg_dagster.inference.engine import Engine, Sampling
from coepg_dagster.inference.predict import PREDICTION_SCHEMA, prediction_row
from coepg_dagster.inference.screens import Screens, decode
from coepg_dagster.prompts import scrolls_down
from coepg_dagster.readers.views import View, blocks, held

RULE: Final = "scroll"
"""The view rule (`readers.views`) of the steps that are scrolled."""
SCROLLED_SCHEMA: Final = PREDICTION_SCHEMA.append(pa.field("block", pa.int32()))
"""A prediction, and the block of `readers.views.blocks` that it was made on, from 0; null: the step is not scrolled."""


def is_scrolled(steps: pa.Table) -> bool:
    """Whether any step is a page to be scrolled."""
    return "view_rule" in steps.column_names and RULE in steps["view_rule"].to_pylist()


def predict_scrolling(
    planner: Engine,
    grounders: Sequence[Engine],
    steps: pa.Table,
    models: Models,
    sampling: Sampling,
    max_point_tokens: int,
) -> list[list[pa.Table]]:
    """As `predict_samples` with one sample: for each grounder one table (SCROLLED_SCHEMA), with a row per step, in order.

    Points are pixels of the stored screenshot, the page. Steps that are no page to be scrolled have one block, themselves.
    """
    rows = steps.drop_columns(["screenshot"]).to_pylist()
    views = [
        blocks(row["width"], row["height"]) if row["view_rule"] == RULE else [(0, 0, row["width"], row["height"])]
        for row in rows
    ]
    last = [
        max((i for i, view in enumerate(of_page) if held([tuple(box) for box in row["boxes"]], view)), default=0)
        for row, of_page in zip(rows, views, strict=True)
    ]
    at, plans = [0] * len(rows), dict[int, Plan]()
    waiting = list(range(len(rows)))
    while waiting:
        shown = _cut(steps, {place: views[place][at[place]] for place in waiting})
        tasks = [
            replace(task, scroll=rows[place]["view_rule"] == RULE)
            for place, task in zip(waiting, planner_inputs(shown), strict=True)
        ]
        answers = Planner(planner, Screens(shown, planner.resize), models.prompts).plan(tasks, sampling)
        plans |= {place: of_step[0] for place, of_step in zip(waiting, answers, strict=True)}
        waiting = [place for place in waiting if scrolls_down(plans[place].answer) and at[place] < last[place]]
        for place in waiting:
            at[place] += 1
    shown = _cut(steps, {place: of_page[at[place]] for place, of_page in enumerate(views)})
    asked = [
        (place, plan.answer.plan)
        for place, plan in sorted(plans.items())
        if plan.answer and not (rows[place]["view_rule"] == RULE and scrolls_down(plan.answer))
    ]
    tables = []
    for engine in grounders:
        phi = Grounder(engine, Screens(shown, engine.resize), models.prompts, models.coordinates, max_point_tokens)
        groundings = phi.ground([(rows[place]["step_id"], plan) for place, plan in asked])
        of_place = dict(zip((place for place, _ in asked), groundings, strict=True))
        made: list[dict[str, Any]] = []
        for place, row in enumerate(rows):
            said = prediction_row(row["step_id"], plans[place], of_place.get(place))
            left, top, *_ = views[place][at[place]]
            if said["x"] is not None:
                said |= {"x": said["x"] + left, "y": said["y"] + top}
            made.append(said | {"block": at[place] if row["view_rule"] == RULE else None})
        tables.append([pa.Table.from_pylist(made, SCROLLED_SCHEMA)])
    return tables


def _cut(steps: pa.Table, views: Mapping[int, View]) -> pa.Table:
    """The steps at some places, in that order, each with a part of its screenshot, in pixels of it."""
    cut = []
    for place, (left, top, right, bottom) in views.items():
        row = steps.slice(place, 1).to_pylist()[0]
        if (left, top, right, bottom) != (0, 0, row["width"], row["height"]):
            out = io.BytesIO()
            decode(row["step_id"], row["screenshot"]).crop((left, top, right, bottom)).save(out, "PNG")
            row |= {"screenshot": out.getvalue(), "width": right - left, "height": bottom - top}
        cut.append(row)
    return pa.Table.from_pylist(cut, steps.schema)
