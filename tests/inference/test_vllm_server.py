"""The starting, watching and stopping of a server, with small servers in the place of vLLM's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coepg_dagster.inference import vllm_server
from coepg_dagster.inference.vllm_server import ServerFailed, free_port, started
from coepg_dagster.processes import is_alive
from tests.project import REPOSITORY

SERVER = """
import http.server, os, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)"])
Path(sys.argv[2]).write_text(f"{{os.getpid()}} {{child.pid}}")
print("loading", flush=True)
{before}
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.time() > born + {slow} else 503); self.end_headers()
    def log_message(self, *_): pass
born = time.time()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def command(port: int, pids: Path, before: str = "", slow: float = 0) -> list[str]:
    return [sys.executable, "-c", SERVER.format(before=before, slow=slow), str(port), str(pids)]


def gone(pids: Path) -> bool:
    """Whether neither the server nor its child lives, after some time to go."""
    end = time.monotonic() + 60
    while any(is_alive(int(pid)) for pid in pids.read_text().split()):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_a_slow_server_is_waited_for_and_ends_with_its_children(tmp_path: Path) -> None:
    port, pids = free_port(), tmp_path / "pids"
    with started(command(port, pids, slow=0.5), f"http://127.0.0.1:{port}", {}, tmp_path / "log", 30) as server:
        assert server.exit_report() == ""
        assert all(is_alive(int(pid)) for pid in pids.read_text().split())
    assert gone(pids)


def test_a_server_that_dies_at_its_start_leaves_the_end_of_its_log(tmp_path: Path) -> None:
    port, pids = free_port(), tmp_path / "pids"
    dies = "sys.exit('CUDA out of memory: all of it')"
    with (
        pytest.raises(ServerFailed, match=r"(?s)ended with code 1.*log.*loading.*CUDA out of memory: all of it"),
        started(command(port, pids, dies), f"http://127.0.0.1:{port}", {}, tmp_path / "log", 30),
    ):
        pass
    assert gone(pids)


def test_a_server_that_never_answers_is_given_up_at_its_deadline(tmp_path: Path) -> None:
    port, pids = free_port(), tmp_path / "pids"
    began = time.monotonic()
    with (
        pytest.raises(ServerFailed, match=r"(?s)not healthy in time: raise `start_minutes`.*loading"),
        started(command(port, pids, "time.sleep(600)"), f"http://127.0.0.1:{port}", {}, tmp_path / "log", 1.5),
    ):
        pass
    assert time.monotonic() - began < 300  # far from the 600 s that the server would sleep
    assert gone(pids)


def test_the_exit_report_holds_the_exit_code_and_the_log(tmp_path: Path) -> None:
    port, pids = free_port(), tmp_path / "pids"
    with started(command(port, pids), f"http://127.0.0.1:{port}", {}, tmp_path / "log", 30) as server:
        os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)
        end = time.monotonic() + 60
        while not server.exit_report() and time.monotonic() < end:
            time.sleep(0.05)
        assert "it ended with code 137 (SIGKILL" in server.exit_report() and "loading" in server.exit_report()
    assert gone(pids)


def test_it_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    port, pids = free_port(), tmp_path / "pids"
    program = (
        "import sys, time; from pathlib import Path; from coepg_dagster.inference.vllm_server import started\n"
        f"with started({command(port, pids)!r}, 'http://127.0.0.1:{port}', {{}}, Path({str(tmp_path / 'log')!r}), 60):\n"
        "    print('up', flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
    parent.kill()
    parent.wait()
    assert gone(pids)


def test_the_settings_are_those_of_the_protocol(random_checkpoint: Callable[[int], Path]) -> None:
    settings = vllm_server.vllm_settings(str(random_checkpoint(0)), "float32", vllm_server.Serving(memory=0.9), 3)
    assert settings["logprobs_mode"] == "raw_logprobs" and settings["generation_config"] == "vllm"
    assert settings["gpu_memory_utilization"] == 0.3
    assert settings["max_model_len"] == vllm_server.longest(str(random_checkpoint(0))) < 16384
