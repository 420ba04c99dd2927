"""Data parallel SFT of a 3B-sized Qwen2.5-VL: rows per second on n GPUs, against n times those on one.

One call makes both runs, with the same settings and the same number of rows per GPU and step; the baseline is
`sft_scaling_4gpu`, with `--gpus 2` it is `sft_scaling_2gpu`. A run that is ended after `--timeout` seconds counts with the
steps until then, and the log has the stacks of all its processes. `--quick` runs the tiny model in two processes on a CPU,
or on the GPUs of the machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Final

import torch

from benchmarks.baseline import Log
from benchmarks.scaling import Figures, compare, need_gpus
from benchmarks.sft_mfu import CONFIGURATIONS, best_settings, line_of, measure

LAUNCHER: Final = ("torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the tiny model, a few steps; proves the code path")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument(
        "--configuration",
        choices=sorted(CONFIGURATIONS),
        help="default: sft_mfu's fastest; one process compiles for about 20 s, the others find most of it done",
    )
    parser.add_argument("--accumulation", type=int, default=8, help="forward passes per GPU and optimizer step")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps, of which two warm up")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each of the two runs")
    options = parser.parse_args()
    cuda, name, unit = torch.cuda.device_count(), f"sft_scaling_{options.gpus}gpu", "rows/s"
    if options.quick:
        say, many = Log(name, Path(tempfile.mkdtemp(prefix="quick-"))), cuda or 2
        settings = ["--size", "tiny", "--device", "cuda" if cuda else "cpu", "--accumulation", "2", "--steps", "4"]
    else:
        need_gpus(name, unit, options.gpus, "in two processes on a CPU")
        say, many = Log(name), options.gpus
        chosen = CONFIGURATIONS[options.configuration] if options.configuration else best_settings()
        settings = [*chosen, "--accumulation", str(options.accumulation), "--steps", str(options.steps)]
        settings += ["--warmup", "2"]
    # torchrun would give several processes one thread each, and a single one all threads
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "4")

    def measured(processes: int) -> Figures:
        say(f"{processes} processes: {' '.join(settings)}")
        launcher = [*LAUNCHER, f"--nproc-per-node={processes}", "-m"]
        try:
            figures = measure(settings, say, timeout=options.timeout, launcher=launcher)
        except RuntimeError as error:
            raise RuntimeError(f"{processes} processes: {error}") from None
        say(line_of(f"{processes} processes, each", figures))
        return figures

    compare(
        name,
        many,
        say,
        measured,
        # each process reports its rows; in every step all of them wait for the slowest
        lambda figures, processes: float(processes * figures["sequences_per_second"]),
        unit=unit,
        seconds="step_seconds",
        what=f"Rows per second on {many} GPUs against {many} times those on one, DDP, same rows per GPU and step.",
        quick=options.quick,
    )


if __name__ == "__main__":
    main()
