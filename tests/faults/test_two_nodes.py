"""Pool work on a Ray cluster of two nodes, of which one goes: every chunk is made, as without the loss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from benchmarks.ray_queue import Times, simulate
from coepg_dagster.artifacts import CANDIDATES, write_steps
from coepg_dagster.experiment import Models, Regeneration
from coepg_dagster.jobs import CandidatesJob
from coepg_dagster.ray_cluster import run_on_cluster
from coepg_dagster.running import chunked, run

ray = pytest.importorskip("ray", reason="ray is an extra: pip install 'coepg-dagster[ray]'")
pytestmark = pytest.mark.faults

MEMBERS = 6
"""Each has one chunk of the few steps here."""
HEAD = "127.0.0.1:6393"
NICE = os.environ | {"RAY_worker_niceness": "0"}
"""Ray's workers wait for every other process of a busy machine otherwise."""


@contextmanager
def node(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A node with one CPU on the loopback interface, once it runs."""
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        "--node-ip-address=127.0.0.1",
        *arguments,
    ]
    command += ["--num-cpus=1", "--num-gpus=0", "--disable-usage-stats", "--object-store-memory=100000000"]
    log = folder / f"{'head' if '--head' in arguments else 'other'}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=NICE)
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


def test_a_lost_node_leaves_its_work_to_the_other(
    models: Models, steps: pa.Table, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    write_steps(steps, tmp_path / "steps.arrow", ["train"])

    def work(name: str) -> CandidatesJob:
        for folder in ("out", "scratch"):
            (tmp_path / name / folder).mkdir(parents=True)
        return CandidatesJob(
            out=tmp_path / name / "out",
            scratch=tmp_path / name / "scratch",
            steps=tmp_path / "steps.arrow",
            models=models,
            device="cpu",
            batch_size=8,
            seed=5,
            processes=2,
            members={f"m{i}": models.base_planner for i in range(MEMBERS)},
            train_split="train",
            max_steps=None,
            config=Regeneration(plans_per_planner=2, max_plan_tokens=8),
        )

    here, there = work("here"), work("there")
    chunks = chunked(there).chunks()
    assert len(chunks) == MEMBERS
    folder = tmp_path_factory.mktemp("r")  # short: sockets are in it
    with (
        node(folder, "--head", f"--port={HEAD.partition(':')[2]}", "--include-dashboard=false", f"--temp-dir={folder}"),
        node(folder, f"--address={HEAD}") as other,
    ):
        done: list[int] = []

        def report(n: int, of: int, _: object) -> None:
            done.append(n)
            if n >= 1 and other.poll() is None:
                of_node = psutil.Process(other.pid)
                for process in [of_node, *of_node.children(recursive=True)]:
                    process.kill()
                other.wait(60)

        figures, device = run_on_cluster(there, tmp_path, HEAD, 1, report)
    assert device == "2 × cpu on Ray" and done[-1] == MEMBERS
    assert figures == run(here, lambda *_: None)
    assert (there.out / CANDIDATES).read_bytes() == (here.out / CANDIDATES).read_bytes()
    # what the simulation says of the same: the other node makes all that is left
    times = Times(start=5.0, load=1.0, chunk={chunk.member: 10.0 for chunk in chunks})
    alone, two = (simulate(chunks, workers, times) for workers in (1, 2))
    hurt = simulate(chunks, 2, times, lost={1: times.start + 12.0, 2: 0.0, 3: 0.0, 4: 0.0})
    assert two.seconds < hurt.seconds <= alone.seconds + times.start + 11 and hurt.made_again >= 1
