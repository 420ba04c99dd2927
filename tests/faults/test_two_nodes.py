"""Pool work on a Ray cluster of two nodes, of which one goes: every chunk is made, as without the loss."""

from __future__ import annotations

from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from benchmarks.ray_queue import Times, simulate
from coepg_dagster.artifacts import CANDIDATES
from coepg_dagster.experiment.models import Models
from coepg_dagster.ray_cluster import run_on_cluster
from coepg_dagster.running import chunked, run
from tests.ray_nodes import head, node, pool_work

ray = pytest.importorskip("ray", reason="ray is an extra: pip install 'coepg-dagster[ray]'")
pytestmark = pytest.mark.long

MEMBERS = tuple(f"m{i}" for i in range(6))
PORT = 6393


def test_a_lost_node_leaves_its_work_to_the_other(
    models: Models, steps: pa.Table, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    here, there = (pool_work(tmp_path / name, models, steps, MEMBERS) for name in ("here", "there"))
    chunks = chunked(there).chunks()
    assert len(chunks) == len(MEMBERS)
    folder, address = tmp_path_factory.mktemp("r"), f"127.0.0.1:{PORT}"
    with (
        node(folder / "head.log", *head(folder, PORT), cpus=1),
        node(folder / "other.log", f"--address={address}", cpus=1) as other,
    ):
        done: list[int] = []

        def report(n: int, of: int, _: object) -> None:
            done.append(n)
            if n >= 1 and other.poll() is None:
                of_node = psutil.Process(other.pid)
                for process in [of_node, *of_node.children(recursive=True)]:
                    process.kill()
                other.wait(60)

        figures, device = run_on_cluster(there, tmp_path, address, 1, report)
    assert device == "2 × cpu on Ray" and done[-1] == len(MEMBERS)
    assert figures == run(here, lambda *_: None)
    assert (there.out / CANDIDATES).read_bytes() == (here.out / CANDIDATES).read_bytes()
    # what the simulation says of the same: the other node makes all that is left
    times = Times(start=5.0, load=1.0, chunk={chunk.member: 10.0 for chunk in chunks})
    alone, two = (simulate(chunks, workers, times) for workers in (1, 2))
    hurt = simulate(chunks, 2, times, lost={1: times.start + 12.0, 2: 0.0, 3: 0.0, 4: 0.0})
    assert two.seconds < hurt.seconds <= alone.seconds + times.start + 11 and hurt.made_again >= 1
