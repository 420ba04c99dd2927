"""Worker processes: their results, their ends, and that nothing survives its run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from coepg_dagster.assets.ledger import ITERATION_TAG
from coepg_dagster.resources import warm

from coepg_dagster.processes import is_alive
from coepg_dagster.provenance import Ref
from tests.assets.conftest import InProcess
from tests.assets.light import light_project, plant
from tests.project import REPOSITORY

RUN = """
import sys
import dagster as dg
from pathlib import Path
from coepg_dagster.assets.evolve import evolve_through
from coepg_dagster.project import Project
from coepg_dagster.resources import warm
from rich.console import Console
from tests.assets.conftest import InProcess
warm.IMPORTED.clear()
root = Path(sys.argv[1])
instance = dg.DagsterInstance.local_temp(str(root / "home"), {"concurrency": {"pools": {"default_limit": 1}}})
light = InProcess(Project(root), instance)
if "waits" in sys.argv:
    instance.event_log_storage.initialize_concurrency_limit_to_default("gpu")
    other = instance.create_run_for_job(light.defs.resolve_implicit_global_asset_job_def(), status="STARTED")
    claimed = instance.event_log_storage.claim_concurrency_slot("gpu", other.run_id, "one")
    assert claimed.is_claimed
evolve_through(light.defs, instance, light.loop, 0, Console(stderr=True, soft_wrap=True))
"""


@pytest.fixture(autouse=True)
def bare_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers here hang or do not exist: the server that they are forked from imports nothing."""
    monkeypatch.setattr(warm, "_server", None)
    monkeypatch.setattr(warm, "IMPORTED", [])


def evolving(root: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """`evolve_through` in a process that leads a group, as a shell starts it."""
    (root / "home").mkdir()
    with (root / "output").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-c", RUN, str(root), *arguments],
            cwd=REPOSITORY,
            stdout=output,
            stderr=output,
            env=os.environ | {"COEPG_ROOT": str(root)},
            start_new_session=True,
        )


def until(done: Callable[[], object], run: subprocess.Popen[bytes], root: Path) -> None:
    for _ in range(1500):
        if done():
            return
        assert run.poll() is None, (root / "output").read_text()
        time.sleep(0.2)
    raise AssertionError((root / "output").read_text())


def statuses(root: Path) -> list[tuple[str | None, str]]:
    """Iteration and status of each run, in order."""
    with dg.DagsterInstance.local_temp(str(root / "home")) as instance:
        return [(run.tags.get(ITERATION_TAG), run.status.value) for run in reversed(instance.get_runs())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "code", "status"),
    [
        ([signal.SIGINT], 130, "CANCELED"),
        ([signal.SIGTERM], 143, "CANCELED"),
        ([signal.SIGINT, signal.SIGINT], 130, "CANCELED"),
        ([signal.SIGKILL], -signal.SIGKILL, "STARTED"),
    ],
)
def test_nothing_survives_its_run_and_who_ended_it_cancelled_it(
    tmp_path: Path, numbers: list[signal.Signals], code: int, status: str
) -> None:
    root = tmp_path / "project"
    project = light_project(root)
    plant(project, "worker", "light/s1", Ref("planner_sft", 0))
    run = evolving(root)
    pids = project.store / ".scratch" / "hanging" / "pids.json"
    until(lambda: pids.exists() and pids.read_text(), run, root)
    worker, child = json.loads(pids.read_text())
    assert is_alive(worker) and is_alive(child)
    for number in numbers:
        os.killpg(run.pid, number)  # as a terminal does it
        time.sleep(0.3)
    assert run.wait(timeout=120) == code
    for _ in range(600):
        if not is_alive(worker) and not is_alive(child):
            break
        time.sleep(0.1)
    assert not is_alive(worker) and not is_alive(child)
    assert not (project.store / "light" / "s1" / "planner_sft").exists()
    assert statuses(root) == [(None, "SUCCESS"), ("0", status)]
    if status == "CANCELED":
        output = (root / "output").read_text()
        assert "Traceback" not in output
        assert f"light/s1 k=0: ended by {numbers[0].name}; what was finished is kept, a re-run goes on there" in output
        assert list((project.store / ".claims" / "evolve").iterdir()) == []


@pytest.mark.slow
def test_who_waits_for_a_slot_can_be_ended_too(tmp_path: Path) -> None:
    root = tmp_path / "project"
    light_project(root)
    run = evolving(root, "waits")
    until(lambda: ("0", "STARTED") in statuses(root), run, root)
    time.sleep(2)
    assert run.poll() is None
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(timeout=200) == 130
    assert statuses(root)[-1] == ("0", "CANCELED")
    assert "Traceback" not in (root / "output").read_text()


def test_a_job_that_takes_too_long_is_ended_and_says_what_to_do(
    light: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tests.assets.light as module

    launch = module.run_process
    monkeypatch.setattr(
        module, "run_process", lambda *args, **given: launch(*args, **given | {"timeout_minutes": 0.08})
    )
    plant(light.project, "worker", "light/s1", Ref("planner_sft", 0))
    light.run(None)
    why = light.why(light.run(0, "planner_sft"))
    assert "took more than 0.08 minutes: raise `timeout_minutes`" in why
    pids = light.project.store / ".scratch" / "hanging" / "pids.json"
    if pids.exists():
        assert not any(is_alive(pid) for pid in json.loads(pids.read_text()))


def test_a_worker_that_fails_shows_the_end_of_its_output(light: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.assets.light as module

    launch = module.run_process
    monkeypatch.setattr(
        module, "run_process", lambda *args, **given: launch(*args, **given | {"module": "no.such.module"})
    )
    plant(light.project, "worker", "light/s1", Ref("planner_sft", 0))
    light.run(None)
    why = light.why(light.run(0, "planner_sft"))
    assert "the worker ended with code 1" in why and "No module named" in why
