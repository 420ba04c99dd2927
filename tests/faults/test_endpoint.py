"""A verifier or a planner behind an endpoint that is down, slow, answers garbage or for another request, or changes its weights.

The step ends with the reason, and the same step again gives the verdicts of a run without the fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from coepg_dagster.assets.shared import as_recorded, identity

from coepg_dagster import running
from coepg_dagster.artifacts import CANDIDATES, VERDICTS, write_steps
from coepg_dagster.experiment.models import Member, Models
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.inference.engine import EngineChanged, EngineRefused
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.jobs import CandidatesJob, VerdictsJob
from coepg_dagster.provenance import NotUsable
from coepg_dagster.refusal import Refusal
from tests.inference.openai_server import OpenAIServer, after, hang_up, reply, says, status
from tests.jobs import quiet


@dataclass
class Endpoint:
    """A server, its job, and the verdicts that it gives undisturbed."""

    server: OpenAIServer
    job: Callable[[Path], VerdictsJob]
    undisturbed: bytes = b""
    requests: int = 0
    answers: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def endpoint(
    trained: Callable[[str, int], Path],
    random_checkpoint: Callable[[int], Path],
    models: Models,
    steps: pa.Table,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Endpoint]:
    root = tmp_path_factory.mktemp("endpoint")
    write_steps(steps, root / "steps.arrow", ["train"])
    config = Regeneration(plans_per_planner=3, max_plan_tokens=24, max_point_tokens=8)
    common: dict[str, Any] = {"models": models, "steps": root / "steps.arrow", "device": "cpu", "batch_size": 8}
    common |= {"seed": 3, "train_split": "train", "config": config, "processes": 1}
    for name in ("plans", "plans/scratch"):
        (root / name).mkdir()
    members = {f"planner_{i}": str(trained("planner", i)) for i in range(2)}
    places = {"out": root / "plans", "scratch": root / "plans" / "scratch"}
    running.run(CandidatesJob(**common, **places, members=members, max_steps=None), quiet)
    stranger = str(random_checkpoint(3))
    server = OpenAIServer(TransformersEngine(stranger, dtype="float32", device="cpu", batch_size=1)).start()
    far = {"model": "tiny", "engine": "openai", "base_url": server.url, "processor": stranger}

    def job(place: Path) -> VerdictsJob:
        for folder in (place / "out", place / "scratch"):
            folder.mkdir(parents=True, exist_ok=True)
        return VerdictsJob(
            **common,
            out=place / "out",
            scratch=place / "scratch",
            members={"far": Member(**far, in_flight=1, timeout_seconds=3)},
            candidates=root / "plans" / "candidates.parquet",
            shuffled_plans=3,
        )

    made = Endpoint(server, job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "CHUNK", 4)
        patch.setattr("coepg_dagster.inference.endpoint.PAUSE_SECONDS", 0.01)
        server.change = lambda answer: made.answers.append(answer) or answer
        running.run(job(root / "undisturbed"), quiet)
        made.undisturbed, made.requests = (root / "undisturbed/out" / VERDICTS).read_bytes(), len(server.requests)
        assert pq.read_table(root / "undisturbed/out" / VERDICTS).num_rows > 8, "several chunks"
        yield made
    server.stop()


def down(endpoint: Endpoint) -> None:
    endpoint.server.faults += [hang_up] * 1000


def unwell(endpoint: Endpoint) -> None:
    endpoint.server.faults += [status(503)] * 1000


def locked(endpoint: Endpoint) -> None:
    """The key has expired."""
    endpoint.server.faults += [status(401)] * 1000


def slow(endpoint: Endpoint) -> None:
    endpoint.server.faults += [after(4)] * 12


def garbage(endpoint: Endpoint) -> None:
    endpoint.server.faults += [says(b"<html>The service is being updated</html>")] * 1000


def confused(endpoint: Endpoint) -> None:
    """Every answer is that to another prompt, of another length."""
    lengths = [answer["usage"]["prompt_tokens"] for answer in endpoint.answers]
    other = endpoint.answers[lengths.index(max(lengths))], endpoint.answers[lengths.index(min(lengths))]

    def fault(handler: Any, body: dict[str, Any]) -> bool:
        true = endpoint.server.answer(body)["usage"]
        reply(handler, 200, other[true == other[0]["usage"]])
        return True

    endpoint.server.faults += [fault] * 1000


def other_weights(endpoint: Endpoint) -> None:
    """The same listing, other log-probabilities."""

    def change(answer: dict[str, Any]) -> dict[str, Any]:
        for choice in answer["choices"]:
            for token in choice["logprobs"]["content"]:
                token["logprob"] *= 0.5
        return answer

    endpoint.server.change = change


def other_model(endpoint: Endpoint) -> None:
    endpoint.server.reports = {"root": "another/model"}


LOST = r"verifier far: \d of 4 plans got no answer: .*what was finished is kept"


@pytest.mark.parametrize(
    ("fault", "says_", "kept"),
    [
        pytest.param(down, rf"(?s){LOST}", 1, id="down"),
        pytest.param(unwell, rf"(?s){LOST}", 1, id="unwell", marks=pytest.mark.long),
        pytest.param(locked, rf"(?s){LOST}", 1, id="locked"),
        pytest.param(slow, rf"(?s){LOST}", 1, id="slow", marks=pytest.mark.long),
        pytest.param(garbage, rf"(?s){LOST}", 1, id="garbage", marks=pytest.mark.long),
        pytest.param(confused, rf"(?s){LOST}", 1, id="confused"),
        pytest.param(other_weights, "were its weights changed", None, id="other weights"),
        pytest.param(other_model, "is tiny@.* now", None, id="another model", marks=pytest.mark.long),
    ],
)
def test_a_fault_ends_the_step_and_the_next_try_gives_the_same_verdicts(
    endpoint: Endpoint, fault: Callable[[Endpoint], None], says_: str, kept: int | None, tmp_path: Path
) -> None:
    server, job = endpoint.server, endpoint.job(tmp_path)
    server.requests, server.reports, server.change = [], {}, lambda answer: answer

    def report(done: int, of: int, figures: Any) -> None:
        if done == 1:  # the first chunk is there
            fault(endpoint)

    with pytest.raises(Refusal, match=says_):
        running.run(job, report)
    assert not (job.out / VERDICTS).exists()
    # of a changed model all are there, also those that other processes finished later; the next run makes them again
    assert kept is None or len(list(job.scratch.glob("verdicts-*.parquet"))) == kept
    server.faults, server.reports, server.change = [], {}, lambda answer: answer
    running.run(job, quiet)
    assert (job.out / VERDICTS).read_bytes() == endpoint.undisturbed


def test_a_chunk_that_another_process_finishes_after_a_change_was_found_is_not_used(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    server, job, late = endpoint.server, endpoint.job(tmp_path), dict[Path, bytes]()
    server.reports, server.change = {}, lambda answer: answer

    def report(done: int, of: int, figures: Any) -> None:
        if done == 1:
            other_weights(endpoint)
        if done == 2:
            late.update({file: file.read_bytes() for file in job.scratch.glob("verdicts-*")})

    with pytest.raises(EngineChanged):
        running.run(job, report)
    for file, content in late.items():
        file.write_bytes(content)
    server.change = lambda answer: answer
    running.run(job, quiet)
    assert (job.out / VERDICTS).read_bytes() == endpoint.undisturbed


def test_one_late_answer_is_a_failure_that_is_counted(endpoint: Endpoint, tmp_path: Path) -> None:
    """A request that a server can never answer does not stop the loop."""
    endpoint.server.faults, endpoint.server.change = [], lambda answer: answer
    job = endpoint.job(tmp_path)

    def report(done: int, of: int, figures: Any) -> None:
        endpoint.server.faults += [after(4)] * (done == 1)

    figures = running.run(job, report)
    assert figures["failed_far"] == 1
    assert pq.read_table(job.out / VERDICTS)["failure"].null_count == figures["rows"] - 1


def test_one_late_plan_costs_its_rows(
    trained: Callable[[str, int], Path], models: Models, steps: pa.Table, tmp_path: Path
) -> None:
    write_steps(steps, tmp_path / "steps.arrow", ["train"])
    planner = str(trained("planner", 0))
    server = OpenAIServer(TransformersEngine(planner, dtype="float32", device="cpu", batch_size=1)).start()
    far = Member(model="tiny", engine="openai", base_url=server.url, processor=planner, in_flight=1, timeout_seconds=3)

    def made(name: str, failing: int) -> list[dict[str, Any]]:
        for folder in ("out", "scratch"):
            (tmp_path / name / folder).mkdir(parents=True)
        job = CandidatesJob(
            models=models,
            steps=tmp_path / "steps.arrow",
            device="cpu",
            batch_size=8,
            seed=3,
            train_split="train",
            config=Regeneration(plans_per_planner=2, max_plan_tokens=24),
            processes=1,
            out=tmp_path / name / "out",
            scratch=tmp_path / name / "scratch",
            members={"far": far},
            max_steps=None,
        )

        def report(done: int, of: int, figures: Any) -> None:
            server.faults += [after(4)] * (failing if done == 1 else 0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(running, "CHUNK", steps.num_rows // 2)
            figures = running.run(job, report)
        assert figures.get("gate_no_answer", 0) == 2 * failing
        return list(pq.read_table(job.out / CANDIDATES).to_pylist())

    try:
        for undisturbed, row in zip(made("undisturbed", 0), made("late", 1), strict=True):
            assert row == undisturbed or (row["gate"], row["plan"], row["text"]) == ("no_answer", None, "")
        with pytest.raises(Refusal, match=r"planner far: 3 of \d steps got no answer: .*what was finished is kept"):
            made("outage", 3)
    finally:
        server.stop()


def test_a_step_asks_the_model_that_was_recorded(endpoint: Endpoint, tmp_path: Path) -> None:
    member = endpoint.job(tmp_path).members["far"]
    entry = json.loads(json.dumps(identity(tmp_path, member)))
    assert as_recorded(tmp_path, member, entry).processor == member.processor
    endpoint.server.reports = {"max_model_len": 77}
    with pytest.raises(NotUsable, match=r"serves tiny@.*, open_models recorded tiny@.*: serve that again"):
        as_recorded(tmp_path, member, entry)
    endpoint.server.reports = {}
    nobody = member.model_copy(update={"base_url": "http://127.0.0.1:9/v1"})
    with pytest.raises(EngineRefused, match="cannot be reached"):
        as_recorded(tmp_path, nobody, entry)
