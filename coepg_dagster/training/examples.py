"""What the trainers see: chat examples made from D_k and the labelled steps."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature

from coepg_dagster.geometry import Box, Space
from coepg_dagster.inference.screens import Screens
from coepg_dagster.prompts import (
    Message,
    Style,
    assistant,
    grounder_answer,
    grounder_messages,
    planner_answer,
    planner_messages,
)

_CHAT = List({"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})})


class NothingToTrainOn(ValueError):
    """D_{k-1} holds no row that this model could learn from."""


def _chat(messages: list[Message]) -> list[Message]:
    """The messages with every part having the same keys, as Arrow needs it; chat templates look at `type` only."""
    return [
        {"role": m["role"], "content": [{"type": p["type"], "text": p.get("text")} for p in m["content"]]}
        for m in messages
    ]


def planner_examples(dataset: pa.Table, steps: pa.Table, screens: Screens, style: Style) -> Dataset:
    """One example per row of D_k: (screenshot, Q, h_t) → plan, label type, label value."""
    told = {row["step_id"]: row for row in steps.select(["step_id", "goal", "history"]).to_pylist()}
    rows = [
        {
            "images": [screens.image(row["step_id"])],
            "prompt": _chat(planner_messages(told[row["step_id"]]["goal"], told[row["step_id"]]["history"], style)),
            "completion": _chat(assistant(planner_answer(row["plan"], row["action_type"], row["value"]))),
        }
        for row in dataset.to_pylist()
    ]
    return _examples(rows, completion=True)


def grounder_examples(dataset: pa.Table, screens: Screens, style: Style, space: Space) -> Dataset:
    """One example per row of D_k with a target: (screenshot, plan) → centre of its box, whole numbers in `space`."""
    rows = []
    for row in dataset.to_pylist():
        if row["box"] is None:
            continue
        centre = screens.viewport(row["step_id"]).point(Box(*row["box"], Space.ORIGINAL).centre, space)
        rows.append(
            {
                "images": [screens.image(row["step_id"])],
                "prompt": _chat(grounder_messages(row["plan"], style)),
                "completion": _chat(assistant(grounder_answer(round(centre.x), round(centre.y)))),
            }
        )
    return _examples(rows, completion=True)


def grpo_prompts(dataset: pa.Table, steps: pa.Table, screens: Screens, style: Style) -> Dataset:
    """One prompt per step that has a row in D_k, in the order of `steps`, with its step_id for the reward."""
    covered = set(dataset["step_id"].to_pylist())
    rows = [
        {
            "images": [screens.image(row["step_id"])],
            "prompt": _chat(planner_messages(row["goal"], row["history"], style)),
            "step_id": row["step_id"],
        }
        for row in steps.select(["step_id", "goal", "history"]).to_pylist()
        if row["step_id"] in covered
    ]
    return _examples(rows, completion=False)


def _examples(rows: list[dict[str, Any]], *, completion: bool) -> Dataset:
    if not rows:
        raise NothingToTrainOn(
            "D_{k-1} has no usable row: look at the decisions beside it for why its candidates were dropped"
        )
    features = {"images": List(ImageFeature()), "prompt": _CHAT}
    features |= {"completion": _CHAT} if completion else {"step_id": Value("string")}
    return Dataset.from_list(rows, features=Features(features))
