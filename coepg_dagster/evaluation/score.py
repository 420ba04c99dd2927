"""The entry points: tables of steps and predictions, or files of predictions, in; a `Result` out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from coepg_dagster.evaluation.case import Action, Case, ScoringError
from coepg_dagster.evaluation.mind2web import pad
from coepg_dagster.evaluation.protocols import find_protocol
from coepg_dagster.evaluation.result import Result, result_of

STEP_COLUMNS = ("step_id", "episode_id", "step_index", "width", "height", "boxes", "action_type", "value")
OPTIONAL_STEP_COLUMNS = ("episode_steps", "point")
PREDICTION_COLUMNS = ("step_id", "action_type", "value", "x", "y")


def score_steps(protocol: str, steps: pa.Table, predictions: pa.Table, *, seed: int = 0) -> Result:
    """Score one prediction per labelled step.

    `steps` needs STEP_COLUMNS of STEP_SCHEMA (screenshots are not touched). `predictions` has PREDICTION_COLUMNS: x
    and y are pixels of the stored screenshot or null, action_type is null where the answer could not be parsed. Every
    step needs exactly one prediction; a missing, doubled or unknown one raises ScoringError with the step's name.
    """
    rule = find_protocol(protocol)
    labelled = _rows(steps, STEP_COLUMNS, OPTIONAL_STEP_COLUMNS, "steps")
    answers: dict[str, dict[str, Any]] = {}
    for row in _rows(predictions, PREDICTION_COLUMNS, (), "predictions"):
        if row["step_id"] in answers:
            raise ScoringError(f"predictions: step {row['step_id']!r} comes twice; keep one prediction per step")
        answers[row["step_id"]] = row
    cases = []
    for row in labelled:
        answer = answers.pop(row["step_id"], None)
        if answer is None:
            raise ScoringError(
                f"predictions: step {row['step_id']!r} has none; write a row with null action_type, x and y where the "
                "model gave no answer"
            )
        cases.append(_case(row, answer))
    if answers:
        raise ScoringError(f"predictions: step {next(iter(answers))!r} is not among the labelled steps")
    notes: dict[str, int | str] = {}
    if protocol == "mind2web/uground":
        padded = pad(cases)
        notes["padded"] = len(padded) - len(cases)
        cases = padded
    return result_of(rule, cases, notes=notes, seed=seed)


def _rows(table: pa.Table, needed: Iterable[str], optional: Iterable[str], what: str) -> list[dict[str, Any]]:
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise ScoringError(f"{what}: column {missing[0]!r} is missing (there are {', '.join(table.column_names)})")
    names = [*needed, *(name for name in optional if name in table.column_names)]
    return table.select(names).to_pylist()


def _case(step: dict[str, Any], answer: dict[str, Any]) -> Case:
    x, y = answer["x"], answer["y"]
    if (x is None) != (y is None):
        raise ScoringError(f"predictions: step {step['step_id']!r} has x = {x}, y = {y}; give both or neither")
    point = None if x is None else (float(x), float(y))
    prediction = None
    if answer["action_type"] is not None:
        prediction = Action(answer["action_type"], answer["value"] or "", point)
    elif point is not None:
        prediction = Action("", "", point)
    label_point = step.get("point")
    return Case(
        step_id=step["step_id"],
        episode_id=step["episode_id"],
        label=Action(step["action_type"], step["value"], tuple(label_point) if label_point else None),
        prediction=prediction,
        boxes=tuple(tuple(box) for box in step["boxes"]),
        size=(step["width"], step["height"]),
        step_index=step["step_index"],
        episode_steps=step.get("episode_steps"),
    )
