"""A local vLLM server on loopback: started, probed, used through the OpenAI engine, and stopped with all its children."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx

from coepg_dagster.experiment.models import Serving
from coepg_dagster.inference.endpoint import Endpoint
from coepg_dagster.inference.engine import EngineRefused
from coepg_dagster.inference.openai_engine import OpenAIEngine
from coepg_dagster.inference.processing import load_processor
from coepg_dagster.processes import end_group, ended, first_error, tail, visible
from coepg_dagster.refusal import Refusal

NAME: Final = "served"
STEP_TOKENS: Final = 8192
"""Limit of the tokens of one scheduler step: enough to fill a GPU, and few enough to leave memory for the KV cache."""


class ServerFailed(Refusal, RuntimeError):
    """A server that ended, or did not answer in time; the message says why, and contains the end of its log."""


def vllm_settings(path: str, dtype: str, serving: Serving, share: int) -> dict[str, Any]:
    """The settings of vLLM, in this process and as a server: the same for both, since they decide the answers.

    Args:
        share: number of vLLM models that are open at once on the device.
    """
    return {
        "model": path,
        "dtype": dtype,
        "max_model_len": min(serving.context, longest(path)),
        "gpu_memory_utilization": round(serving.memory / share, 3),
        "max_num_scheduled_tokens": STEP_TOKENS,
        # vLLM sizes its encoder cache by this. It must hold all images of the running step and of the next one, also those
        # that a step only begins; otherwise requests lose their prefix (`inference/order.py`)
        "max_num_batched_tokens": 3 * STEP_TOKENS,
        "enable_prefix_caching": True,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "logprobs_mode": "raw_logprobs",  # at temperature 1, before any bias
        "generation_config": "vllm",  # else the checkpoint's repetition penalty and top_k would apply
        "seed": 0,
    }


def longest(path: str) -> int:
    """The number of positions of a checkpoint's language model."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
    return int(config.max_position_embeddings)


@contextmanager
def vllm_server(
    path: str, *, dtype: str, device: str, serving: Serving, share: int, weights: str, log: Path
) -> Iterator[OpenAIEngine]:
    """A vLLM server of the checkpoint `path`, as an engine; it is stopped at the end, also after an error.

    Raises ServerFailed, with the end of `log`, if it does not start or does not do what the experiment says.
    """
    port, key = free_port(), secrets.token_urlsafe(24)
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME]
    for name, value in vllm_settings(path, dtype, serving, share).items():
        flag = "--" + name.replace("_", "-")
        arguments += [flag] if value is True else [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    command = [serving.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    command += ["--enable-prompt-tokens-details", *serving.arguments]
    environment = {"VLLM_API_KEY": key, "VLLM_NO_USAGE_STATS": "1", **visible(device)}
    with started(command, f"http://127.0.0.1:{port}", environment, log, 60 * serving.start_minutes) as server:
        endpoint = Endpoint(f"{server.url}/v1", NAME, key, serving.in_flight)
        processor = load_processor(path)
        with server.explained():
            # the first answer may take as long as the start, since kernels are compiled for it
            first = OpenAIEngine(replace(endpoint, timeout_seconds=server.left()), processor, weights=weights)
            first.check()
            first.close()
        engine = OpenAIEngine(endpoint, processor, weights=weights, exit_report=server.exit_report, ahead=0)
        try:
            yield engine
        finally:
            engine.close()


class Server:
    """A process that answers over HTTP, from its start to its end."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path, start: int, seconds: float) -> None:
        self._process, self.url, self._log, self._start = process, url, log, start
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the deadline of the start; at least one."""
        return max(1.0, self._end - time.monotonic())

    def exit_report(self) -> str:
        """How and why it ended, and the end of its log; empty while it runs."""
        code = self._process.poll()
        return "" if code is None else f"; it {ended(code)}: {first_error(self._log, self._start)}{self._end_of_log()}"

    def _end_of_log(self) -> str:
        return f"\n\nThe end of {self._log}:\n{tail(self._log, start=self._start)}"

    def until_healthy(self) -> None:
        """Waits until /health answers. Raises ServerFailed if the server ends before, or the deadline passes."""
        while self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if time.monotonic() > self._end:
                raise ServerFailed(
                    f"{self.url} was not healthy in time: raise `start_minutes`, or look for what hangs{self._end_of_log()}"
                )
            time.sleep(0.2)
        raise ServerFailed(f"{self.url} did not start{self.exit_report()}")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A context in which EngineRefused becomes ServerFailed, with the end of the log."""
        try:
            yield
        except EngineRefused as error:
            raise ServerFailed(f"{error}{self.exit_report() or self._end_of_log()}") from None


@contextmanager
def started(
    command: Sequence[str], url: str, environment: Mapping[str, str], log: Path, seconds: float
) -> Iterator[Server]:
    """A healthy server. At the end its whole process group is ended, also when this process is killed.

    Args:
        url: where it will listen; `/health` answers 200 when it is ready.
        environment: variables added to those of this process.
        log: the file to which its output is appended.
        seconds: limit of the time that the start takes.
    """
    with log.open("ab") as output:
        start = output.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "coepg_dagster.processes", *command],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        server = Server(process, url, log, start, seconds)
        server.until_healthy()
        yield server
    finally:
        end_group(process)


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
