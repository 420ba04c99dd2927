"""Jobs: to a file and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.jobs import CandidatesJob, EvaluationJob, GrpoJob, Job, Placement, SftJob, VerdictsJob, read_job
from coepg_dagster.progress import Ended

COMMON: dict[str, Any] = {
    "out": Path("out"),
    "scratch": Path("scratch"),
    "steps": Path("steps.arrow"),
    "models": Models(base_planner="a", base_grounder="b", planners={"p": "a"}, verifiers={"v": "b"}),
    "device": "cpu",
    "batch_size": 8,
    "seed": 3,
}
JOBS = [
    SftJob(
        **COMMON,
        role="planner",
        init="a",
        dataset=Path("d"),
        train_split="train",
        validation_split="validation",
        max_plan_tokens=8,
        max_point_tokens=8,
        config=Sft(),
        placement=Placement(),
    ),
    GrpoJob(
        **COMMON,
        init="a",
        grounder=("grounder_1", "g"),
        verifiers={"v": "b"},
        dataset=Path("d"),
        train_split="train",
        validation_split="validation",
        max_point_tokens=8,
        config=Grpo(),
        placement=Placement(processes=2, save_every=7),
    ),
    CandidatesJob(
        **COMMON, members={"p": "a"}, train_split="train", max_steps=None, config=Regeneration(), processes=2
    ),
    VerdictsJob(
        **COMMON,
        members={"v": "b"},
        candidates=Path("c"),
        train_split="train",
        config=Regeneration(),
        shuffled_plans=9,
        processes=2,
    ),
    EvaluationJob(
        **COMMON,
        planner="a",
        grounder="b",
        splits=["test"],
        max_steps=5,
        protocol="miniwob/point",
        max_plan_tokens=8,
        max_point_tokens=8,
        processes=2,
    ),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.kind)
def test_a_job_survives_its_file(job: Job, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job.model_dump_json())
    assert read_job(tmp_path / "job.json") == job


def test_a_job_of_another_version_is_refused(tmp_path: Path) -> None:
    for change in ({"kind": "dance"}, {"extra": 1}, {"seed": "x"}):
        (tmp_path / "job.json").write_text(json.dumps(json.loads(JOBS[0].model_dump_json()) | change))
        with pytest.raises(ValidationError):
            read_job(tmp_path / "job.json")


def test_the_device_auto_becomes_the_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.json").write_text(JOBS[0].model_copy(update={"device": "auto"}).model_dump_json())
    for there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        assert read_job(tmp_path / "job.json").device == device
    assert JOBS[0].device_name() == "cpu"
    (tmp_path / "job.json").write_text(JOBS[0].model_copy(update={"device": "cuda"}).model_dump_json())
    with pytest.raises(Ended, match="torch sees no GPU here: use `auto` or `cpu`"):
        read_job(tmp_path / "job.json")
