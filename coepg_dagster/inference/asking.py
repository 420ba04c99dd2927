"""Predictions by another way to infer (`strategies.inference`): asks π'_k and ϕ_k whatever a way wants to know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from PIL import Image

from coepg_dagster.experiment.models import Models
from coepg_dagster.geometry import Box, Point, Size, Space, Viewport
from coepg_dagster.inference.agents import Planner, planner_inputs
from coepg_dagster.inference.engine import Engine, Failure, Generation, Request, Sampling
from coepg_dagster.inference.predict import PREDICTION_SCHEMA
from coepg_dagster.inference.screens import Screens, decode
from coepg_dagster.plugins import find
from coepg_dagster.progress import Ended
from coepg_dagster.prompts import PlannerAnswer, grounder_messages, parse_grounder, question_messages
from coepg_dagster.rewards.calibration import Calibration, calibration
from coepg_dagster.rewards.gate import gate_of
from coepg_dagster.steps import GATE_PASSED
from coepg_dagster.strategies.inference import Answered


class AskedPair:
    """π and ϕ at labelled steps, as `strategies.inference.Agent` has them. Raises Ended if a model gives no answer.

    Args:
        steps: N steps (STEP_SCHEMA); a way names them by their numbers.
        limits: the longest answer of π and of ϕ, in tokens.
        seed: of what is sampled.
    """

    def __init__(
        self, planner: Engine, grounder: Engine, steps: pa.Table, models: Models, limits: tuple[int, int], seed: int
    ) -> None:
        self._engines, self._models, self._limits, self.seed = (planner, grounder), models, limits, seed
        self._shown = Screens(steps, planner.resize), Screens(steps, grounder.resize)
        self._planner = Planner(planner, self._shown[0], models.prompts)
        self._tasks, self._encoded = planner_inputs(steps), steps["screenshot"]
        widths, heights = steps["width"].to_pylist(), steps["height"].to_pylist()
        self.sizes = [Size(width, height) for width, height in zip(widths, heights, strict=True)]

    def plans(self, steps: Sequence[int], samples: int = 1, temperature: float = 0.0) -> list[list[Answered]]:
        sampling = Sampling(self._limits[0], temperature, samples=samples, seed=self.seed)
        plans = self._planner.plan([self._tasks[i] for i in steps], sampling)
        return [[Answered(plan.text, plan.answer) for plan in of_step] for of_step in plans]

    def points(
        self,
        queries: Sequence[tuple[int, str]],
        samples: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
        crops: Sequence[Box] | None = None,
    ) -> list[list[tuple[Point | None, str]]]:
        sampling = Sampling(self._limits[1], temperature, top_p, samples, self.seed)
        views = [self._view(i, crops[n] if crops else None) for n, (i, _) in enumerate(queries)]
        requests = [
            Request(image, grounder_messages(plan, self._models.prompts))
            for (image, _, _), (_, plan) in zip(views, queries, strict=True)
        ]
        return [
            [(self._point(answer.text, viewport, corner), answer.text) for answer in of_query]
            for of_query, (_, viewport, corner) in zip(
                self._answers(1, requests, sampling, [i for i, _ in queries]), views, strict=True
            )
        ]

    def ask(self, questions: Sequence[tuple[int, str]]) -> list[str]:
        requests = [
            Request(self._shown[0].image(self._tasks[i].step_id), question_messages(text)) for i, text in questions
        ]
        answers = self._answers(0, requests, Sampling(self._limits[0]), [i for i, _ in questions])
        return [answer.text for (answer,) in answers]

    def _view(self, i: int, crop: Box | None) -> tuple[Image.Image, Viewport, Point]:
        """(what ϕ sees, its sizes, its upper left corner in the screenshot); a crop is shown as large as the whole would be."""
        step_id = self._tasks[i].step_id
        whole = self._shown[1].viewport(step_id)
        if crop is None:
            return self._shown[1].image(step_id), whole, Point(0, 0, Space.ORIGINAL)
        part = decode(step_id, self._encoded[i].as_py()).crop((int(crop.x1), int(crop.y1), int(crop.x2), int(crop.y2)))
        seen = part.resize((whole.resized.width, whole.resized.height), Image.Resampling.BICUBIC)
        return seen, Viewport(Size(*part.size), whole.resized), Point(crop.x1, crop.y1, Space.ORIGINAL)

    def _point(self, text: str, viewport: Viewport, corner: Point) -> Point | None:
        pair = parse_grounder(text)
        if pair is None:
            return None
        point = viewport.point(Point(*pair, self._models.coordinates), Space.ORIGINAL)
        return Point(point.x + corner.x, point.y + corner.y, Space.ORIGINAL)

    def _answers(
        self, model: int, requests: Sequence[Request], sampling: Sampling, steps: Sequence[int]
    ) -> list[list[Generation]]:
        result = []
        for i, answers in zip(steps, self._engines[model].generate(requests, sampling), strict=True):
            good = [answer for answer in answers if not isinstance(answer, Failure)]
            if len(good) < len(answers):
                why = next(answer.reason for answer in answers if isinstance(answer, Failure))
                raise Ended(
                    f"step {self._tasks[i].step_id}: the {('planner', 'grounder')[model]} gave no answer: {why}"
                )
            result.append(good)
        return result


def predict_by(name: str, settings: dict[str, Any], pair: AskedPair, steps: pa.Table) -> pa.Table:
    """One prediction per step, in order (PREDICTION_SCHEMA), by the way `name`.

    `mean_logprob` is the log of the way's own confidence, or null.
    """
    answered: list[Answered] = find("inference", name).function(pair, **settings)
    rows = [
        {
            "step_id": step_id,
            "plan": one.answer and one.answer.plan,
            "action_type": one.answer and one.answer.action_type,
            "value": one.answer.value if one.answer else "",
            "x": one.point and one.point.x,
            "y": one.point and one.point.y,
            "mean_logprob": math.log(one.confidence) if one.confidence else None,
            "planner_text": one.text,
            "grounder_text": one.grounder_text,
        }
        for step_id, one in zip(steps["step_id"].to_pylist(), answered, strict=True)
    ]
    return pa.Table.from_pylist(rows, PREDICTION_SCHEMA)


def planner_passes(steps: pa.Table, attempts: Sequence[pa.Table]) -> float:
    """pass@n of the planner alone, in per cent: steps with a plan of the label's type and value among n (PREDICTION_SCHEMA)."""
    labels = steps.select(["action_type", "value"]).to_pylist()
    rows = zip(*(table.select(["plan", "action_type", "value"]).to_pylist() for table in attempts), strict=True)
    right = [
        any(
            one["plan"] is not None
            and gate_of(PlannerAnswer(**one), label["action_type"], label["value"]) == GATE_PASSED
            for one in of_step
        )
        for label, of_step in zip(labels, rows, strict=True)
    ]
    return 100 * sum(right) / len(right)


def calibration_of_points(steps: pa.Table, predictions: pa.Table) -> Calibration | None:
    """How a way's own confidence agrees with its hits, on steps with a target; None: it has no confidence."""
    confidence, hits = [], []
    for boxes, row in zip(steps["boxes"].to_pylist(), predictions.to_pylist(), strict=True):
        if boxes and row["mean_logprob"] is not None:
            point = Point(row["x"], row["y"], Space.ORIGINAL)
            confidence.append(math.exp(row["mean_logprob"]))
            hits.append(any(Box(x1, y1, x2, y2, Space.ORIGINAL).contains(point) for x1, y1, x2, y2 in boxes))
    return calibration(confidence, hits) if hits else None
