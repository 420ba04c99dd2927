"""Nodes of a Ray cluster on this machine, and pool work for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from coepg_dagster.artifacts import write_steps
from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.jobs import CandidatesJob


@contextmanager
def node(log: Path, *arguments: str, cpus: int) -> Iterator[subprocess.Popen[bytes]]:
    """A node on the loopback interface, once it runs; `arguments` are those of `ray start`."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address=127.0.0.1"]
    command += [f"--num-cpus={cpus}", "--num-gpus=0", "--disable-usage-stats", "--object-store-memory=100000000"]
    # Ray gives its workers the priority 15: beside the other tests they would wait for minutes. And it starts two before any
    # job asks for one, which no job here can use: each has variables of its own.
    env = os.environ | {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *arguments], stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=env
        )
    try:
        deadline = time.monotonic() + 300
        while b"Ray runtime started" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # `--block` stops all that it started
            process.wait(120)


def head(folder: Path, port: int) -> tuple[str, ...]:
    """The arguments of a cluster's first node, whose files are in `folder`: a short path, since sockets are among them."""
    return "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"


def pool_work(folder: Path, models: Models, steps: pa.Table, members: Sequence[str]) -> CandidatesJob:
    """Candidates of members that are all the base planner, a chunk each, in a new folder."""
    for part in ("out", "scratch"):
        (folder / part).mkdir(parents=True)
    write_steps(steps, folder / "steps.arrow", ["train"])
    return CandidatesJob(
        out=folder / "out",
        scratch=folder / "scratch",
        steps=folder / "steps.arrow",
        models=models,
        device="cpu",
        batch_size=8,
        seed=5,
        processes=2,
        members=dict.fromkeys(members, models.base_planner),
        train_split="train",
        max_steps=None,
        config=Regeneration(plans_per_planner=2, max_plan_tokens=8),
    )
