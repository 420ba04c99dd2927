"""Worker processes: their results, their ends, and that nothing survives its run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from coepg_dagster.resources import warm

from coepg_dagster.provenance import Ref
from tests.assets.conftest import InProcess
from tests.assets.light import light_project, plant
from tests.deployment import alive
from tests.project import REPOSITORY

RUN = """
import dagster as dg
from pathlib import Path
from coepg_dagster.project import Project
from coepg_dagster.resources import warm
from tests.assets.conftest import InProcess
warm.IMPORTED.clear()
with dg.DagsterInstance.ephemeral() as instance:
    light = InProcess(Project(Path({root!r})), instance)
    light.run(None)
    light.run(0, "planner_sft")
"""


@pytest.fixture(autouse=True)
def bare_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers here hang or do not exist: the server that they are forked from imports nothing."""
    monkeypatch.setattr(warm, "_server", None)
    monkeypatch.setattr(warm, "IMPORTED", [])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_survives_its_run(tmp_path: Path, number: signal.Signals) -> None:
    project = light_project(tmp_path / "project")
    plant(project, "worker", "light/s1", Ref("planner_sft", 0))
    run = subprocess.Popen(
        [sys.executable, "-c", RUN.format(root=str(project.root))],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"COEPG_ROOT": str(project.root)},
    )
    pids = project.store / ".scratch" / "hanging" / "pids.json"
    for _ in range(600):
        if pids.exists() and pids.read_text():
            break
        assert run.poll() is None
        time.sleep(0.2)
    worker, child = json.loads(pids.read_text())
    assert alive(worker) and alive(child)
    run.send_signal(number)
    run.wait(timeout=120)
    for _ in range(200):
        if not alive(worker) and not alive(child):
            break
        time.sleep(0.1)
    assert not alive(worker) and not alive(child)
    assert not (project.store / "light" / "s1").exists()


def test_a_job_that_takes_too_long_is_ended_and_says_what_to_do(
    light: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tests.assets.light as module

    launch = module.run_work
    monkeypatch.setattr(module, "run_work", lambda *args, **given: launch(*args, **given | {"timeout_minutes": 0.08}))
    plant(light.project, "worker", "light/s1", Ref("planner_sft", 0))
    light.run(None)
    why = light.why(light.run(0, "planner_sft"))
    assert "took more than 0.08 minutes: raise `timeout_minutes`" in why
    pids = light.project.store / ".scratch" / "hanging" / "pids.json"
    if pids.exists():
        assert not any(alive(pid) for pid in json.loads(pids.read_text()))


def test_a_worker_that_fails_shows_the_end_of_its_output(light: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.assets.light as module

    launch = module.run_work
    monkeypatch.setattr(
        module, "run_work", lambda *args, **given: launch(*args, **given | {"module": "no.such.module"})
    )
    plant(light.project, "worker", "light/s1", Ref("planner_sft", 0))
    light.run(None)
    why = light.why(light.run(0, "planner_sft"))
    assert "the worker ended with code 1" in why and "No module named" in why
