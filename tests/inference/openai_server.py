"""A small OpenAI-compatible server on loopback around a real TransformersEngine; a test can make it fail as servers do.

In a test's process: `OpenAIServer(engine)`. As a process of its own: `python -m tests.inference.openai_server PORT CHECKPOINT`.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image

from coepg_dagster.inference.engine import Generation, Request, Sampling
from coepg_dagster.inference.transformers_engine import TransformersEngine

Fault = Callable[[BaseHTTPRequestHandler, dict[str, Any]], bool]
"""What happens instead of an answer; False: the answer comes after all."""


class OpenAIServer:
    """Serves `engine` as the model `tiny`. `faults` are used up, one a request; `change` edits every answer."""

    def __init__(self, engine: TransformersEngine, port: int = 0, key: str | None = None) -> None:
        self.faults: list[Fault] = []
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.reports: dict[str, Any] = {}  # more of what it says of its model
        self.unwell: list[int] = []  # the status of the next listings of its models
        self.requests: list[dict[str, Any]] = []
        self.busiest = 0
        self._busy, self._key, self._engine = 0, key, engine
        self._lock, self._model_lock = threading.Lock(), threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                if self.path == "/health":
                    reply(self, 200, {})
                elif outer.refused(self):
                    reply(self, 401, {"error": "no key"})
                elif outer.unwell:
                    reply(self, outer.unwell.pop(0), {"error": "not now"})
                else:
                    reply(
                        self,
                        200,
                        {"data": [{"id": "tiny", "owned_by": "test", "created": time.time()} | outer.reports]},
                    )

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if outer.refused(self):
                    return reply(self, 401, {"error": f"bad key {self.headers.get('Authorization')}"})
                with outer._lock:
                    outer.requests.append(body)
                    outer._busy += 1
                    outer.busiest = max(outer.busiest, outer._busy)
                    fault = outer.faults.pop(0) if outer.faults else None
                try:
                    if fault is None or not fault(self, body):
                        reply(self, 200, outer.change(outer.answer(body)))
                finally:
                    with outer._lock:
                        outer._busy -= 1

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def start(self) -> OpenAIServer:
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def serve(self) -> None:
        self._http.serve_forever()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def refused(self, handler: BaseHTTPRequestHandler) -> bool:
        return self._key is not None and handler.headers.get("Authorization") != f"Bearer {self._key}"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        [message] = body["messages"]
        assert [part["type"] for part in message["content"]] == ["image_url", "text"]
        url = message["content"][0]["image_url"]["url"]
        image = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
        chat = [{"role": "user", "content": [{"type": "image"}, message["content"][1]]}]
        settings = (body["max_tokens"], body["temperature"], body["top_p"], body["n"], body["seed"])
        with self._model_lock:
            [answers] = self._engine.generate([Request(image, chat)], Sampling(*settings))
        whole = [answer for answer in answers if isinstance(answer, Generation)]
        usage = whole[0].usage
        assert usage is not None
        return {
            "model": "tiny",
            "choices": [_choice(index, answer) for index, answer in enumerate(whole)],
            "usage": {"prompt_tokens": usage.prompt, "completion_tokens": usage.generated},
        }


def _choice(index: int, answer: Generation) -> dict[str, Any]:
    tokens = [
        {"token": piece.decode(errors="replace"), "bytes": list(piece), "logprob": logprob, "top_logprobs": []}
        for piece, logprob in zip(answer.pieces, answer.logprobs, strict=True)
    ]
    if answer.stop_logprob is not None:
        tokens.append({"token": "<|im_end|>", "bytes": list(b"<|im_end|>"), "logprob": answer.stop_logprob})
    return {
        "index": index,
        "message": {"role": "assistant", "content": answer.text},
        "logprobs": {"content": tokens},
        "finish_reason": answer.finish_reason,
    }


def reply(
    handler: BaseHTTPRequestHandler, status: int, body: Any, headers: dict[str, str] | None = None, raw: bytes = b""
) -> None:
    content = raw or json.dumps(body).encode()
    handler.send_response(status)
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def status(code: int, **headers: str) -> Fault:
    """The next answer is a status with a text."""

    def fault(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> bool:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        reply(handler, code, {"error": f"said with {handler.headers.get('Authorization')}"}, named)
        return True

    return fault


def hang_up(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> bool:
    """The next connection ends without an answer."""
    handler.close_connection = True
    return True


def after(seconds: float) -> Fault:
    """The next answer is late."""

    def fault(*_: Any) -> bool:
        time.sleep(seconds)
        return False

    return fault


def says(raw: bytes, **headers: str) -> Fault:
    """The next answer is 200 with this text."""

    def fault(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> bool:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        reply(handler, 200, None, named, raw)
        return True

    return fault


def endless(part: bytes, pause: float) -> Fault:
    """The next answer has no end: `part` again and again, with a pause in between."""

    def fault(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> bool:
        handler.send_response(200)
        handler.end_headers()
        handler.close_connection = True
        with contextlib.suppress(OSError):  # nobody reads on
            while True:
                handler.wfile.write(part)
                time.sleep(pause)
        return True

    return fault


if __name__ == "__main__":
    port, checkpoint = int(sys.argv[1]), sys.argv[2]
    OpenAIServer(TransformersEngine(checkpoint, dtype="float32", device="cpu", batch_size=4), port).serve()
