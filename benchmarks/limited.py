"""Runs a measured process in its own session; at its time limit, all its processes print their stacks and are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from coepg_dagster.processes import is_alive

ENVIRONMENT: Final = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "TOKENIZERS_PARALLELISM": "false"}
"""With faulthandler, a process prints the stacks of its threads on SIGABRT."""


def run(arguments: Sequence[str], output: Path, limit: float, **environment: str) -> int | None:
    """The exit code of `python -m ARGUMENTS…`, whose output goes to a file; None if it was ended after `limit` seconds."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | ENVIRONMENT | environment,
        )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _end(psutil.Process(process.pid))
            process.wait()


def _end(process: psutil.Process) -> None:
    """Ends a process and its descendants, in other sessions too, the last first; each prints its stacks."""
    processes = [*reversed(process.children(recursive=True)), process]
    _send(processes, signal.SIGSTOP)
    # one at a time, while the others are stopped: stacks do not mix, and none ends early because another one ended
    for each in processes:
        _send([each], signal.SIGABRT)
        _send([each], signal.SIGCONT)
        end = time.monotonic() + 5
        while is_alive(each.pid) and time.monotonic() < end:  # its parent is stopped and does not reap it
            time.sleep(0.02)
    _send(processes, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=5)


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(number)
