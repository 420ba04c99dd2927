"""`coepg ui` with everything behind it: what is killed takes its part with it, and the next `coepg ui` goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import psutil
import pytest
import yaml

from coepg_dagster.processes import is_alive
from coepg_dagster.provenance import SHARED, Ref
from tests.assets.light import light_project, plant
from tests.deployment import LOCATION, Deployment, free_port
from tests.faults.evolving import evolving, left_over, output_of, versions
from tests.project import REPOSITORY

pytestmark = [pytest.mark.long, pytest.mark.slow]

MARK = "COEPG_TEST_OF_SERVICES"
"""An environment variable by which a test knows the processes that `coepg ui` and what it started have started."""


class Ui(Deployment):
    """`coepg ui` as a user starts it, over a light project."""

    def __init__(self, root: Path) -> None:
        self.project = light_project(root, seconds=0.2)
        self.home = self.project.prepare_dagster_home()
        place = {"python_file": {"relative_path": str(REPOSITORY / "tests/assets/light_location.py")}}
        place["python_file"] |= {"location_name": LOCATION, "working_directory": str(REPOSITORY)}
        (root / "workspace.yaml").write_text(yaml.safe_dump({"load_from": [place]}))
        self.mark = uuid.uuid4().hex
        self.start()

    def start(self) -> None:
        """Starts it, again where it has ended."""
        self.port = free_port()
        env = os.environ | {"COEPG_ROOT": str(self.project.root), MARK: self.mark}
        env |= {"PYTHONPATH": str(REPOSITORY), "DAGSTER_HOME": str(self.home)}
        with (self.project.root / "ui.log").open("ab") as log:
            command = [Path(sys.executable).parent / "coepg", "ui", "--port", str(self.port)]
            self.ui = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        self._processes = [self.ui]
        self.wait(self._is_up, "`coepg ui` to load the code location", 400)

    @property
    def log(self) -> str:
        return (self.project.root / "ui.log").read_text()

    def processes(self) -> dict[int, str]:
        """Everything that it has started, directly or not: id → command."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline())
        return found

    def close(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.ui.wait()

    def recorded(self, run_id: str) -> str:
        with dg.DagsterInstance.from_config(str(self.home)) as instance:
            run = instance.get_run_by_id(run_id)
            assert run is not None
            return run.status.value

    def worker(self, run_id: str) -> int:
        """The process of a run."""
        with dg.DagsterInstance.from_config(str(self.home)) as instance:
            messages = [
                entry.message for entry in instance.all_logs(run_id) if "Started process for run" in entry.message
            ]
        return int(messages[0].rpartition("pid: ")[2].partition(")")[0])


@pytest.fixture
def ui(tmp_path: Path) -> Iterator[Ui]:
    ui = Ui(tmp_path / "project")
    try:
        yield ui
    finally:
        ui.close()


def key(*path: str) -> list[str]:
    return ["light", *path]


def kill_ui(ui: Ui, run: str) -> None:
    os.kill(ui.ui.pid, signal.SIGKILL)


def terminate_ui(ui: Ui, run: str) -> None:
    os.kill(ui.ui.pid, signal.SIGTERM)


def kill_daemon(ui: Ui, run: str) -> None:
    [daemon] = [
        pid for pid, command in ui.processes().items() if "dagster-daemon run" in command and "-m" not in command
    ]
    os.kill(daemon, signal.SIGKILL)


def kill_everything(ui: Ui, run: str) -> None:
    """As when the machine fails."""
    for pid in ui.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_run(ui: Ui, run: str) -> None:
    os.kill(ui.worker(run), signal.SIGKILL)


def kill_code_server(ui: Ui, run: str) -> None:
    for pid, command in ui.processes().items():
        if "dagster api grpc" in command:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def hanging_run(ui: Ui) -> tuple[Path, str, int, int]:
    """Launches a run whose training hangs until the planted file, the first of what is returned, is gone.

    Then the run's id, and the processes of its worker and of the worker's child.
    """
    ui.wait_run(ui.launch([key(asset) for asset in SHARED], None), "SUCCESS")
    planted = plant(ui.project, "worker", "light/s1", Ref("planner_sft", 0))
    run = ui.launch([key("s1", "planner_sft")], "0")
    pids = ui.project.store / ".scratch" / "hanging" / "pids.json"
    ui.wait(pids.exists, "the worker of the run")
    worker, child = json.loads(pids.read_text())
    return planted, run, worker, child


@pytest.mark.parametrize(
    ("fault", "ends"),
    [
        pytest.param(kill_ui, True, id="SIGKILL of coepg ui"),
        pytest.param(terminate_ui, True, id="SIGTERM of coepg ui"),
        pytest.param(kill_daemon, True, id="SIGKILL of the daemon"),
        pytest.param(kill_everything, True, id="SIGKILL of everything"),
        pytest.param(kill_run, False, id="SIGKILL of the process of a run"),
        pytest.param(kill_code_server, False, id="SIGKILL of the code servers"),
    ],
)
def test_what_is_killed_leaves_nothing_behind_and_the_next_run_goes_on(
    ui: Ui, fault: Callable[[Ui, str], None], ends: bool
) -> None:
    planted, run, worker, child = hanging_run(ui)
    planted.unlink()
    started = set(ui.processes())
    fault(ui, run)
    gone = (lambda: not ui.processes()) if ends else (lambda: not {worker, child} & ui.processes().keys())
    if fault is kill_code_server:  # its run goes on; the user cancels it, or waits for it
        ui.wait(lambda: ui.processes().keys() - started, "new code servers")
        ui.wait(ui._is_up, "the web server to find one")
        ui.terminate(run)
    # the web server's code server notices after 45 to 90 s that nobody asks it any more
    ui.wait(gone, f"{fault.__name__}: {sorted(ui.processes().values())} to end", 240)
    if ends:
        code = ui.ui.wait(10)
        assert code == {kill_ui: -9, kill_everything: -9, terminate_ui: 143}.get(fault, code)
        assert fault is not kill_daemon or "Dagster's daemon ended with code 137 (SIGKILL" in ui.log
        ui.start()
    ui.wait(lambda: ui.recorded(run) in ("FAILURE", "CANCELED"), f"the run to be over, not {ui.recorded(run)}", 120)

    def launched() -> str | None:
        try:
            return ui.launch([key("s1", "planner_sft"), key("s1", "grounder")], "0")
        except AssertionError:  # the web server still looks for its new code server
            return None

    ui.wait_run(ui.wait(launched, "a run to be accepted"), "SUCCESS")
    drafts = ui.project.store / ".drafts"
    assert not drafts.exists() or list(drafts.iterdir()) == []


def test_evolve_beside_a_run_of_the_ui_waits_for_its_slot_and_then_makes_what_is_missing(
    ui: Ui, tmp_path: Path
) -> None:
    """Of the same iteration. The run of the UI is left alone until the user cancels it."""
    planted, run, worker, child = hanging_run(ui)
    evolve = evolving(ui.project)
    ui.wait(lambda: "waits for" in " ".join(left_over(ui.project)), "a step of evolve to wait for the slot")
    assert is_alive(worker) and is_alive(child) and ui.recorded(run) == "STARTED"
    planted.unlink()
    ui.terminate(run)
    assert evolve.wait(300) == 0, output_of(ui.project)
    whole = light_project(tmp_path / "whole")
    undisturbed = evolving(whole)
    assert undisturbed.wait(300) == 0, output_of(whole)
    assert versions(ui.project) == versions(whole)
    assert not is_alive(worker) and not is_alive(child) and left_over(ui.project) == []
