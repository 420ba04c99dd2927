"""Processes forked from the server: what they get, how they end, and what survives whom."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from coepg_dagster.resources import warm

PROGRAM = """
import json, os, sys, time
print(json.dumps([sys.argv[1:], os.environ.get("MARK"), os.getcwd(), os.getsid(0) == os.getpid()]), flush=True)
if sys.argv[1] == "sleep":
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


STARTER = """
import os, sys
from pathlib import Path
from coepg_dagster.resources import warm
folder = Path(sys.argv[1])
assert warm._server is not None and "colorsys" in sys.modules
job = warm.WarmProcess("program", ["4", "y"], env=dict(os.environ), cwd=folder, output=folder / "log")
code = job.wait(60)
print(code, file=sys.stderr)
sys.exit(code + 1)
"""


def start(folder: Path, *arguments: str, **env: str) -> warm.WarmProcess:
    (folder / "program.py").write_text(PROGRAM)
    given = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)} | env
    return warm.WarmProcess("program", arguments, env=given, cwd=folder, output=folder / "log")


@pytest.fixture(autouse=True)
def fresh_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_server", None)
    monkeypatch.setattr(warm, "IMPORTED", ["colorsys", "no_such_library"])


def test_a_fork_is_what_python_m_would_be(tmp_path: Path) -> None:
    first = start(tmp_path, "3", "x", MARK="a")
    assert first.wait(60) == 3 and first.poll() == 3
    second = start(tmp_path, "0", MARK="b")
    assert second.wait(60) == 0 and second.pid != first.pid
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert lines == [[["3", "x"], "a", str(tmp_path), True], [["0"], "b", str(tmp_path), True]]


def test_signals_and_timeouts_are_those_of_a_process(tmp_path: Path) -> None:
    process = start(tmp_path, "sleep")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL


def test_a_job_takes_interrupts_also_where_a_script_has_them_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in `coepg evolve … &` of a script
    try:
        process = start(tmp_path, "sleep")
    finally:
        signal.signal(signal.SIGINT, before)
    log = tmp_path / "log"
    while not (log.exists() and log.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 1 and "KeyboardInterrupt" in log.read_text()


def test_a_killed_server_is_noticed(tmp_path: Path) -> None:
    process = start(tmp_path, "sleep")
    server = int(Path(f"/proc/{process.pid}/stat").read_text().split()[3])
    os.kill(server, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    with pytest.raises(RuntimeError, match="Run this again"):
        start(tmp_path, "0")
    os.killpg(process.pid, signal.SIGKILL)


def test_a_server_that_is_killed_before_it_reads_its_job_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kills_itself.py").write_text(
        "import os, select, sys\nselect.select([int(sys.argv[1])], [], [])\nos.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setattr(warm, "IMPORTED", ["kills_itself"])  # as when memory is full while it imports
    failed: list[BaseException] = []

    def starting() -> None:
        with pytest.raises(RuntimeError, match="Run this again") as raised:
            start(tmp_path, "0")
        failed.append(raised.value)

    thread = threading.Thread(target=starting, daemon=True)  # a hang must not last for ever
    thread.start()
    thread.join(60)
    assert failed


def test_a_job_that_starts_jobs_has_a_server_with_what_ours_imported(tmp_path: Path) -> None:
    first = start(tmp_path, "0")
    assert first.wait(60) == 0
    (tmp_path / "starter.py").write_text(STARTER)
    starter = warm.WarmProcess(
        "starter",
        [str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path), "MARK": "c"},
        cwd=tmp_path,
        output=tmp_path / "out",
        errors=tmp_path / "errors",
        starts_jobs=True,
    )
    assert starter.wait(60) == 5, (tmp_path / "errors").read_text()
    assert (tmp_path / "errors").read_text() == "4\n" and (tmp_path / "out").read_text() == ""
    assert json.loads((tmp_path / "log").read_text().splitlines()[1]) == [["4", "y"], "c", str(tmp_path), True]
