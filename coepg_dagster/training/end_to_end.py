"""The end-to-end baseline of Table 3: one model that answers type, value and point, without a plan.

It is trained on the same rows of D_{k-1} as planner and grounder, by the same trainers: SFT on the labels, then, where GRPO is
on, GRPO with the reward that is left when nobody reads a plan: its own point must lie in the box.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from accelerate import PartialState

from coepg_dagster.experiment import Grpo, Models, Sft
from coepg_dagster.geometry import Point, Space
from coepg_dagster.inference.screens import Screens
from coepg_dagster.pools.candidates import gate_of_answer
from coepg_dagster.progress import Report
from coepg_dagster.prompts import parse_end_to_end
from coepg_dagster.steps import GATE_PASSED
from coepg_dagster.training.examples import completion_text
from coepg_dagster.training.launch import ALONE, Placement, is_main
from coepg_dagster.training.preflight import PREFLIGHT
from coepg_dagster.training.sft import train_sft


class PointReward:
    """1 where type and value are right (Eq. 7, 8) and the answer's own point lies in the box, else 0.

    Remembers the rows of the batch (ROLLOUT_SCHEMA without the advantage); nobody but the label grades, so `graders` is empty.
    """

    __name__ = "point"

    def __init__(self, steps: pa.Table, screens: Screens, space: Space) -> None:
        self._screens, self._space = screens, space
        self._labels = {row["step_id"]: row for row in steps.select(["step_id", "action_type", "value"]).to_pylist()}
        self.rows: list[dict[str, Any]] = []

    def __call__(self, completions: Sequence[Any], step_id: Sequence[str], **_: Any) -> list[float]:
        """The reward of each completion; `step_id` is the dataset's column, one per completion."""
        return self.score([completion_text(completion) for completion in completions], step_id)

    def score(self, texts: Sequence[str], step_ids: Sequence[str]) -> list[float]:
        """The reward of each answer on its step."""
        self.rows = []
        for text, step_id in zip(texts, step_ids, strict=True):
            label, answer = self._labels[step_id], parse_end_to_end(text)
            gate = gate_of_answer(answer, label["action_type"], label["value"])
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


def train_end_to_end(
    init: str,
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    sft: Sft,
    grpo: Grpo,
    seed: int,
    device: str,
    scratch: Path,
    out: Path,
    report: Report,
    placement: Placement = ALONE,
    validation: pa.Table | None = None,
    probed: pa.Table | None = None,
) -> dict[str, Any]:
    """Trains the end-to-end agent from checkpoint `init` on D_{k-1} and saves it whole under `out`.

    The model before GRPO lies in `scratch`, and is not trained again when a killed run is continued. Returns the figures of
    both stages.
    """
    from coepg_dagster.training.grpo import train_grpo

    stages: dict[str, Any] = {stage: {"scratch": scratch / stage, "placement": placement} for stage in ("sft", "grpo")}
    data = (dataset, steps, models)
    if not grpo.enabled:
        return train_sft("end_to_end", init, *data, sft, seed, device, out, report, **stages["sft"])
    before, done = scratch / "before_grpo", scratch / "before_grpo.json"
    if not done.exists():
        figures = train_sft("end_to_end", init, *data, sft, seed, device, before, report, **stages["sft"])
        if is_main():
            done.with_suffix(".partial").write_text(json.dumps(figures))
            done.with_suffix(".partial").rename(done)
        PartialState().wait_for_everyone()
    trained = train_grpo(
        str(before),
        None,
        {},
        *data,
        grpo,
        1,
        1,
        seed,
        device,
        out,
        report,
        validation=validation,
        probed=probed,
        **stages["grpo"],
    )
    if is_main():
        shutil.copyfile(before / PREFLIGHT, out / f"sft_{PREFLIGHT}")
    before_grpo: dict[str, Any] = json.loads(done.read_text())
    both = {f"sft_{name}": value for name, value in before_grpo.items() if name in trained}
    return before_grpo | both | trained
