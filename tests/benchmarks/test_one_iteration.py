"""A loop that is killed and continued, as the benchmark of an iteration watches it; a small script takes the part of the loop."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.baseline import Log
from benchmarks.one_iteration import EXPERIMENT, KILLS, Evolution, processes_of

LOOP = """
import os, subprocess, sys, time
from pathlib import Path

def artifact(name, version):
    (Path("store") / "EXPERIMENT" / "s13" / name / "1" / version).mkdir(parents=True, exist_ok=True)

artifact("grounder", sys.argv[1])
scratch = Path("store/.scratch/x-s13-planner-1-key")
sealed = scratch / "trainer" / "checkpoint-2" / "whole.json.crc32c"
if not sealed.exists():
    child = "import os, sys, time\\nwhile os.getppid() == int(sys.argv[1]): time.sleep(0.1)"
    subprocess.Popen([sys.executable, "-c", child, str(os.getpid())])
    sealed.parent.mkdir(parents=True)
    sealed.touch()
    time.sleep(60)
(scratch / "worker.log").write_text("continues from checkpoint-2\\n")
time.sleep(1)
artifact("planner", "v")
"""


def evolution(project: Path, *arguments: str) -> Evolution:
    (project / "loop.py").write_text(LOOP.replace("EXPERIMENT", EXPERIMENT))
    command = [sys.executable, "loop.py", *arguments]
    return Evolution(project, command, dict(os.environ), Log("killed", project), limit=60)


def test_a_killed_loop_takes_its_processes_with_it_and_continues(tmp_path: Path) -> None:
    loop, kept = evolution(tmp_path, "v"), list[int]()
    assert loop.piece("grpo", lambda: kept.append(1)) is None
    assert loop.piece(None, lambda: kept.append(1)) == 0
    killed, continued = loop.pieces
    assert (killed["killed_in"], killed["processes"], killed["left_behind"]) == ("grpo", 2, [])
    assert continued["continues"] == ["continues from checkpoint-2"]
    assert loop.made.keys() == {"grounder@1", "planner@1"} and len(kept) == 2
    assert not loop.again and not processes_of(tmp_path)


def test_what_is_made_again_is_named(tmp_path: Path) -> None:
    loop = evolution(tmp_path, "v")
    loop.piece("grpo", lambda: None)
    loop._command = [*loop._command[:-1], "another"]
    [checkpoint] = (tmp_path / "store" / ".scratch").glob(KILLS["grpo"])
    os.utime(checkpoint, (0, 0))
    assert loop.piece(None, lambda: None) == 0
    assert loop.again == {"another version of grounder@1", checkpoint.name}
