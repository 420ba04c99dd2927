"""Environments in processes of their own, which say what live pages make of actions.

A process is a module that reads a question as JSON from each line of its input and writes an answer as JSON to a line of its
output: {"success": bool, "why": str} or what else its module says, or {"refused": str} where the question itself is wrong. One
that ends, or that gives no answer in time, is killed with all that it started, and its question is asked once more, of a new one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, Final

from coepg_dagster.experiment.training import Environment
from coepg_dagster.processes import started_here
from coepg_dagster.progress import Ended

MODULES: Final[Mapping[str, str]] = {"miniwob": "coepg_dagster.sandbox.miniwob.environment"}
"""By name: the module that is run."""
LOST: Final = "lost"
"""Why an answer is no success if its environment died twice."""


class Died(RuntimeError):
    """An environment ended, or gave no answer in time."""


class Environments:
    """A pool of environments. A context manager: at its end, no process is left.

    `lost` counts questions that were lost with two environments.

    Args:
        config: which module, how many processes, and the limit of an answer.
        command: what to run in place of the module.
    """

    def __init__(self, config: Environment, command: Sequence[str] | None = None) -> None:
        command = command or (sys.executable, "-m", MODULES[config.name])
        self._all = [_Process(command, config.seconds) for _ in range(config.processes)]
        self._free: SimpleQueue[_Process] = SimpleQueue()
        for process in self._all:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(config.processes)
        self.lost = 0
        self._lost_in_a_row = config.processes  # none has answered yet

    def __enter__(self) -> Environments:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            process.kill()

    def ask(self, questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The answer to each question, in order; {"success": False, "why": LOST} where two environments died (`is_lost`).

        Raises:
            Ended: a question was refused, or all environments failed: the end of its error output says why.
        """
        answers = list(self._threads.map(self._ask, questions))
        for answer in answers:
            if "refused" in answer:
                raise Ended(f"grpo.environment: {answer['refused']}")
        lost = [answer for answer in answers if is_lost(answer)]
        self.lost += len(lost)
        self._lost_in_a_row = self._lost_in_a_row + len(lost) if len(lost) == len(answers) else 0
        if lost and self._lost_in_a_row > len(self._all):  # one question alone may be what none survives
            raise Ended(f"grpo.environment: all environments failed: {lost[0]['last_words']}")
        return answers

    @property
    def restarted(self) -> int:
        """How many environments died, each of which a new one has replaced."""
        return sum(process.died for process in self._all)

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        process = self._free.get()
        try:
            for _ in range(2):
                try:
                    return process.ask(question)
                except Died as error:
                    words = str(error)
            return {"success": False, "why": LOST, "last_words": words}
        finally:
            self._free.put(process)


def is_lost(answer: Mapping[str, Any]) -> bool:
    """Whether no environment lived to answer a question."""
    return answer.get("why") == LOST


class _Process:
    """One environment; it is started when it is first needed, and again after it died."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._command, self._seconds = command, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self.died = 0

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Raises Died."""
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it is open while the process runs
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=os.environ | started_here(),
                start_new_session=True,
            )
        try:
            answer: dict[str, Any] = json.loads(self._line(json.dumps(question)))
            return answer
        except (OSError, ValueError, Died) as error:
            words = self.kill()
            self.died += 1
            raise Died(f"{error} {words}".strip()) from None

    def _line(self, question: str) -> bytes:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(question.encode() + b"\n")
        self._process.stdin.flush()
        until, line, out = time.monotonic() + self._seconds, b"", self._process.stdout.fileno()
        while not line.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                raise Died(f"no answer in {self._seconds:g} seconds")
            part = os.read(out, 1 << 16)
            if not part:
                raise Died("it ended")
            line += part
        return line

    def kill(self) -> str:
        """Ends the process and all that it started; the end of its error output."""
        if self._process is None:
            return ""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._process = None
        assert self._errors is not None
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip()
        self._errors.close()
        return words[-1000:]
