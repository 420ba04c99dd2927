"""A process that a benchmark measures: in a session of its own, ended after a limit, with the stacks of all its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
    for number in (signal.SIGABRT, signal.SIGKILL):
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)
        psutil.wait_procs(processes, timeout=5)
