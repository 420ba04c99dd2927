"""The process in which a job runs: `python -m coepg_dagster.resources.worker JOB.json RESULT.json`."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dagster_pipes import PipesContext, open_dagster_pipes

from coepg_dagster.jobs import Job, TrainingJob, read_job
from coepg_dagster.processes import end_with_parent, last_words
from coepg_dagster.progress import Pace
from coepg_dagster.refusal import Refusal
from coepg_dagster.running import run
from coepg_dagster.training.launch import is_main, is_rank, launch_ranks, see_one_gpu

MODULE: Final = "coepg_dagster.resources.worker"
REPORT_EVERY_SECONDS, REPEAT_EVERY_SECONDS = 2.0, 60.0


def main(job_file: Path, result_file: Path) -> None:
    """Runs the job of `job_file`, reports its progress to Dagster, and writes its figures to `result_file`.

    Training in several processes starts this module again in each; the first of them reports and writes the figures.
    """
    end_with_parent()
    try:
        job = read_job(job_file)
    except Refusal as why:
        sys.exit(str(why))
    on_gpu = job.device != "cpu"
    try:
        if isinstance(job, TrainingJob) and not is_rank():
            if job.placement.spread:
                arguments = [str(job_file), str(result_file)]
                sys.exit(launch_ranks(job.placement, job.scratch, MODULE, arguments, on_gpu=on_gpu))
            see_one_gpu()
        # torch here: the definitions name this module and must load fast, and a process that only starts ranks needs none
        from coepg_dagster.inference.visual import keep_in

        keep_in(job.visual)
        if on_gpu and is_rank():
            import torch

            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # from here on, `cuda` is this process's GPU
        if is_main():
            _report(job, result_file)
        else:
            run(job, lambda done, of, figures: None)
    except Refusal as why:
        sys.exit(str(why))


def _report(job: Job, result_file: Path) -> None:
    with open_dagster_pipes() as pipes:
        reporter = Reporter(pipes)
        started = time.monotonic()
        figures = run(job, reporter)
        seconds = time.monotonic() - started
        result_file.write_text(json.dumps({"figures": figures, "device": job.device_name(), "seconds": seconds}))


class Reporter:
    """Writes lines like `12/40, 3.2/min, ends about 2026-11-29 12:09; reward=0.53` into the run's log.

    At most one every two seconds, and always the last one; one that says nothing new, at most once a minute.
    """

    def __init__(self, pipes: PipesContext) -> None:
        self._pipes, self._pace = pipes, Pace()
        self._last, self._said = -math.inf, ""

    def __call__(self, done: int, of: int, figures: Mapping[str, float]) -> None:
        numbers = " ".join(f"{name}={value:.4g}" for name, value in figures.items() if name in SHOWN)
        now, said = time.monotonic(), f"{done}/{of} {numbers}"
        every = REPEAT_EVERY_SECONDS if said == self._said else REPORT_EVERY_SECONDS if done < of else 0
        if now - self._last < every:
            return
        self._last, self._said = now, said
        pace = self._pace.text(done, of, time.time())
        self._pipes.log.info(f"{pace}; {numbers}" if numbers else pace)


SHOWN = frozenset({"loss", "reward", "kl", "gate_passed", "frac_reward_zero_std", "learning_rate"})

if __name__ == "__main__":
    with last_words():  # also of a process that `accelerate launch` started
        main(Path(sys.argv[1]), Path(sys.argv[2]))
