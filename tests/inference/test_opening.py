"""Whole jobs with a pool member behind an endpoint: the same rows as with the checkpoint itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from coepg_dagster.assets.shared import identity

from coepg_dagster.artifacts import write_steps
from coepg_dagster.experiment.models import Member, Models
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.geometry import Space
from coepg_dagster.inference.agents import Grounder, GrounderPool
from coepg_dagster.inference.engine import EngineRefused
from coepg_dagster.inference.opening import opened
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.inference.weights import local_version
from coepg_dagster.jobs import CandidatesJob, Job, VerdictsJob
from coepg_dagster.running import run
from tests.inference.openai_server import OpenAIServer, status
from tests.inference.scripted import RESIZE, Scripted, generation
from tests.jobs import quiet


@pytest.fixture
def served(
    trained: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], tuple[OpenAIServer, Member]]]:
    """A server of the trained planner or grounder, and the member that names it."""
    monkeypatch.setattr("coepg_dagster.inference.endpoint.PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("COEPG_TEST_KEY", "k")
    servers = []

    def serve(role: str) -> tuple[OpenAIServer, Member]:
        path = str(trained(role, 0))
        engine = TransformersEngine(path, dtype="float32", device="cpu", batch_size=8)
        servers.append(OpenAIServer(engine, key="k").start())
        there = {"base_url": servers[-1].url, "api_key_env": "COEPG_TEST_KEY", "processor": path}
        return servers[-1], Member(model="tiny", engine="openai", **there)

    yield serve
    for server in servers:
        server.stop()


def ran(kind: type[Any], out: Path, steps: Path, models: Models, **settings: Any) -> pa.Table:
    for folder in (out, out / "scratch"):
        folder.mkdir(parents=True)
    common = {"steps": steps, "models": models, "device": "cpu", "batch_size": 8, "seed": 3, "train_split": "train"}
    config = Regeneration(plans_per_planner=2, temperature=1.0, max_plan_tokens=48, max_point_tokens=8)
    run(kind(out=out, scratch=out / "scratch", processes=1, config=config, **common, **settings), quiet)
    return pq.read_table(next(out.glob("*.parquet")))


def test_pools_find_the_same_behind_an_endpoint(
    served: Callable[[str], tuple[OpenAIServer, Member]],
    trained: Callable[[str, int], Path],
    models: Models,
    steps: pa.Table,
    tmp_path: Path,
) -> None:
    write_steps(steps, tmp_path / "steps.arrow", ["train"])
    (_, planner), (server, grounder) = served("planner"), served("grounder")
    tables: dict[str, list[pa.Table]] = {"far": [], "near": []}
    for place, pi, phi in (
        ("near", Member(model=str(trained("planner", 0))), Member(model=str(trained("grounder", 0)))),
        ("far", planner, grounder),
    ):
        candidates = ran(
            CandidatesJob, tmp_path / place / "c", tmp_path / "steps.arrow", models, members={"p": pi}, max_steps=None
        )
        verdicts = ran(
            VerdictsJob,
            tmp_path / place / "v",
            tmp_path / "steps.arrow",
            models,
            members={"v": phi},
            candidates=tmp_path / "near" / "c" / "candidates.parquet",
            shuffled_plans=0,
        )
        tables[place] = [candidates, verdicts]
    far, near = tables["far"][0], tables["near"][0]
    # sampled plans: an engine in batches draws other ones than a server that gets one request at a time
    drawn = ("text", "plan", "action_type", "value", "gate", "duplicate_of")
    exact = [name for name in near.column_names if name not in drawn]
    assert far.select(exact).to_pylist() == near.select(exact).to_pylist()
    assert far["plan"].null_count < far.num_rows
    far, near = tables["far"][1], tables["near"][1]
    exact = [name for name in near.column_names if name != "mean_logprob"]
    assert far.num_rows > 0 and far.select(exact).to_pylist() == near.select(exact).to_pylist()
    assert far["mean_logprob"].to_pylist() == pytest.approx(near["mean_logprob"].to_pylist(), abs=1e-4)
    assert all(body["temperature"] == 0 for body in server.requests[2:])  # after the two of the probe


def test_an_endpoint_that_is_not_as_it_should_be_stops_the_job_before_it_begins(
    served: Callable[[str], tuple[OpenAIServer, Member]], models: Models, steps: pa.Table, tmp_path: Path
) -> None:
    write_steps(steps, tmp_path / "steps.arrow", ["train"])
    server, member = served("planner")
    server.faults = [status(400)]
    with pytest.raises(EngineRefused, match="the probe got no answer: status 400"):
        ran(CandidatesJob, tmp_path / "c", tmp_path / "steps.arrow", models, members={"p": member}, max_steps=None)
    assert len(server.requests) == 1


def test_which_model_a_member_is(
    served: Callable[[str], tuple[OpenAIServer, Member]], trained: Callable[[str, int], Path]
) -> None:
    """An endpoint's by its name and what the server says; a checkpoint's by its weights. Neither by where it is."""
    _, member = served("grounder")
    record = identity(Path("/"), member)
    assert record["version"].startswith("tiny@") and record["server"] == {"id": "tiny", "owned_by": "test"}
    assert "127.0.0.1" not in str(record) and "COEPG_TEST_KEY" not in str(record)
    path = str(trained("grounder", 0))
    here = identity(Path("/"), Member(model=path, engine="vllm"))
    assert (here["version"], here["engine"]) == (local_version(path), "vllm")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_an_engine_is_named_by_the_member_or_else_by_the_experiment(
    trained: Callable[[str, int], Path], models: Models, tmp_path: Path
) -> None:
    path = str(trained("grounder", 0))
    of_vllm = models.model_copy(update={"engine": "vllm"})
    places: dict[str, Any] = {"out": tmp_path, "scratch": tmp_path, "steps": tmp_path}
    job = Job(**places, models=of_vllm, device="cpu", batch_size=2, seed=0)
    with opened(Member(model=path, engine="transformers"), job, logs=tmp_path) as engine:
        assert isinstance(engine, TransformersEngine)
    with (
        pytest.raises(EngineRefused, match=r"vLLM cannot be imported here.*`vllm_python`.*`engine: transformers`"),
        opened(Member(model=path), job, logs=tmp_path),
    ):
        pass


def test_remote_grounders_are_queried_at_the_same_time(steps: pa.Table) -> None:
    """Two that wait for each other: one after the other they would wait for ever."""
    together = threading.Barrier(2, timeout=120)

    class Away(Scripted):
        def generate(self, *args: Any) -> Any:
            together.wait()
            return super().generate(*args)

    screens = Screens(steps, RESIZE)
    engines = {"a": Away, "here": Scripted, "b": Away}
    grounders = {
        name: Grounder(
            kind(lambda _, x=str(10 + i): generation("(", x, ",", "7", ")"), remote=kind is Away),
            screens,
            "compact",
            Space.RESIZED,
            8,
        )
        for i, (name, kind) in enumerate(engines.items())
    }
    with GrounderPool(grounders) as pool:
        readings = pool.groundings([("s0", "click OK"), ("s1", "click OK")])
    assert [[reading.point.x for reading in one if reading.point] for one in readings] == [[10, 10], [11, 11], [12, 12]]
