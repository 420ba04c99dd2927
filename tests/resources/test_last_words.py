"""Whatever ends a worker: why comes first in the failure of its run, then the end of its output."""

import re
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from coepg_dagster.assets.automation import WEBHOOK
from coepg_dagster.assets.evolve import RunFailed, evolve_through
from coepg_dagster.resources import ray_worker, warm
from coepg_dagster.resources.launcher import job_environment, run_process

from coepg_dagster.experiment.models import Models
from coepg_dagster.jobs import EvaluationJob
from coepg_dagster.processes import LAST_WORDS, ended, first_error, last_words, leave_words, tail, words_left
from coepg_dagster.provenance import Ref
from tests.assets.conftest import InProcess
from tests.assets.light import plant
from tests.assets.test_evolve import QUIET
from tests.deployment import Webhook
from tests.project import REPOSITORY

LOWER = "lower `micro_batch_size` or `batch_size`, use fewer processes, or set `lora`, then run this again: what was finished"
ENDS = {
    "self text": r"loss is nan: lower learning_rate\n\nthe worker ended with code 1\. The end of .*worker\.log:\nworking\n",
    "self refused": r"strategy zero3 needs GPUs.*working",
    "self exception": r"ValueError: rows 3 and 4 differ\nin two lines\n\nthe worker .*Traceback",
    "self killed": r"the worker ended with code -9 \(SIGKILL, which the kernel sends when main memory is full.*\n\n.*working",
    "self crash": r"the worker ended with code -6 \(SIGABRT\)\n\n.*Fatal Python error: Aborted",
    "self code": r"the worker ended with code 3\n\n.*working",
    "self hangs": r"one took more than 0\.05 minutes: raise `timeout_minutes`.*\n\nThe end of .*KeyboardInterrupt",
    "self memory": rf"MemoryError: {LOWER}",
    "self tensors": rf".*can't allocate memory.*: {LOWER}",
    "child memory": rf"MemoryError: {LOWER}",
    "child text": r"loss is nan: lower learning_rate\n\n",
    "child exception": r"ValueError: rows 3 and 4 differ\nin two lines\n\n.*Traceback",
    "child killed": r"a process of this work ended with code -9 \(SIGKILL.*\n\n",
}
RANKS = {
    "rank exception": r"ValueError: rows 3 and 4 differ\nin two lines\n\n.*Traceback",
    "rank killed": r"process 1 of the training ended with code -9 \(SIGKILL.*\n\n.*working",
}
RAY = {"ray none": r"no Ray cluster answers at '127\.0\.0\.1:1' .*start one, or correct the address\n\n"}


