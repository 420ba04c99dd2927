"""A process that a benchmark measures: in a session of its own, ended after a limit, with the stacks of all its processes."""

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

ENVIRONMENT: Final = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "TOKENIZERS_PARALLELISM": "false"}
"""With faulthandler, SIGABRT makes a process print where each of its threads is."""


def run(arguments: Sequence[str], output: Path, limit: float, **environment: str) -> int | None:
    """The exit code of `python -m ARGUMENTS…`, whose output is in a file; None where it was ended after `limit` seconds."""
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
    """Ends a process and all that it started, in other sessions too, the last first; each prints its stacks."""
    processes = [*reversed(process.children(recursive=True)), process]
    _tell(processes, signal.SIGSTOP)
    # one at a time, while the others stand still: their lines stay apart, and who sees another end cannot leave before it speaks
    for each in processes:
        _tell([each], signal.SIGABRT)
        _tell([each], signal.SIGCONT)
        end = time.monotonic() + 5
        while not _ended(each) and time.monotonic() < end:
            time.sleep(0.02)
    _tell(processes, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=5)


def _ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)  # its parent stands still, and fetches nobody
    except psutil.NoSuchProcess:
        return True


def _tell(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(number)
