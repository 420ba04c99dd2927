"""The reward of GRPO for a model whose own answer names the place: an end-to-end agent, or a grounder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from coepg_dagster.geometry import Point, Space
from coepg_dagster.inference.screens import Screens
from coepg_dagster.prompts import parse_corners, parse_end_to_end, parse_points
from coepg_dagster.rewards.answers import Answers
from coepg_dagster.rewards.cdrem import ValueMode
from coepg_dagster.rewards.composite import Composite, parts_of
from coepg_dagster.rewards.gate import gate_of
from coepg_dagster.steps import GATE_PASSED, GATE_UNPARSED
from coepg_dagster.training.examples import completion_text
from coepg_dagster.training.scoring import all_terms, as_parts, boxes_of, in_groups, size_of

NOWHERE = (np.nan,) * 4


class PointReward:
    """The composite reward of the place that an answer names. By default it is 1 if the place is in the box, else 0.

    For an end-to-end agent, type and value count too (Eq. 7, 8); those of a grounder's answer are right once it can be read.
    `rows` holds those of the last batch (ROLLOUT_SCHEMA without the advantage). No grounder is involved: `graders` is empty.
    """

    __name__ = "point"

    def __init__(
        self,
        steps: pa.Table,
        screens: Screens,
        space: Space,
        composite: Composite | None = None,
        agent: Literal["end_to_end", "grounder"] = "end_to_end",
        value_mode: ValueMode = "f1",
    ) -> None:
        self._screens, self._space, self._composite, self._agent = screens, space, composite or Composite(), agent
        self._value_mode = value_mode
        self._labels = {row["step_id"]: row for row in steps.select(["step_id", "action_type", "value"]).to_pylist()}
        self.rows: list[dict[str, Any]] = []

    def __call__(
        self, completions: Sequence[Any], step_id: Sequence[str], plan: Sequence[str] | None = None, **_: Any
    ) -> list[float]:
        """The reward of each completion, shape (B,); `step_id` and `plan` are columns of the prompts, one for each completion."""
        return self.score([completion_text(completion) for completion in completions], step_id, plan)

    def score(self, texts: Sequence[str], step_ids: Sequence[str], plans: Sequence[str] | None = None) -> list[float]:
        """The reward of each answer on its step; `plans` are what a grounder was given, and only recorded."""
        answers, gates, parts = [], [], []
        for text, step_id in zip(texts, step_ids, strict=True):
            answer, gate, of_answer = self._read(text, step_id)
            answers.append(answer)
            gates.append(gate)
            parts.append(of_answer)
        groups = in_groups(list(zip(step_ids, plans or step_ids, strict=True)), answers)
        of_groups = [self._composite.point_scores(g) if len(g.boxes) else np.ones(len(g.areas)) for g in groups]
        point = np.array([score for of_group in of_groups for score in of_group], dtype=np.float64)
        terms = all_terms(self._composite, groups)
        parsed, types, values = np.array(parts, dtype=np.float64).reshape(-1, 3).T
        rewards = self._composite.combine(parsed, types, values, point, terms)
        made = as_parts(self._composite, parsed, types, values, point, terms)
        self.rows = [
            {
                "step_id": step_id,
                "text": text,
                "plan": plans[i] if plans else None,
                "gate": gates[i],
                "graders": [],
                "parts": made[i],
                "reward": float(rewards[i]),
            }
            for i, (text, step_id) in enumerate(zip(texts, step_ids, strict=True))
        ]
        return [row["reward"] for row in self.rows]

    def _read(self, text: str, step_id: str) -> tuple[Answers, str, tuple[float, float, float]]:
        """(the answer as its one-row `Answers`, its gate, its parts)."""
        viewport = self._screens.viewport(step_id)

        def original(x: float, y: float) -> tuple[float, float]:
            point = viewport.point(Point(x, y, self._space), Space.ORIGINAL)
            return point.x, point.y

        named: tuple[float, ...] | None
        if self._agent == "grounder":
            named, points = parse_corners(text), parse_points(text)
            gate = GATE_PASSED if named else GATE_UNPARSED
            parts = (float(named is not None),) * 3
        else:
            answer, label = parse_end_to_end(text), self._labels[step_id]
            gate = gate_of(answer, label["action_type"], label["value"], self._value_mode)
            parts = parts_of(answer, label["action_type"], label["value"], self._value_mode)
            points = [answer.point] if answer and answer.point else []
            named = (*points[0], *points[0]) if points else None
        corners = NOWHERE if named is None else (*original(*named[:2]), *original(*named[2:]))
        candidates = np.array([original(*point) for point in points]).reshape(-1, 2)
        areas, size = np.array([corners]), size_of(viewport)
        placed = Answers(areas, boxes_of(self._screens.boxes(step_id)), size, texts=[text], candidates=[candidates])
        return placed, gate, (parts[0], parts[1], parts[2])
