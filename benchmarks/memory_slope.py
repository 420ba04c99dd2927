"""Growth of memory over 200 optimizer steps of GRPO on the tiny planner, in megabytes per step: it must be flat.

Resident memory of the process is read after every step, with three grounders, the rollout table and the logs as in any run.
Before each reading the allocator returns its free memory, which varies by 40 MB with the lengths of the answers.
The slope is that of a straight line through the last STEPS - WARM_UP readings; its 95 % interval comes from blocks of
consecutive steps, since neighbouring readings are alike. The prompts come again after 20 steps: decoded screenshots are kept
up to a bound (512 MB), and filling that cache is not a leak.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import baseline, tiny
from coepg_dagster.experiment.training import Grpo

NAME = "memory_slope"
STEPS, WARM_UP, BLOCK, SEED = 200, 40, 16, 11
PROMPTS = 40
CONFIG = Grpo(
    prompts_per_step=2,
    group_size=4,
    micro_batch_size=8,
    max_steps=STEPS,
    learning_rate=1e-5,
    max_plan_tokens=tiny.MAX_PLAN_TOKENS,
)
FLAT = 0.05
"""MB per step that count as flat: 10 MB in 200 steps."""


def resident() -> float:
    """Resident memory of this process in megabytes, without free memory that the allocator holds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def slope(readings: np.ndarray) -> float:
    return float(np.polyfit(np.arange(len(readings)), readings, 1)[0])


def interval(readings: np.ndarray, rng: np.random.Generator, draws: int = 2000) -> tuple[float, float]:
    """95 % interval of the slope, by a block bootstrap of the residuals of the line."""
    x = np.arange(len(readings))
    line = np.polyval(np.polyfit(x, readings, 1), x)
    residuals, count = readings - line, -(-len(readings) // BLOCK)
    starts = rng.integers(0, len(readings) - BLOCK + 1, (draws, count))
    drawn = residuals[(starts[:, :, None] + np.arange(BLOCK)).reshape(draws, -1)[:, : len(readings)]]
    slopes = [slope(line + row) for row in drawn]
    low, high = np.percentile(slopes, [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    tiny.one_thread()
    log = baseline.Log(NAME)
    steps = tiny.train_steps(PROMPTS)
    readings: list[float] = []

    def read(done: int, of: int, figures: Any) -> None:
        if "reward" in figures:
            readings.append(resident())

    tiny.train(CONFIG, steps, SEED, read)
    for step in range(0, STEPS, 20):
        log(f"step {step + 1}: {readings[step]:.1f} MB")
    kept = np.array(readings[WARM_UP:])
    value, ci95 = slope(kept), interval(kept, np.random.default_rng(0))
    flat = value <= FLAT
    log(f"step {STEPS}: {readings[-1]:.1f} MB; {value:+.4f} MB/step, 95 % {ci95}; {'flat' if flat else 'NOT flat'}")
    baseline.write(
        NAME,
        command=baseline.command_line(),
        value=value,
        unit="MB/step",
        against=FLAT,
        ratio=FLAT / value if value > 0 else None,
        repetitions=[round(reading, 2) for reading in readings],
        device=baseline.cpu_name(),
        against_what="the slope that counts as flat; no ratio where memory does not grow at all",
        ci95=ci95,
        flat=flat,
        steps=STEPS,
        warm_up=WARM_UP,
    )


if __name__ == "__main__":
    main()
