"""Throughput on n GPUs against n times that on one: shared by the scaling benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.baseline import Log, write_none, write_scaling

Figures = dict[str, Any]


def need_gpus(name: str, unit: str, gpus: int, where: str) -> None:
    """Writes a baseline without a value and exits if there are fewer GPUs; `where`: where `--quick` runs."""
    cuda = torch.cuda.device_count()
    if cuda < gpus:
        reason = f"{cuda} GPUs here, {gpus} are needed; `--quick` proves the code path {where}"
        write_none(name, unit, reason)
        raise SystemExit(reason)


def compare(
    name: str,
    many: int,
    say: Log,
    measure: Callable[[int], Figures],
    rate: Callable[[Figures, int], float],
    *,
    unit: str,
    seconds: str,
    what: str,
    quick: bool,
) -> dict[int, Figures]:
    """Measures one process and `many`; writes the baseline unless `quick`. Returns the figures by number of processes.

    Args:
        measure: number of processes → figures of a run; raises RuntimeError if it has none.
        rate: (figures, number of processes) → throughput of all processes together, in `unit`.
        seconds: key of the figures that are kept as repetitions.
    """
    runs: dict[int, Figures] = {}
    for processes in (1, many):
        try:
            runs[processes] = measure(processes)
        except RuntimeError as error:
            say(str(error))
            if not quick:
                reason = f"{str(error).splitlines()[0]}; the log has the rest"
                write_none(name, unit, reason, log=say.path, runs={str(n): figures for n, figures in runs.items()})
            raise SystemExit(1) from None
    one, together = rate(runs[1], 1), rate(runs[many], many)
    say(f"{together:.2f} {unit} on {many}, {one:.2f} on one: {100 * together / (many * one):.1f} %")
    if not quick:
        write_scaling(
            name,
            one,
            together,
            many,
            unit=unit,
            repetitions={str(processes): figures[seconds] for processes, figures in runs.items()},
            log=say.path,
            what=what,
            runs={str(processes): figures for processes, figures in runs.items()},
        )
    return runs
