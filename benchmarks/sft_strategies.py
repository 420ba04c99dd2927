"""SFT of a model of true size over n GPUs with DDP, ZeRO-2, ZeRO-3 and FSDP: losses, rows per second, and memory as estimated.

Every run is SFT of the loop with the placement that an experiment's resources give it, in the processes of `accelerate launch`;
weights are random and made on the GPU, nothing is saved (`sft_run`), and the vision tower is frozen. One process sees the same
rows in the same passes, so its losses are those of every strategy up to rounding. `ratio` is the memory of a card that
`coepg plan` estimates over the measured peak, of the run that is farthest off; each run has the largest relative difference
of its losses from those of one process, too. The baseline is `sft_strategies_2gpu_3B`, or as `--gpus` and `--size` say; it is
written anew after each run, and a run that fails is recorded, and the others are tried. At 7B one process does not fit an H200:
`--size 7B --only zero3`. `--quick` runs one process and DDP of the tiny model on a CPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from benchmarks import sized
from benchmarks.baseline import FOLDER, Log, command_line, write
from benchmarks.plan_estimates import measured_before, off, sft_stage
from benchmarks.scaling import need_gpus
from benchmarks.sft_mfu import line_of, measure
from coepg_dagster.experiment.training import Sft
from coepg_dagster.jobs import Placement
from coepg_dagster.planning.dryrun import find_gpus
from coepg_dagster.planning.estimates import CARDS, Example, Rates, Spread, rates_of, sft_memory, sft_seconds
from coepg_dagster.training.launch import accelerate_config

ALONE: Final = "one process"
STRATEGIES: Final = ("ddp", "zero2", "zero3", "fsdp")
UNIT: Final = "× (estimated over measured memory of a card)"


def settings_of(options: argparse.Namespace, strategy: str) -> list[str]:
    """Arguments of `sft_run`; one process makes the passes of all."""
    passes = options.accumulation * (options.gpus if strategy == ALONE else 1)
    chosen = ["--size", options.size, "--freeze-vision", "--micro", str(options.micro), "--accumulation", str(passes)]
    chosen += ["--steps", str(options.steps), "--warmup", "1", "--recompute", str(options.recompute)]
    return [*chosen, *(["--device", "cpu"] if options.quick else []), *(["--strategy", strategy] * (strategy != ALONE))]


def launcher(placement: Placement, folder: Path, *, on_gpu: bool) -> list[str]:
    """The module that starts the processes of `placement`, with its arguments."""
    file = folder / f"{placement.strategy}.yaml"
    file.write_text(yaml.safe_dump(accelerate_config(placement, on_gpu=on_gpu)))
    return ["coepg_dagster.training.launch", "--config_file", str(file), "-m"]


def estimated(size: sized.Size, figures: dict[str, Any], rates: Rates, strategy: str) -> dict[str, float]:
    """Memory of a card (GB) and seconds of the measured steps that `coepg plan` estimates for a run."""
    stage, model = sft_stage(size, figures), sized.architecture_of(size)
    config, example = (
        Sft.model_validate(stage["config"]),
        Example(sized.SCREENS[size], stage["prompt"], stage["answer"]),
    )
    spread = Spread() if strategy == ALONE else Spread(strategy, figures["processes"])  # type: ignore[arg-type]
    return {
        "gb": sft_memory(model, config, example, spread).total / 1e9,
        "seconds": sft_seconds(model, config, example, stage["rows"], rates),
    }


def apart(losses: list[float], alone: list[float]) -> float:
    """The largest relative difference of the losses of the same steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=False))


