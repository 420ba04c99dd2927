"""The reward of GRPO for an end-to-end agent, by the point in its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from coepg_dagster.geometry import Point, Space
from coepg_dagster.inference.screens import Screens
from coepg_dagster.prompts import parse_end_to_end
from coepg_dagster.rewards.gate import gate_of
from coepg_dagster.steps import GATE_PASSED
from coepg_dagster.training.examples import completion_text


class PointReward:
    """1 if type and value are right (Eq. 7, 8) and the point of the answer is in the box, else 0.

    `rows` holds those of the last batch (ROLLOUT_SCHEMA without the advantage). No grounder is involved: `graders` is empty.
    """

    __name__ = "point"

    def __init__(self, steps: pa.Table, screens: Screens, space: Space) -> None:
        self._screens, self._space = screens, space
        self._labels = {row["step_id"]: row for row in steps.select(["step_id", "action_type", "value"]).to_pylist()}
        self.rows: list[dict[str, Any]] = []

    def __call__(self, completions: Sequence[Any], step_id: Sequence[str], **_: Any) -> list[float]:
        """The reward of each completion, shape (B,); `step_id` is the dataset's column, one for each completion."""
        return self.score([completion_text(completion) for completion in completions], step_id)

    def score(self, texts: Sequence[str], step_ids: Sequence[str]) -> list[float]:
        """The reward of each answer on its step."""
        self.rows = []
        for text, step_id in zip(texts, step_ids, strict=True):
            label, answer = self._labels[step_id], parse_end_to_end(text)
            gate = gate_of(answer, label["action_type"], label["value"])
            boxes = self._screens.boxes(step_id)
            hit = not boxes
            if boxes and answer is not None and answer.point is not None:
                viewport = self._screens.viewport(step_id)
                point = viewport.point(Point(*answer.point, self._space), Space.ORIGINAL)
                hit = any(box.contains(point) for box in boxes)
            reward = float(gate == GATE_PASSED and hit)
            self.rows.append(
                {"step_id": step_id, "text": text, "plan": None, "gate": gate, "graders": [], "reward": reward}
            )
        return [row["reward"] for row in self.rows]
