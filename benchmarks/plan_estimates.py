"""What `coepg plan` estimates, against what is measured: memory and time of SFT and of the planner pool, 3B-sized, one GPU.

The settings are others than those of sft_mfu, whose training rate the estimates use. Rates and lengths of texts are
given to the estimate as `coepg plan` has them; memory is the most that tensors took. `ratio` is the estimate over the
measurement, of the one of the four that is farthest off. `--quick` runs the tiny model; its ratios say nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import pool_scaling_4gpu, sized
from benchmarks.baseline import FOLDER, Log, command_line, write, write_none
from benchmarks.sft_mfu import measure as measure_sft
from coepg_dagster.estimates import (
    CARDS,
    Example,
    Rates,
    generation_memory,
    generation_seconds,
    rates_of,
    sft_memory,
    sft_seconds,
)
from coepg_dagster.experiment import Sft

NAME: Final = "plan_estimates"
SFT_RUNS: Final[dict[str, list[str]]] = {
    "sft, vision frozen, all recomputed": ["--freeze-vision", "--micro", "6", "--recompute", "1"],
    "sft, half recomputed": ["--freeze-vision", "--micro", "2", "--recompute", "0.5"],
}


def off(ratio: float) -> float:
    """How far a ratio is from 1, either way."""
    return max(ratio, 1 / ratio) if ratio > 0 else float("inf")


def sft(size: sized.Size, settings: list[str], rates: Rates, say: Log, timeout: float) -> dict[str, Any]:
    """Estimate and measurement of one SFT run."""
    figures = measure_sft(settings, say, timeout=timeout)
    chosen = figures["configuration"]
    config = Sft(
        batch_size=chosen["micro"] * chosen["accumulation"],
        micro_batch_size=chosen["micro"],
        freeze_vision=chosen["freeze_vision"],
        recompute=chosen["recompute"],
        compile=chosen["kernels"] == "compiled",
    )
    answer = round(figures["scored_per_sequence"])
    example = Example(
        sized.SCREENS[size], round(figures["tokens_per_sequence"] - figures["image_tokens"] - answer), answer
    )
    model = sized.architecture_of(size)
    return {
        "gb": {"estimate": sft_memory(model, config, example).total / 1e9, "measured": figures["memory_gb"]},
        "seconds": {
            "estimate": sft_seconds(model, config, example, figures["sequences"], rates),
            "measured": sum(figures["step_seconds"]),
        },
        "figures": figures,
    }


def pool(options: argparse.Namespace, size: sized.Size, rates: Rates, say: Log) -> dict[str, Any]:
    """Estimate and measurement of the planner pool."""
    checkpoint = Path(tempfile.gettempdir() if options.quick else "/dev/shm") / f"coepg-{size}-sharp"  # noqa: S108
    sized.make_checkpoint(checkpoint, size, device="cuda" if torch.cuda.is_available() else "cpu", sharp=True)
    batch, plans, tokens = (8, 2, 8) if options.quick else (48, 4, 64)
    settings = ["--size", size, "--batch", str(batch), "--plans", str(plans), "--tokens", str(tokens)]
    settings += ["--chunk", "8" if options.quick else "36", "--chunks", "3"]
    figures = pool_scaling_4gpu.measure(settings, 1, checkpoint, say, timeout=options.timeout)
    model = sized.architecture_of(size)
    example = Example(sized.SCREENS[size], 90, tokens)
    measured = figures["candidates"] / figures["candidates_per_second"]
    screenshots = figures["candidates"] // plans
    return {
        "gb": {
            "estimate": generation_memory(model, example, batch, plans).total / 1e9,
            "measured": figures["memory_gb"],
        },
        "seconds": {
            "estimate": generation_seconds(model, example, batch, plans, screenshots, rates),
            "measured": measured,
        },
        "figures": figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the tiny model; proves the code path")
    parser.add_argument("--card", choices=sorted(CARDS), default="H100-80GB")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for each run")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda and not options.quick:
        reason = "no GPU here; `--quick` proves the code path on a CPU"
        write_none(NAME, "×", reason)
        raise SystemExit(reason)
    rates = rates_of(CARDS[options.card], FOLDER)
    say = Log(NAME, Path(tempfile.mkdtemp(prefix="quick-"))) if options.quick else Log(NAME)
    say(f"rates: {rates.basis}")
    size: sized.Size = "tiny" if options.quick else "3B"
    found: dict[str, dict[str, Any]] = {}
    for name, settings in SFT_RUNS.items():
        if options.quick:
            settings = ["--size", "tiny", "--device", "cuda" if cuda else "cpu", "--micro", "2", "--steps", "3"]
            settings += ["--accumulation", "2"]
        else:
            settings = [*settings, "--accumulation", "8", "--steps", "5", "--warmup", "1"]
        found[name] = sft(size, settings, rates, say, options.timeout)
    found["planner pool"] = pool(options, size, rates, say)
    ratios = {}
    for name, stage in found.items():
        for unit in ("gb", "seconds"):
            estimate, measured = stage[unit]["estimate"], stage[unit]["measured"]
            ratios[f"{name}: {unit}"] = estimate / measured if measured else 0.0
            say(f"{name}: {estimate:.2f} {unit} estimated, {measured:.2f} measured")
    if options.quick:
        return
    worst = max(ratios, key=lambda key: off(ratios[key]))
    write(
        NAME,
        command=command_line(),
        value=round(ratios[worst], 4),
        unit="× (estimate over measurement)",
        against=1.0,
        ratio=round(ratios[worst], 4),
        repetitions={key: round(value, 4) for key, value in ratios.items()},
        log=say.path,
        what=f"The estimate that is farthest off: {worst}.",
        rates=rates.basis,
        stages=found,
    )


if __name__ == "__main__":
    main()
