"""Runs whose code server is gone: they are cancelled and watched through their process."""

from __future__ import annotations

import json
import multiprocessing
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from coepg_dagster.assets.internals import create_run, submit
from coepg_dagster.assets.run_launcher import HOST_TAG, RunLauncher, is_gone, what_it_lacks
from dagster._core.events import EngineEventData
from dagster._core.launcher import WorkerStatus
from dagster._core.storage.tags import GRPC_INFO_TAG
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon

from tests.assets.conftest import InProcess
from tests.project import REPOSITORY


@pytest.fixture
def worker() -> Iterator[multiprocessing.process.BaseProcess]:
    """A process as Dagster's code server starts one for a run."""
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    yield process
    process.kill()
    process.join()


def launched(light: InProcess, pid: int, server: Path, **tags: str) -> tuple[RunLauncher, dg.DagsterRun]:
    """A launcher, and a run that is being made by a process; `server` is the socket of its code server."""
    tags = {
        HOST_TAG: socket.gethostname(),
        GRPC_INFO_TAG: json.dumps({"host": "localhost", "socket": str(server)}),
    } | tags
    job = light.defs.resolve_implicit_global_asset_job_def()
    run = light.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=tags)
    launcher = RunLauncher()
    launcher.register_instance(light.instance)
    assert launcher.check_run_worker_health(run).status is WorkerStatus.RUNNING  # until it says which process it is
    about = EngineEventData.in_process(pid)
    light.instance.report_engine_event(f"Started process for run (pid: {pid}).", run, about)
    return launcher, run


def test_a_run_without_a_code_server_is_interrupted_and_its_end_is_seen(
    light: InProcess, tmp_path: Path, worker: multiprocessing.process.BaseProcess
) -> None:
    assert worker.pid is not None
    launcher, run = launched(light, worker.pid, tmp_path / "gone")
    assert launcher.check_run_worker_health(run).status is WorkerStatus.RUNNING and not is_gone(light.instance, run)
    assert launcher.terminate(run.run_id)
    worker.join(20)
    assert worker.exitcode in (-signal.SIGINT, 1)  # Python ends by KeyboardInterrupt
    assert launcher.check_run_worker_health(run).status is WorkerStatus.FAILED and is_gone(light.instance, run)
    cancelled = light.instance.get_run_by_id(run.run_id)
    assert cancelled is not None and cancelled.status is dg.DagsterRunStatus.CANCELING
    assert not launcher.terminate(run.run_id)  # nobody is left


@pytest.mark.parametrize("server", [True, False], ids=["its code server is known", "nobody started it yet"])
def test_a_run_that_is_cancelled_while_it_starts_is_over(light: InProcess, tmp_path: Path, server: bool) -> None:
    """Its process, once it is there, makes nothing; of a run that only was to be cancelled Dagster starts another."""
    job = light.defs.resolve_implicit_global_asset_job_def()
    tags = {GRPC_INFO_TAG: json.dumps({"host": "localhost", "socket": str(tmp_path / "gone")})} if server else {}
    run = light.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTING, tags=tags)
    launcher = RunLauncher()
    launcher.register_instance(light.instance)
    assert launcher.terminate(run.run_id)
    cancelled = light.instance.get_run_by_id(run.run_id)
    assert cancelled is not None and cancelled.status is dg.DagsterRunStatus.CANCELED


def test_no_other_process_is_interrupted(
    light: InProcess, tmp_path: Path, worker: multiprocessing.process.BaseProcess
) -> None:
    """One that has got the id of a run's process, and one of this machine with the id of one of another."""
    with subprocess.Popen(["sleep", "60"]) as other:
        launcher, run = launched(light, other.pid, tmp_path / "gone")
        assert not launcher.terminate(run.run_id) and is_gone(light.instance, run)
        assert worker.pid is not None
        launcher, run = launched(light, worker.pid, tmp_path / "gone", **{HOST_TAG: "another machine"})
        assert not launcher.terminate(run.run_id) and not is_gone(light.instance, run)
        assert other.poll() is None and worker.is_alive()
        other.kill()


SETTINGS = (REPOSITORY / "dagster.yaml").read_text()


def test_runs_of_a_backfill_leave_the_queue_in_the_order_of_their_iterations(light: InProcess, tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text(SETTINGS)
    daemon, job = QueuedRunCoordinatorDaemon(interval_seconds=1), light.defs.resolve_implicit_global_asset_job_def()
    place = ("coepg", "coepg_dagster.definitions", light.project.root)
    made = frozenset({light.loop.key("dataset")})
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        of_backfill = [
            {"dagster/backfill": "b", "dagster/partition": k} for k in ("0", "1", "10", "2")
        ]  # as Dagster does
        for tags in (*of_backfill, {"dagster/partition": "7"}):
            submit(instance, create_run(instance, job, made, place, str(uuid.uuid4()), {}, tags))
        left = []
        while runs := daemon._get_runs_to_dequeue(instance, instance.get_concurrency_config(), None):
            left.append([run.tags["dagster/partition"] for run in runs])
            for run in runs:
                instance.report_run_canceled(run)
    assert left == [["0", "7"], ["1"], ["2"], ["10"]]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("", True),
        ("telemetry: {enabled: false}\n", True),
        ("run_launcher:\n  module: coepg_dagster.assets.run_launcher\n  class: RunLauncher\n", True),
        (SETTINGS, False),
    ],
    ids=["none", "of another", "with the queue of dagster", "of this project"],
)
def test_a_home_with_the_launcher_or_the_queue_of_dagster_is_told_of(settings: str, said: bool, tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text(settings)
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        lacks = what_it_lacks(instance)
    assert lacks is None or f"{tmp_path}/dagster.yaml does not name" in lacks
    assert (lacks is not None) == said
