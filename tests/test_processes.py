"""No process outlives who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coepg_dagster.processes import is_alive, visible

CHILD = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
while not Path(sys.argv[2]).exists():  # libraries are imported
    time.sleep(0.05)
from coepg_dagster.processes import end_with_parent
end_with_parent()
time.sleep(600)
"""
STARTER = """
import os, subprocess, sys
from coepg_dagster.processes import started_here
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=os.environ | started_here(), start_new_session=True).wait()
"""


def wait(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def test_a_process_ends_whose_starter_died_while_it_imported(tmp_path: Path) -> None:
    """Its parent is another one by the time it asks: only its environment knows who started it."""
    born, go = tmp_path / "born", tmp_path / "go"
    starter = subprocess.Popen([sys.executable, "-c", STARTER, CHILD, str(born), str(go)])
    wait(lambda: born.exists() and born.read_text(), "the child starts")
    child = int(born.read_text())
    starter.kill()
    starter.wait()
    assert is_alive(child)
    go.touch()
    try:
        wait(lambda: not is_alive(child), "the child ends with its starter")
    finally:
        if is_alive(child):
            os.kill(child, signal.SIGKILL)


def test_a_process_that_ended_and_was_not_waited_for_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    wait(lambda: not is_alive(process.pid), "a zombie is not alive")
    assert process.wait() == 0 and not is_alive(process.pid)
    assert is_alive(os.getpid())


HOW = "import signal; print('ignored' if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else 'taken')"


def test_a_command_takes_interrupts_also_where_a_script_has_them_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in `coepg ui &` of a script
    try:
        command = [sys.executable, "-m", "coepg_dagster.processes", sys.executable, "-c", HOW]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == "taken\n"


def test_one_gpu_of_those_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (visible("cpu"), visible("cuda"), visible("cuda:1")) == ({}, {}, {"CUDA_VISIBLE_DEVICES": "1"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert visible("cuda:1") == {"CUDA_VISIBLE_DEVICES": "6"}
    monkeypatch.setenv("LOCAL_RANK", "1")  # one of the processes that train together
    assert (visible("cpu"), visible("cuda"), visible("cuda:0")) == (
        {},
        {"CUDA_VISIBLE_DEVICES": "6"},
        {"CUDA_VISIBLE_DEVICES": "4"},
    )
