"""Process groups: each ends as a whole, with children and grandchildren, and none outlives the process that started it.

The first process of a job that fails leaves its reason (its last words) in a file, wherever in the group it runs, so that
whoever waits for the job need not search a log.

`python -m coepg_dagster.processes COMMAND…` leads a group in which it runs a command, and ends the group when its parent ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import psutil

from coepg_dagster.refusal import Refusal, machine_trouble

GRACE_SECONDS: Final = 20
"""How long a group has after SIGINT, and again after SIGTERM, by default."""
STARTER: Final = "COEPG_STARTER"
"""Environment variable with the id of the process that a job must not outlive."""
LAST_WORDS: Final = "COEPG_LAST_WORDS"
"""Environment variable with the file for the reason why a job's processes end."""
WORDS_AT_MOST: Final = 16_000
"""Limit of the characters of last words, and of the end of a log."""
LOG_AT_MOST: Final = 1 << 20
"""Limit of the bytes of a log that are read."""
_AN_ERROR: Final = re.compile(r"\b(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b: .+|\berror: .+")
_NO_ERROR: Final = re.compile(r"\b(?:WARNING|INFO|DEBUG)\b")


class Process(Protocol):
    """A process that leads a group, with the interface of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def end_group(process: Process, grace_seconds: float = GRACE_SECONDS) -> None:
    """Ends a process and everything that it started: SIGINT, SIGTERM, SIGKILL to its group, with a pause after each.

    An interrupt during the pause (a second Ctrl-C) kills the group at once.
    """
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number if process.poll() is None else signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace_seconds)
            # if the leader has ended, the next round kills the rest of its group
        process.wait()
    except ProcessLookupError:
        return
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise


def group_ended(group: int, seconds: float) -> bool:
    """Waits at most `seconds` for the end of every process of a group; whether all have ended."""
    end = time.monotonic() + seconds
    while any(is_alive(pid) for pid in psutil.pids() if _group_of(pid) == group):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def ended(code: int) -> str:
    """How a process ended, by its exit code, which is negative or over 128 if a signal ended it."""
    number = -code if code < 0 else code - 128
    if number not in set(signal.Signals):
        return f"ended with code {code}"
    name = signal.Signals(number).name
    if number == signal.SIGKILL:
        name += ", which the kernel sends when main memory is full: then use fewer processes or smaller batches"
    return f"ended with code {code} ({name})"


def tail(log: Path, lines: int = 30, start: int = 0) -> str:
    """The last lines of a log after its first `start` bytes."""
    return "\n".join(_written(log, start)[-lines:])[-WORDS_AT_MOST:]


def first_error(log: Path, start: int = 0) -> str:
    """The first error in a log after its first `start` bytes, from which the others follow; else its last line.

    For other programs, which leave no last words.
    """
    lines = [line.strip() for line in _written(log, start) if line.strip()]
    matches = (_AN_ERROR.search(line) for line in lines if not _NO_ERROR.search(line))
    return next((match[0] for match in matches if match), lines[-1] if lines else "")[:WORDS_AT_MOST]


def _written(log: Path, start: int) -> list[str]:
    """The lines of a log after its first `start` bytes, at most its last LOG_AT_MOST bytes; none if there is no log."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(min(start, size), size - LOG_AT_MOST))
        return file.read().decode(errors="replace").splitlines()


@contextlib.contextmanager
def last_words() -> Iterator[None]:
    """A context that leaves the reason if an exception, or sys.exit with a text, ends this process."""
    try:
        yield
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            leave_words(str(end.code))
        raise
    except Exception as error:
        why = str(error) if isinstance(error, Refusal) else machine_trouble(error)
        leave_words(why or "".join(traceback.format_exception_only(error)))
        raise


def leave_words(why: str, *, instead: bool = False) -> None:
    """Leaves the reason why the job of this process fails. The first reason counts; `instead`: this one replaces it."""
    if path := os.environ.get(LAST_WORDS):
        # a full disk may be the reason itself; an existing file holds an earlier reason
        with contextlib.suppress(OSError), Path(path).open("wb" if instead else "xb") as file:
            file.write(why.strip()[:WORDS_AT_MOST].encode(errors="backslashreplace"))


def words_left(path: Path) -> str:
    """The reason that a job left in a file; empty if it left none."""
    return path.read_text(errors="replace") if path.exists() else ""


def started_here() -> dict[str, str]:
    """The environment by which a process that is to be started, and what it starts, knows this one (`end_with_parent`)."""
    return {STARTER: str(os.getpid())}


def end_with_parent() -> None:
    """From now on this process and its group are killed when its parent, or the starter that its environment names, is gone.

    The parent may have ended before this call, while libraries were imported: then only the environment tells.
    """
    parent, starter = os.getppid(), os.environ.get(STARTER)

    def watch() -> None:
        while os.getppid() == parent and (starter is None or is_alive(int(starter))):
            time.sleep(1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def keep(command: list[str]) -> int:
    """Runs a command until it ends. Returns its exit code, 128 + N if signal N ended it."""
    end_with_parent()
    # before the command starts: it would inherit that a script which runs us in the background has interrupts ignored
    signal.signal(signal.SIGINT, lambda *_: None)  # the command, of the same group, gets it too and ends by itself
    process = subprocess.Popen(command)
    code = process.wait()
    return code if code >= 0 else 128 - code


def visible(device: str) -> dict[str, str]:
    """The environment variables that make `cuda:I` the only visible GPU; empty for `cpu`, and for `cuda`: any GPU.

    If several processes train together, `cuda` is the GPU of this one.
    """
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    if not device.startswith("cuda:"):
        return {}
    index = int(device.removeprefix("cuda:"))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": seen.split(",")[index] if seen else str(index)}


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
