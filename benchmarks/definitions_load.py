"""Loading the code location with twenty experiments in use, each with three seeds, as every reload and every run does.

    python -m benchmarks.definitions_load

In seconds of CPU time of a fresh process, which hardly depend on what else the machine does, against the import of Dagster alone
in the same process. All in, a location of twenty experiments is to load in less than 5 seconds on an idle machine.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import baseline
from tests.project import REPOSITORY

EXPERIMENTS = 20
REPETITIONS = 5
_LOAD = """
import time
start = time.process_time()
import dagster
imported = time.process_time()
from coepg_dagster.definitions import defs
repository = defs().get_repository_def()
repository.load_all_definitions()
print(imported - start, time.process_time() - start, len(repository.assets_defs_by_key))
"""


def make_project(root: Path) -> Path:
    """A project with the sandbox under twenty names, all seeds in use."""
    (root / "experiments").mkdir()
    for number in range(EXPERIMENTS):
        name = f"sandbox_{number}"
        shutil.copy(REPOSITORY / "experiments" / "sandbox.yaml", root / "experiments" / f"{name}.yaml")
        for seed in (13, 42, 1234):
            (root / "store" / name / f"s{seed}").mkdir(parents=True)
    return root


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        project = make_project(Path(folder))
        times = []
        for _ in range(REPETITIONS):
            command = [sys.executable, "-c", _LOAD]
            printed = subprocess.run(command, cwd=project, check=True, capture_output=True, text=True).stdout.split()
            times.append([float(text) for text in printed])
    alone, value = (statistics.median(column) for column in list(zip(*times, strict=True))[:2])
    print(f"{value:.2f} s for {times[0][2]:.0f} assets, {alone:.2f} s for Dagster alone")
    baseline.write(
        "definitions_load",
        command="python -m benchmarks.definitions_load",
        value=value,
        unit="seconds of CPU time",
        against=alone,
        ratio=alone / value,
        repetitions=times,
        experiments=EXPERIMENTS,
        assets=int(times[0][2]),
    )


if __name__ == "__main__":
    main()
