"""An engine whose answers are written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coepg_dagster.inference.engine import Failure, Generation, Request, Sampling

RESIZE = (28, 3136, 50176)


def generation(*pieces: str, logprobs: Sequence[float] | None = None, stop: float | None = -0.5) -> Generation:
    logprobs = logprobs or [-0.1 * (t + 1) for t in range(len(pieces))]
    return Generation("".join(pieces), tuple(p.encode() for p in pieces), tuple(logprobs), "stop", stop)


def untimed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of rollouts without the seconds that their graders took, which differ from run to run."""
    return [row | {"graders": [grader | {"seconds": None} for grader in row["graders"]]} for row in rows]


class Scripted:
    """An engine that answers by the text of a request, and keeps the requests."""

    resize = RESIZE

    def __init__(self, answer: Callable[[str], Generation | Failure], *, remote: bool = False) -> None:
        self.requests: list[Request] = []
        self.remote = remote
        self._answer = answer

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Generation | Failure]]:
        self.requests += requests
        return [[self._answer(r.messages[0]["content"][1]["text"])] * sampling.samples for r in requests]
