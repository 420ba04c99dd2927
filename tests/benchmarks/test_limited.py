"""What is measured ends with its limit, whatever it started, and says where it was."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from benchmarks import limited

STARTS_ANOTHER = """
import subprocess, sys, time
another = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(another.pid, flush=True)
time.sleep(600)
"""


def test_the_exit_code_and_the_output_are_those_of_the_process(tmp_path: Path) -> None:
    assert limited.run(["json.tool", "--no-such-option"], tmp_path / "log", 60) == 2
    assert "unrecognized arguments" in (tmp_path / "log").read_text()


def test_nothing_outlives_the_limit_and_every_process_says_where_it_was(tmp_path: Path) -> None:
    hangs = ["coepg_dagster.processes", sys.executable, "-c", STARTS_ANOTHER]
    assert limited.run(hangs, tmp_path / "log", 4) is None
    printed = (tmp_path / "log").read_text()
    assert not psutil.pid_exists(int(printed.split()[0]))
    assert printed.count("Fatal Python error: Aborted") == 3 and '"<string>", line 5' in printed
