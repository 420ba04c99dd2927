"""A throughput on several GPUs against as many times that on one: what the benchmarks of scaling share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.baseline import Log, write_none, write_scaling

Figures = dict[str, Any]


def need_gpus(name: str, unit: str, gpus: int, where: str) -> None:
    """Writes the baseline without a value and leaves, if fewer GPUs are here; `where` is what `--quick` runs in."""
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
    """Measures one process and `many`, and writes the baseline, but for `quick`; the figures by number of processes.

    Args:
        measure: the figures of a run in so many processes; RuntimeError where it has none.
        rate: what all processes of a run did together, in `unit`.
        seconds: of the figures, those that are kept as repetitions.
    """
    found: dict[int, Figures] = {}
    for processes in (1, many):
        try:
            found[processes] = measure(processes)
        except RuntimeError as error:
            say(str(error))
            if not quick:
                reason = f"{str(error).splitlines()[0]}; the log has the rest"
                write_none(name, unit, reason, log=say.path, runs={str(n): figures for n, figures in found.items()})
            raise SystemExit(1) from None
    one, together = rate(found[1], 1), rate(found[many], many)
    say(f"{together:.2f} {unit} on {many}, {one:.2f} on one: {100 * together / (many * one):.1f} %")
    if not quick:
        write_scaling(
            name,
            one,
            together,
            many,
            unit=unit,
            repetitions={str(processes): figures[seconds] for processes, figures in found.items()},
            log=say.path,
            what=what,
            runs={str(processes): figures for processes, figures in found.items()},
        )
    return found