def record(name: str, runs: dict[str, dict[str, Any]], failed: dict[str, str], log: Path, **more: Any) -> None:
    """Writes the baseline of the runs so far; `more`: as in `baseline.write`."""
    ratios = {of: run["estimate"]["gb"] / run["memory_gb"] for of, run in runs.items()}
    worst = max(ratios, key=lambda of: off(ratios[of])) if ratios else None
    write(
        name,
        **{"command": command_line()} | more,
        value=ratios[worst] if worst else None,
        unit=UNIT,
        against=1.0,
        ratio=ratios[worst] if worst else None,
        repetitions={of: run["step_seconds"] for of, run in runs.items()},
        log=log,
        reason=None if worst else "no run measured a step; the log says why",
        what=f"The memory estimate that is farthest off: {worst}.",
        losses={of: run["losses"] for of, run in runs.items()},
        losses_apart={of: run["losses_apart"] for of, run in runs.items() if "losses_apart" in run},
        rows_per_second={of: run["processes"] * run["sequences_per_second"] for of, run in runs.items()},
        memory_ratios=ratios,
        runs=runs,
        failed=failed,
    )


def estimate_again(name: str, size: sized.Size) -> None:
    """Writes the baseline with current estimates; what was measured, and how, stays."""
    facts, stays = measured_before(name)
    for of, run in facts["runs"].items():
        run["estimate"] = estimated(size, run, rates_of(CARDS["H200-141GB"], FOLDER), of)
    record(name, facts["runs"], facts["failed"], FOLDER / f"{name}.log", command=facts["command"], **stays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the tiny model, DDP on a CPU; proves the code path")
    parser.add_argument("--again", action="store_true", help="estimate anew what was measured; needs no GPU")
    parser.add_argument("--size", choices=sized.SIZES, default="3B")
    parser.add_argument("--gpus", type=int, default=2, help="processes of a strategy")
    parser.add_argument("--only", action="append", choices=(ALONE, *STRATEGIES), help="again for more; default: all")
    parser.add_argument("--micro", type=int, default=4, help="rows per GPU and forward pass")
    parser.add_argument("--accumulation", type=int, default=4, help="forward passes per GPU and optimizer step")
    parser.add_argument("--recompute", type=float, default=1.0, help="as in an experiment file")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps; the first is not measured")
    parser.add_argument("--timeout", type=float, default=120, help="seconds of each run, its start included")
    options = parser.parse_args()
    if options.quick:
        options.size, options.only = "tiny", [ALONE, "ddp"]
    chosen = options.only or [ALONE, *STRATEGIES]
    name = "_".join([f"sft_strategies_{options.gpus}gpu_{options.size}", *(options.only or [])]).replace(" ", "-")
    if options.again:
        estimate_again(name, options.size)
        return
    if not options.quick:
        need_gpus(name, UNIT, options.gpus, "on a CPU")
    say = Log(name, Path(tempfile.mkdtemp(prefix="quick-"))) if options.quick else Log(name)
    found = find_gpus()
    rates = rates_of((found and found.card) or CARDS["H200-141GB"], FOLDER)
    # several processes would get one thread each, and a single one all threads
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1" if options.quick else "4")
    runs: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="sft-strategies-") as folder:
        for of in chosen:
            starts = []
            if of != ALONE:
                placement = Placement(processes=options.gpus, strategy=of)
                starts = launcher(placement, Path(folder), on_gpu=torch.cuda.is_available())
            say(f"{of}: {' '.join(settings_of(options, of))}")
            try:
                run = measure(settings_of(options, of), say, timeout=options.timeout, launcher=starts)
            except RuntimeError as error:
                failed[of] = str(error)[-6000:]
                say(f"{of} failed: {failed[of]}")
            else:
                runs[of] = run | {"estimate": estimated(options.size, run, rates, of)}
                if of != ALONE and ALONE in runs:
                    runs[of]["losses_apart"] = apart(run["losses"], runs[ALONE]["losses"])
                say(line_of(f"{of}, each process", run))
                say(
                    f"  losses {run['losses']}, apart {runs[of].get('losses_apart')}; estimate {runs[of]['estimate']}, "
                    f"measured {run['memory_gb_each']} GB, {sum(run['step_seconds']):.1f} s"
                )
            if not options.quick:
                record(name, runs, failed, say.path)
    if failed:
        raise SystemExit(f"did not end well: {', '.join(failed)}")


if __name__ == "__main__":
    main()
