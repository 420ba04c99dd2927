"""The end-to-end baseline of Table 3: one model that answers type, value and point, without a plan.

It is trained on the same rows of D_{k-1} as planner and grounder, by the same trainers: SFT on the labels, then, if GRPO is
enabled, GRPO with a reward that needs no plan: the point in its answer must lie in the box.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

from accelerate import PartialState

from coepg_dagster.artifacts import CURATION, intact, seal, whole
from coepg_dagster.jobs import EndToEndJob, GrpoJob, SftJob, TrainingJob
from coepg_dagster.progress import Report
from coepg_dagster.store import changes, digests
from coepg_dagster.training.examples import asked_steps
from coepg_dagster.training.grpo import train_grpo
from coepg_dagster.training.launch import is_main, refuse
from coepg_dagster.training.preflight import PREFLIGHT
from coepg_dagster.training.sft import train_sft


def train_end_to_end(job: EndToEndJob, report: Report) -> dict[str, Any]:
    """Trains the end-to-end agent on D_{k-1} and saves it. Returns the figures of both stages.

    The model before GRPO is in the scratch folder, and is not trained again when a killed run is continued.
    """
    if job.grpo.enabled:  # refused before anything is trained
        refuse(job.grpo, job.placement)
        asked_steps(job, job.grpo)
    before, done = job.scratch / "before_grpo", job.scratch / "before_grpo.json"
    shared = {name: getattr(job, name) for name in TrainingJob.model_fields}
    sft = SftJob(
        **shared | {"scratch": job.scratch / "sft", "out": before if job.grpo.enabled else job.out},
        role="end_to_end",
        max_plan_tokens=job.grpo.max_plan_tokens,
        max_point_tokens=0,
        config=job.sft,
    )
    if not job.grpo.enabled:
        return train_sft(sft, report)
    if not intact(done) or changes(json.loads(done.read_text())["files"], before):
        figures = train_sft(sft, report)
        if is_main():
            with whole(done) as draft:
                draft.write_text(json.dumps({"figures": figures, "files": digests(before)}))
            seal(done)
        PartialState().wait_for_everyone()
    grpo = GrpoJob(
        **shared | {"scratch": job.scratch / "grpo", "init": str(before)},
        grounder=None,
        verifiers={},
        max_point_tokens=0,
        config=job.grpo,
    )
    trained = train_grpo(grpo, report)
    if is_main():
        for name in (PREFLIGHT, CURATION):
            if (before / name).exists():
                shutil.copyfile(before / name, job.out / f"sft_{name}")
    before_grpo: dict[str, Any] = json.loads(done.read_text())["figures"]
    both = {f"sft_{name}": value for name, value in before_grpo.items() if name in trained}
    return before_grpo | both | trained
