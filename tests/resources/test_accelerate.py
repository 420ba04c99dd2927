"""Training in two processes through `accelerate launch`, on a CPU: the same step, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from coepg_dagster.resources.worker import MODULE
from safetensors.torch import load_file

from coepg_dagster.artifacts import write_steps
from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Sft
from coepg_dagster.jobs import Placement, SftJob, Strategy
from coepg_dagster.processes import is_alive
from coepg_dagster.running import run
from tests.project import REPOSITORY

pytestmark = pytest.mark.slow

SPREAD = {"zero3": "DEEPSPEED", "fsdp": "FSDP"}
"""As accelerate calls it."""


@pytest.fixture
def job(
    steps: pa.Table, dataset: pa.Table, models: Models, random_checkpoint: Callable[[int], Path], tmp_path: Path
) -> Callable[[int, int, int], SftJob]:
    """The same training for any number of processes, each in a folder of its own."""
    write_steps(steps, tmp_path / "steps.arrow", ["train"])
    pq.write_table(dataset, tmp_path / "dataset.parquet")

    def made(processes: int, micro: int, max_steps: int) -> SftJob:
        folder = tmp_path / str(processes)
        for name in ("out", "scratch"):
            (folder / name).mkdir(parents=True)
        common: dict[str, Any] = {"steps": tmp_path / "steps.arrow", "models": models, "device": "cpu"}
        return SftJob(
            **common,
            out=folder / "out",
            scratch=folder / "scratch",
            batch_size=8,
            seed=3,
            train_split="train",
            dataset=tmp_path / "dataset.parquet",
            role="planner",
            init=str(random_checkpoint(2)),
            validation_split="train",
            max_plan_tokens=16,
            max_point_tokens=8,
            config=Sft(max_steps=max_steps, batch_size=6, micro_batch_size=micro, learning_rate=1e-4),
            placement=Placement(processes=processes),
        )

    return made


def start(work: SftJob, module: str = MODULE) -> tuple[subprocess.Popen[bytes], Path]:
    """The job in a worker of its own, and that worker's folder."""
    folder = work.out.parent
    (folder / "job.json").write_text(work.model_dump_json())
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder / "job.json"), str(folder / "result.json")],
            cwd=REPOSITORY,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    return process, folder


@pytest.mark.parametrize("strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.long) for name in SPREAD)])
def test_two_processes_make_the_step_of_one(job: Callable[[int, int, int], SftJob], strategy: Strategy) -> None:
    """The same rows, nearly the same loss and weights: Adam makes a step of any small gradient, however it was rounded."""
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    here, there = job(1, 6, 2), job(2, 3, 2)
    placement = Placement(processes=2, strategy=strategy)
    there = there.model_copy(update={"placement": placement})
    process, folder = start(there, MODULE if strategy == "ddp" else "tests.resources.sharded_on_cpu")
    assert run(here, lambda *_: None)["optimizer_steps"] == 2
    assert process.wait(timeout=280) == 0, (folder / "log").read_text()[-3000:]
    assert json.loads((folder / "result.json").read_text())["figures"]["optimizer_steps"] == 2
    assert strategy == "ddp" or f"spread by {SPREAD[strategy]}" in (folder / "log").read_text()
    logs = [(work.out / "training_log.jsonl").read_text().splitlines()[:2] for work in (here, there)]
    for alone, shared in zip(*(map(json.loads, lines) for lines in logs), strict=True):
        assert alone["num_tokens"] == shared["num_tokens"]
        assert alone["loss"] == pytest.approx(shared["loss"], rel=1e-3)
        assert alone["grad_norm"] == pytest.approx(shared["grad_norm"], rel=1e-2)
    one, two = (load_file(work.out / "model.safetensors") for work in (here, there))
    assert one.keys() == two.keys()
    apart = torch.cat([(one[name] - two[name]).abs().flatten() for name in one])
    assert apart.max() < 2.1e-4 and apart.mean() < 2e-6


@pytest.mark.long
def test_no_rank_outlives_the_worker(job: Callable[[int, int, int], SftJob]) -> None:
    work = job(2, 3, 100_000)
    process, folder = start(work.model_copy(update={"placement": Placement(processes=2, save_every=1)}))
    for _ in range(1500):
        if list(work.scratch.rglob("checkpoint-*")):  # both ranks are at work, and have noted their parent
            break
        time.sleep(0.2)
    family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(family) >= 3, (folder / "log").read_text()[-3000:]  # accelerate launch and two ranks
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    for _ in range(300):
        if not any(map(is_alive, family)):
            break
        time.sleep(0.2)
    left = [pid for pid in family if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
