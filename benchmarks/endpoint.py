"""Grounders behind OpenAI-compatible endpoints, in one process: `python -m benchmarks.endpoint ROWS MODEL=PORT …`.

As servers of language models do, each answers waiting requests in batches of up to ROWS; requests of a batch with the same
image share its prefix.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from queue import SimpleQueue

from PIL import Image

from benchmarks import tiny
from coepg_dagster.inference.engine import Failure, Generation, Request, Sampling
from coepg_dagster.inference.transformers_engine import TransformersEngine
from tests.inference.openai_server import OpenAIServer

Answers = list[list[Generation | Failure]]


class Batched(TransformersEngine):
    """An engine that answers requests of several threads in batches of up to `rows`."""

    def __init__(self, checkpoint: str, rows: int) -> None:
        super().__init__(checkpoint, dtype="float32", device="cpu", batch_size=rows)
        self._rows = rows
        self._waiting: SimpleQueue[tuple[Sequence[Request], Sampling, Future[Answers]]] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Answers:
        answers: Future[Answers] = Future()
        # each request has another seed; greedy answers do not depend on it
        self._waiting.put((requests, replace(sampling, seed=0), answers))
        return answers.result()

    def _serve(self) -> None:
        while True:
            taken = [self._waiting.get()]
            taken += [self._waiting.get() for _ in range(min(self._waiting.qsize(), self._rows - 1))]
            for sampling, part in groupby(taken, key=lambda one: one[1]):
                self._answer(list(part), sampling)

    def _answer(self, part: Sequence[tuple[Sequence[Request], Sampling, Future[Answers]]], sampling: Sampling) -> None:
        images: dict[bytes, Image.Image] = {}
        requests = [
            replace(r, image=images.setdefault(r.image.tobytes(), r.image)) for some, _, _ in part for r in some
        ]
        answers = iter(super().generate(requests, sampling))
        for some, _, future in part:
            future.set_result([next(answers) for _ in some])


def main(rows: str, *served: str) -> None:
    tiny.one_thread()
    servers = []
    for one in served:
        checkpoint, port = one.rsplit("=", 1)
        server = OpenAIServer(Batched(checkpoint, int(rows)), int(port))
        server._model_lock = nullcontext()  # type: ignore[assignment]  # the engine itself takes one batch at a time
        servers.append(server)
    for server in servers[1:]:
        server.start()
    servers[0].serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
