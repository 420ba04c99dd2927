"""A job on a Ray cluster gives the bytes that it gives here, and leaves no process behind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coepg_dagster.artifacts import CANDIDATES, write_table
from coepg_dagster.experiment.models import Member, Models
from coepg_dagster.experiment.training import Sft
from coepg_dagster.inference.engine import EngineChanged
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.jobs import ALONE, CandidatesJob, SftJob
from coepg_dagster.ray_cluster import ClusterUnusable, run_on_cluster
from coepg_dagster.running import chunked, run
from tests.faults.damage import flip_a_bit
from tests.inference.openai_server import OpenAIServer
from tests.ray_nodes import head, node, pool_work

ray = pytest.importorskip("ray", reason="ray is an extra: pip install 'coepg-dagster[ray]'")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster of this machine, on the loopback interface."""
    port, folder = 6391, tmp_path_factory.mktemp("r")
    with node(folder / "log", *head(folder, port), cpus=2):
        yield f"127.0.0.1:{port}"


@pytest.fixture
def candidates(tmp_path: Path, models: Models, steps: pa.Table) -> Callable[[str], CandidatesJob]:
    """The same pool work of two members, in a folder of its own for each name."""
    return lambda name: pool_work(tmp_path / name, models, steps, ("one", "two"))


@pytest.mark.long
def test_pool_work_and_training_on_a_cluster_give_what_they_give_here(
    cluster: str, candidates: Callable[[str], CandidatesJob], dataset: pa.Table, tmp_path: Path
) -> None:
    here, there = candidates("here"), candidates("there")
    heard: list[tuple[int, int]] = []
    figures, device = run_on_cluster(there, tmp_path, cluster, 1, lambda done, of, _: heard.append((done, of)))
    assert figures == run(here, lambda *_: None)
    assert (there.out / CANDIDATES).read_bytes() == (here.out / CANDIDATES).read_bytes()
    assert heard[-1] == (2, 2) and device == "2 × cpu on Ray"

    write_table(dataset, tmp_path / "dataset.parquet")
    training = SftJob(
        out=tmp_path / "sft",
        scratch=there.scratch,
        steps=there.steps,
        models=there.models,
        device="cpu",
        batch_size=8,
        seed=5,
        role="planner",
        init=there.models.base_planner,
        dataset=tmp_path / "dataset.parquet",
        train_split="train",
        validation_split="train",
        max_plan_tokens=16,
        max_point_tokens=8,
        placement=ALONE,
        config=Sft(max_steps=2, batch_size=2, micro_batch_size=2),
    )
    figures, device = run_on_cluster(training, tmp_path, cluster, 1, lambda *_: None)
    assert figures["optimizer_steps"] == 2 and device == "cpu on Ray"
    assert (tmp_path / "sft" / "model.safetensors").exists()

    # what went wrong there is raised as it was, not as Ray's account of it
    with pytest.raises(FileNotFoundError, match=r"no\.parquet") as failed:
        nothing = {"dataset": tmp_path / "no.parquet"}
        run_on_cluster(training.model_copy(update=nothing), tmp_path, cluster, 1, lambda *_: None)
    assert not isinstance(failed.value, ray.exceptions.RayError)


def test_a_killed_driver_leaves_no_worker_behind(cluster: str, tmp_path: Path) -> None:
    script = f"""
import os, time, ray
ray.init({cluster!r}, logging_level="ERROR")
@ray.remote(num_cpus=1)
class Sleeper:
    def pid(self):
        return os.getpid()
    def sleep(self):
        time.sleep(600)
actors = [Sleeper.remote() for _ in range(2)]
print(*ray.get([a.pid.remote() for a in actors]), flush=True)
ray.get([a.sleep.remote() for a in actors])
"""
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    workers = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(workers) == 2
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "Ray kept the actors of a driver that is gone"
        time.sleep(0.2)


def test_a_missing_cluster_is_named_by_its_address(candidates: Callable[[str], CandidatesJob], tmp_path: Path) -> None:
    with pytest.raises(ClusterUnusable, match=r"127\.0\.0\.1:1"):
        run_on_cluster(candidates("none"), tmp_path, "127.0.0.1:1", 1, lambda *_: None)


def test_a_damaged_chunk_and_those_of_a_changed_model_are_made_again(
    cluster: str,
    candidates: Callable[[str], CandidatesJob],
    random_checkpoint: Callable[[int], Path],
    tmp_path: Path,
) -> None:
    served = random_checkpoint(3)
    server = OpenAIServer(TransformersEngine(served, dtype="float32", device="cpu", batch_size=8)).start()
    far = Member(model="tiny", engine="openai", base_url=server.url, processor=str(served))
    job = candidates("there")
    job = job.model_copy(update={"members": job.members | {"far": far}, "visual": tmp_path / "visual"})
    run_on_cluster(job, tmp_path, cluster, 1, lambda *_: None)
    assert list(job.visual.rglob("*.safetensors")), "workers share the embeddings of screenshots"
    made = (job.out / CANDIDATES).read_bytes()

    flip_a_bit(job.scratch / "candidates-one-0.parquet")
    run_on_cluster(job, tmp_path, cluster, 1, lambda *_: None)
    assert (job.out / CANDIDATES).read_bytes() == made

    def changed(answer: dict[str, Any]) -> dict[str, Any]:
        for choice in answer["choices"]:
            for token in choice["logprobs"]["content"]:
                token["logprob"] *= 0.5
        return answer

    def other_weights(done: int, *_: Any) -> None:
        server.change = changed if done == 3 else server.change

    (job.scratch / "candidates-far-0.parquet").unlink()
    with pytest.raises(EngineChanged, match="were its weights changed"):
        run_on_cluster(job, tmp_path, cluster, 1, other_weights)
    assert [chunk.member for chunk in chunked(job).missing(chunked(job).chunks())] == ["far"]
    server.stop()
