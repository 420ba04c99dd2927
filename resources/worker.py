"""The process in which a job runs: `python -m coepg_dagster.resources.worker WORK.json RESULT.json`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dagster_pipes import PipesContext, open_dagster_pipes

from coepg_dagster.inference.visual import keep_in
from coepg_dagster.processes import end_with_parent, last_words
from coepg_dagster.progress import Ended
from coepg_dagster.training.launch import is_main, is_rank, launch, see_one_gpu
from coepg_dagster.workers import TrainingWork, Work, read_work

MODULE: Final = "coepg_dagster.resources.worker"
REPORT_EVERY_SECONDS = 2.0


def main(work_file: Path, result_file: Path) -> None:
    """Runs the job of `work_file`, tells Dagster how far it is, and leaves its figures in `result_file`.

    Training in several processes starts this module once more in each; the first of them reports and leaves the figures.
    """
    end_with_parent()
    work = read_work(work_file)
    keep_in(work.visual)
    on_gpu = work.device != "cpu"
    try:
        if isinstance(work, TrainingWork) and not is_rank():
            if work.placement.spread:
                arguments = [str(work_file), str(result_file)]
                sys.exit(launch(work.placement, work.scratch, MODULE, arguments, on_gpu=on_gpu))
            see_one_gpu()
        if on_gpu and is_rank():
            import torch

            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # from here on, `cuda` is this process's GPU
        if is_main():
            _work(work, result_file)
        else:
            work.run(lambda done, of, figures: None)
    except Ended as why:
        sys.exit(str(why))


def _work(work: Work, result_file: Path) -> None:
    with open_dagster_pipes() as pipes:
        reporter = Reporter(pipes)
        started = time.monotonic()
        figures = work.run(reporter)
        seconds = time.monotonic() - started
        result_file.write_text(json.dumps({"figures": figures, "device": work.device_name(), "seconds": seconds}))


class Reporter:
    """Writes `12/40 reward=0.53` lines into the run's log, at most one every two seconds, and the last one always."""

    def __init__(self, pipes: PipesContext) -> None:
        self._pipes, self._last = pipes, -REPORT_EVERY_SECONDS

    def __call__(self, done: int, of: int, figures: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now - self._last < REPORT_EVERY_SECONDS and done < of:
            return
        self._last = now
        numbers = " ".join(f"{name}={value:.4g}" for name, value in figures.items() if name in SHOWN)
        self._pipes.log.info(f"{done}/{of} {numbers}".strip())


SHOWN = frozenset({"loss", "reward", "kl", "gate_passed", "groups_without_spread", "learning_rate"})

if __name__ == "__main__":
    with last_words():  # also of a process that `accelerate launch` started
        main(Path(sys.argv[1]), Path(sys.argv[2]))
