"""Processes that start with the heavy libraries already imported.

Importing torch, transformers and TRL costs a worker 8 seconds of CPU on two idle cores, 14 where other work runs (torch
2.14, transformers 5.24, TRL 1.16), and an iteration has six workers: it pays. Measure again before it is changed. The first
job of a run starts a server that imports them once, and every job is a fresh fork of it, in its own session and with
its own environment. The server uses no device, and it ends with the process that started it. A job that starts jobs
itself, such as `coepg evolve` in a study, gets a server forked from this one.
(`multiprocessing.forkserver` would import the caller's main module into every job.)
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coepg_dagster.processes import end_with_parent, last_words
from coepg_dagster.progress import Ended

IMPORTED: Final = [
    "coepg_dagster.resources.worker",
    "coepg_dagster.training.sft",
    "coepg_dagster.training.grpo",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
]
"""Imported for every job; a missing module fails in the job that needs it."""
IMPORTED_TO_START_JOBS: Final = [
    "coepg_dagster.assets.evolve",
    "coepg_dagster.assets.build",
    "coepg_dagster.assets.loop",
]
"""Imported for `coepg evolve` as well; its definitions are not, since they belong to one project."""


class WarmServer:
    """Client of the server at the other end of `channel`."""

    def __init__(self, channel: socket.socket) -> None:
        self._socket = channel
        self._lines = channel.makefile("r")
        self._changed = threading.Condition()
        self._started: list[int] = []
        self._codes: dict[int, int] = {}
        self._gone = False
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, **job: Any) -> int:
        """The process id of a new fork that runs `job`. Raises Ended where the server is gone."""
        with self._changed:
            with contextlib.suppress(BrokenPipeError):  # `_gone` says so
                self._socket.sendall(json.dumps(job).encode() + b"\n")
            self._changed.wait_for(lambda: self._started or self._gone)
            if not self._started:
                raise Ended("the server of jobs is gone: was it killed, or is memory full? Run this again")
            return self._started.pop()

    def code(self, pid: int, timeout: float | None) -> int | None:
        """The exit code of a fork (negative: the signal that killed it), or None after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes or self._gone, timeout)
            return self._codes.get(pid, -signal.SIGKILL if self._gone else None)

    def _listen(self) -> None:
        with contextlib.suppress(ConnectionResetError):  # killed with a job unread, as while it imported
            for line in self._lines:
                kind, pid, code = json.loads(line)
                with self._changed:
                    if kind == "started":
                        self._started.append(pid)
                    else:
                        self._codes[pid] = code
                    self._changed.notify_all()
        with self._changed:  # wakes up all that wait
            self._gone = True
            self._changed.notify_all()


def start_server(env: Mapping[str, str]) -> WarmServer:
    """Starts a server in a new Python process, which imports IMPORTED."""
    ours, theirs = socket.socketpair()
    with theirs:
        # its own session: a Ctrl-C reaches only us; we end its jobs, then it ends with us
        server = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid()), *IMPORTED],
            env=dict(env),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    atexit.register(server.kill)  # it notices that we are gone, but not while it imports
    return WarmServer(ours)


def fork_server() -> WarmServer:
    """Forks a server with all that this process has imported. Only for a process with one thread."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if _fork() == 0:
        ours.close()
        os.setsid()
        serve(theirs, parent, [])
        os._exit(0)
    theirs.close()
    return WarmServer(ours)


_server: WarmServer | None = None


class WarmProcess:
    """`python -m MODULE ARGUMENTS` as the leader of its own session, forked from this process's server.

    Args:
        env: the process's whole environment. Variables that are read while libraries load (PYTHONHASHSEED,
            OMP_NUM_THREADS) keep the values of the first process.
        output: file to which its standard output and error are appended.
        errors: file for its standard error instead.
        starts_jobs: it gets a server of its own at once, with all that this server has imported.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        output: Path,
        errors: Path | None = None,
        starts_jobs: bool = False,
    ) -> None:
        global _server
        if _server is None:
            _server = start_server(env)
        self._server = _server
        self.pid = _server.start(
            module=module,
            arguments=list(arguments),
            env=dict(env),
            cwd=str(cwd),
            output=str(output),
            errors=str(errors or output),
            starts_jobs=starts_jobs,
        )

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._server.code(self.pid, 0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        code = self._server.code(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process, not to its group, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _fork() -> int:
    """os.fork(). Python 3.12 warns of the threads of numpy and pyarrow, which are safe: both prepare for a fork."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        return os.fork()


def serve(channel: socket.socket, parent: int, imported: Sequence[str]) -> None:
    """Forks a process for each job from `channel` and reports its exit code, until the process `parent` is gone."""
    load(imported)
    gc.freeze()  # a fork that collects garbage skips what was imported, so that its memory stays shared
    children: set[int] = set()
    waiting = b""
    while True:
        ready, _, _ = select.select([channel], [], [], 0.05 if children else None)
        if ready:
            received = channel.recv(1 << 16)
            # the parent is gone, perhaps while we imported: start nothing; running jobs notice it themselves
            if not received or os.getppid() != parent:
                return
            *lines, waiting = (waiting + received).split(b"\n")
            for line in lines:
                job = json.loads(line)
                if job["starts_jobs"]:
                    load(IMPORTED_TO_START_JOBS)
                leads, led = os.pipe()
                pid = _fork()
                if pid == 0:
                    os.setsid()
                    for descriptor in (leads, led, channel.detach()):
                        os.close(descriptor)
                    run(**job)
                os.close(led)
                os.read(leads, 1)  # returns when the fork leads its group, which can be ended from then on
                os.close(leads)
                children.add(pid)
                channel.sendall(json.dumps(["started", pid, 0]).encode() + b"\n")
        for pid in sorted(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                channel.sendall(json.dumps(["ended", pid, os.waitstatus_to_exitcode(status)]).encode() + b"\n")


def load(names: Sequence[str]) -> None:
    """Imports those of the modules `names` that exist."""
    gc.disable()  # what is imported stays: looking for garbage in it takes a fifth of the CPU
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.enable()


def run(
    module: str,
    arguments: list[str],
    env: dict[str, str],
    cwd: str,
    output: str,
    errors: str,
    starts_jobs: bool,
) -> None:
    """Turns this fork into `python -m MODULE ARGUMENTS`, and ends with its exit code."""
    code = 1
    try:
        for descriptor, path in ((1, output), (2, errors)):
            with Path(path).open("ab") as log:
                os.dup2(log.fileno(), descriptor)
        # a script that runs us in the background has interrupts ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.enable()  # a crash in native code leaves its stack in the log
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        time.tzset()
        if starts_jobs:
            from coepg_dagster.resources import warm  # under its real name: here it is `__main__`

            warm._server = fork_server()
            end_with_parent()
        if torch := sys.modules.get("torch"):  # not loaded yet: it will read the variable
            torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
        sys.argv = [module, *arguments]
        with last_words():
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            code = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - whatever it is, it ends this fork and not the server
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as opened:
        serve(opened, int(sys.argv[2]), sys.argv[3:])
    os._exit(0)  # skips the slow clean-up of imported libraries
