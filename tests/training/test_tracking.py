"""Trackers: they see the log of a training, and change nothing of it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from coepg_dagster.resources.training import GrpoCdremResource, SftResource

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.jobs import Placement, SftJob, TrainingJob, parse_job
from coepg_dagster.progress import Ended
from coepg_dagster.training.grpo import train_grpo
from coepg_dagster.training.sft import train_sft
from coepg_dagster.training.tracking import PROJECT, refuse_missing, tracker_settings
from tests.jobs import beside, grpo_job, quiet, sft_job

CONFIG = Sft(max_steps=2, batch_size=6, micro_batch_size=6, freeze_vision=True)
GRPO = Grpo(prompts_per_step=1, group_size=2, micro_batch_size=2, max_steps=2, max_plan_tokens=8)
Data = tuple[pa.Table, pa.Table, Models]


@pytest.fixture
def data(dataset: pa.Table, steps: pa.Table, models: Models) -> Data:
    return dataset, steps, models


@pytest.mark.parametrize("training", ["sft", "grpo"])
def test_tensorboard_has_the_log_and_the_model_is_the_same(
    training: str, random_checkpoint: Callable[[int], Path], data: Data, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    init, tracked = random_checkpoint(3), tmp_path / "store" / ".tracking" / "light-s1-planner-1"
    for name, tracking in (("without", []), ("with", ["tensorboard"])):
        out = tmp_path / name
        placement = Placement(tracking=tracking)
        if training == "sft":
            train_sft(sft_job(out, data, "planner", init, CONFIG, placement=placement, tracked=tracked), quiet)
        else:
            train_grpo(grpo_job(out, data, init, init, GRPO, placement=placement, tracked=tracked), quiet)
        assert tracked.exists() == bool(tracking)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("without", "with"))
    assert one == two
    assert not [file for file in (tmp_path / "with").rglob("*") if "tfevents" in file.name]
    events = EventAccumulator(str(tracked))
    events.Reload()
    log = [json.loads(line) for line in (tmp_path / "with" / "training_log.jsonl").read_text().splitlines()]
    for name in ("loss", "grad_norm") if training == "sft" else ("reward", "grad_norm"):
        shown = {event.step: event.value for event in events.Scalars(f"train/{name}")}
        assert (
            shown == pytest.approx({entry["step"]: entry[name] for entry in log if name in entry}) and len(shown) == 2
        )


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_loaded(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "coepg_dagster.training.tracking.find_spec",
        lambda name: None if name in ("wandb", "trackio") else importlib.util.find_spec(name),
    )
    placement = Placement(tracking=["wandb", "trackio"])
    message = r"tracking: wandb, trackio is not installed here: pip install wandb trackio, or leave it out"
    with pytest.raises(Ended, match=message):
        train_sft(sft_job(tmp_path / "a", data, "planner", "no/checkpoint", CONFIG, placement=placement), quiet)
    with pytest.raises(Ended, match=message):
        train_grpo(grpo_job(tmp_path / "b", data, "no/checkpoint", "none", GRPO, placement=placement), quiet)
    refuse_missing(Placement())


@pytest.mark.parametrize("resource", [SftResource, GrpoCdremResource])
def test_the_setting_is_where_a_job_runs_and_holds_no_secret(
    resource: type[SftResource], data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "not-to-be-seen")
    assert resource().placement(SftJob)["placement"].tracking == []
    with pytest.raises(ExperimentError, match="'wandbb' is no tracker: choose from tensorboard, wandb"):
        resource(tracking=["wandbb"]).settings()
    placed = resource(tracking=["wandb", "mlflow"])
    assert placed.overrides() == {}  # nothing that decides a result
    job = sft_job(tmp_path / "out", data, "planner", "init", CONFIG, **placed.placement(SftJob))
    text = job.model_dump_json()
    again = parse_job(text)
    assert isinstance(again, TrainingJob) and again.placement.tracking == ["wandb", "mlflow"]
    assert "not-to-be-seen" not in text
    assert tracker_settings(job) == {"report_to": "none", "run_name": beside(job.out).name, "project": PROJECT}
