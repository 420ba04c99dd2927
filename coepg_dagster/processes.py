"""Groups of processes: each ends as a whole, children and grandchildren included, and none outlives who started it.

`python -m coepg_dagster.processes COMMAND…` runs a command in the group that it leads, and ends the group when its own
parent is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final, Protocol

GRACE_SECONDS: Final = 20
"""How long a group has after SIGINT, and again after SIGTERM, where nobody says otherwise."""


class Process(Protocol):
    """A process that leads a group, as `subprocess.Popen` tells of it."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def end_group(process: Process, grace_seconds: float = GRACE_SECONDS) -> None:
    """Ends a process and everything that it started: SIGINT, SIGTERM, SIGKILL to its group, each with time to obey."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number if process.poll() is None else signal.SIGKILL)
        except ProcessLookupError:
            return
        try:
            process.wait(timeout=grace_seconds)
        except subprocess.TimeoutExpired:
            continue
        # the leader is gone; what is left of its group is killed in the next round
    process.wait()


def tail(log: Path, lines: int = 30) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def end_with_parent() -> None:
    """From now on this process and its group are killed when the process that started it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def keep(command: list[str]) -> int:
    """Runs a command until it ends; its exit code, 128 + N where signal N ended it."""
    end_with_parent()
    process = subprocess.Popen(command)
    signal.signal(signal.SIGINT, lambda *_: None)  # the command, of the same group, got it too and ends by itself
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