@pytest.fixture(scope="module", autouse=True)
def bare_server() -> Iterator[None]:
    """The server that workers are forked from imports little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm, "_server", None)
        patch.setattr(warm, "IMPORTED", ["coepg_dagster.resources.ray_worker", "torch"])
        yield


def failures(kinds: list[str], folder: Path) -> dict[str, str]:
    """How a run describes its failure, for each end of its worker."""
    descriptions = {}
    models = Models(base_planner="none", base_grounder="none", planners={"a": "none"}, verifiers={"a": "none"})

    @dg.asset
    def one(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        for kind in kinds:
            scratch = folder / kind
            scratch.mkdir()
            (scratch / "worker.log").write_text("what an earlier attempt said\n")
            job = EvaluationJob(
                out=folder, scratch=scratch, steps=folder, models=models, device="cpu", batch_size=1, seed=0,
                planner="none", grounder=None, splits=[], max_steps=None, protocol="none", max_plan_tokens=1,
                max_point_tokens=1, processes=1,
            )  # fmt: skip
            with pytest.raises(dg.Failure) as failed:
                run_process(
                    context,
                    job,
                    REPOSITORY,
                    job_environment(1) | {"ENDS": kind, ray_worker.ADDRESS: "127.0.0.1:1"},
                    timeout_minutes=0.05 if kind.endswith("hangs") else 5,
                    grace_seconds=5,
                    module="tests.resources.ending",
                )
            descriptions[kind] = str(failed.value.description)
        return dg.MaterializeResult()

    with dg.DagsterInstance.ephemeral() as instance:
        assert dg.materialize([one], instance=instance).success
    return descriptions


def check(ends: dict[str, str], folder: Path) -> None:
    for kind, message in failures(list(ends), folder).items():
        assert re.match(f"(?s){ends[kind]}", message), f"{kind}: {message}"
        assert "an earlier attempt" not in message


def test_why_a_worker_ended_comes_first_in_the_failure_of_its_run(tmp_path: Path) -> None:
    check(ENDS, tmp_path)


def test_so_does_why_it_could_not_run_on_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    check(RAY, tmp_path)


@pytest.mark.slow
@pytest.mark.long
def test_so_does_why_a_process_of_a_training_ended(tmp_path: Path) -> None:
    check(RANKS, tmp_path)


def test_evolve_and_the_alert_say_it_too(light: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.assets.light as module

    run = module.run_process
    monkeypatch.setenv("ENDS", "self refused")
    here = {"module": "tests.resources.ending"}
    monkeypatch.setattr(module, "run_process", lambda *args, **given: run(*args, **given | here))
    plant(light.project, "worker", "light/s1", Ref("planner_sft", 0))
    with pytest.raises(RunFailed) as failed:
        evolve_through(light.defs, light.instance, light.loop, 0, QUIET)
    (run,) = light.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE]))
    first, _, log = str(failed.value).partition("\n\n")
    why = "strategy zero3 needs GPUs: use `ddp` on a CPU"
    assert first == f"run {run.run_id[:8]}, light__s1__planner_sft, iteration 0: {why}" and "Traceback" in log
    with Webhook() as webhook:
        monkeypatch.setenv(WEBHOOK, webhook.url)
        event = next(
            entry.dagster_event
            for entry in light.instance.all_logs(run.run_id)
            if entry.dagster_event and entry.dagster_event.event_type is dg.DagsterEventType.RUN_FAILURE
        )
        context = dg.build_run_status_sensor_context("alert", event, light.instance, run).for_run_failure()
        light.defs.get_repository_def().get_sensor_def("alert")(context)
        webhook.shutdown()
    (message,) = webhook.taken
    assert {"step": "light__s1__planner_sft", "why": why} in message["failed"]
    assert message["text"].endswith(f"run {run.run_id[:8]} failed: light__s1__planner_sft: {why}")


def test_the_first_of_several_processes_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = tmp_path / "words"
    assert words_left(words) == ""
    leave_words("nobody listens")
    monkeypatch.setenv(LAST_WORDS, str(words))
    for error in (
        ValueError("the cause \ud800"),
        RuntimeError("what follows"),
        SystemExit("so it ends"),
        SystemExit(1),
    ):
        with pytest.raises(type(error)), last_words():
            raise error
    assert words_left(words) == r"ValueError: the cause \ud800"
    leave_words("the true reason", instead=True)
    assert words_left(words) == "the true reason"
    monkeypatch.setenv(LAST_WORDS, str(tmp_path / "no" / "folder"))  # a full disk, say: the error itself goes on
    with pytest.raises(ValueError, match="x"), last_words():
        raise ValueError("x")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["INFO 1 ok", "WARNING ImportError: no flash_attn", "ERROR [core] ValueError: no memory for the cache",
          "RuntimeError: Engine core failed. See root cause above"], "ValueError: no memory for the cache"),
        (["usage: x", "api_server.py: error: argument --dtype: invalid choice"], "error: argument --dtype: invalid choice"),
        (["torch.OutOfMemoryError: CUDA out of memory. Tried"], "torch.OutOfMemoryError: CUDA out of memory. Tried"),
        (["Error", "it just stopped", ""], "it just stopped"),
        ([], ""),
    ],
)  # fmt: skip
def test_the_first_error_of_a_log_is_what_the_others_follow_from(lines: list[str], why: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("TypeError: of an earlier attempt\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    assert first_error(log, start) == why
    assert tail(log, 2, start) == "\n".join(lines[-2:])


def test_how_a_process_ended_names_its_signal() -> None:
    assert ended(3) == "ended with code 3" and ended(255) == "ended with code 255"
    assert "(SIGKILL, which the kernel sends when main memory is full" in ended(-9) and "SIGKILL" in ended(137)
    assert ended(-11) == "ended with code -11 (SIGSEGV)"
