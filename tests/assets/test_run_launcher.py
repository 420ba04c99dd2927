"""Runs whose code server is gone: they are cancelled and watched through their process."""

from __future__ import annotations

import json
import multiprocessing
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from coepg_dagster.assets.run_launcher import HOST_TAG, RunLauncher, is_gone, what_it_lacks
from dagster._core.events import EngineEventData
from dagster._core.launcher import WorkerStatus
from dagster._core.storage.tags import GRPC_INFO_TAG

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


@pytest.mark.parametrize(
    ("settings", "said"),
    [("", True), ("telemetry: {enabled: false}\n", True), ((REPOSITORY / "dagster.yaml").read_text(), False)],
    ids=["none", "of another", "of this project"],
)
def test_a_home_with_the_launcher_of_dagster_is_told_of(settings: str, said: bool, tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text(settings)
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        lacks = what_it_lacks(instance)
    assert lacks is None or f"{tmp_path}/dagster.yaml does not name" in lacks
    assert (lacks is not None) == said
