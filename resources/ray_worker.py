"""The driver of a job on a Ray cluster: `python -m coepg_dagster.resources.ray_worker JOB.json RESULT.json`.

It runs on the machine of Dagster's step, and its process group is ended like any job's; Ray then ends its workers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Final

from coepg_dagster.resources.worker import Reporter
from dagster_pipes import open_dagster_pipes

from coepg_dagster.jobs import parse_job
from coepg_dagster.processes import end_with_parent
from coepg_dagster.ray_cluster import run_on_cluster
from coepg_dagster.refusal import Refusal

MODULE: Final = "coepg_dagster.resources.ray_worker"
ADDRESS: Final = "COEPG_RAY_ADDRESS"


def main(job_file: Path, result_file: Path) -> None:
    """Runs the job of `job_file` on the cluster, reports its progress to Dagster, and writes its figures to `result_file`."""
    end_with_parent()
    job = parse_job(job_file.read_text())
    with open_dagster_pipes() as pipes:
        started = time.monotonic()
        threads = int(os.environ["OMP_NUM_THREADS"])
        try:
            figures, device = run_on_cluster(job, Path.cwd(), os.environ[ADDRESS], threads, Reporter(pipes))
        except Refusal as why:
            sys.exit(str(why))
        seconds = time.monotonic() - started
        result_file.write_text(json.dumps({"figures": figures, "device": device, "seconds": seconds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
