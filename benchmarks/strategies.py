"""The same tiny training in one process and over several GPUs with DDP, ZeRO-2, ZeRO-3 and FSDP: does it learn the same?

Every run is the job that Dagster starts (`coepg_dagster.resources.worker`), with the placement that an experiment's resources
give it: SFT of the sandbox's planner, which sees the same rows in every placement, and GRPO of it, whose rollouts each process
samples differently. Each run ends after `--limit` seconds at the latest. `value` is the largest relative difference of an
SFT loss from that of one process; weights are compared by their change in training. `--quick` runs DDP on a CPU, where
accelerate does not support DeepSpeed and FSDP. A run that fails is recorded, and the others are tried.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks import limited, sized, tiny
from benchmarks.baseline import Log, command_line, write
from benchmarks.scaling import need_gpus
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.jobs import GrpoJob, Placement, SftJob

WORKER: Final = "coepg_dagster.resources.worker"
ALONE: Final = "one process"
STRATEGIES: Final = ("ddp", "zero2", "zero3", "fsdp")
STEPS: Final = 4
UNIT: Final = "% at most between losses of SFT"


def job_of(kind: str, placement: Placement, device: str, folder: Path) -> SftJob | GrpoJob:
    """SFT or GRPO of the sandbox's planner, the same for every placement except how rows are distributed."""
    of_screens = {"sft": lambda: sized.tables("tiny", 96, screens=16), "grpo": lambda: (tiny.train_steps(16),) * 2}
    steps, dataset = of_screens[kind]()
    common: dict[str, Any] = {
        **sized.inputs(folder, steps, dataset if kind == "sft" else dataset.select(["step_id"])),
        "models": tiny.settings(),
        "device": device,
        "batch_size": 32,
        "init": tiny.PLANNER,
        "max_point_tokens": 12,
        "placement": placement,
    }
    if kind == "sft":
        micro = 8 // placement.processes
        sft = Sft(
            max_steps=STEPS,
            batch_size=16,
            micro_batch_size=micro,
            learning_rate=1e-4,
            freeze_vision=True,
            probe_steps=0,
        )
        return SftJob(**common, role="planner", max_plan_tokens=48, config=sft)
    grpo = Grpo(prompts_per_step=4, group_size=4, micro_batch_size=4, max_steps=2, max_plan_tokens=48, probe_steps=0)
    verifiers = {name: {"model": str(tiny.GROUNDERS[name])} for name in ("verifier_a", "verifier_b")}
    grounder = ("base_grounder", str(tiny.GROUNDERS["base_grounder"]))
    return GrpoJob(**common, grounder=grounder, verifiers=verifiers, config=grpo)


def ran(job: SftJob | GrpoJob, limit: float) -> dict[str, Any]:
    """Runs the job in a separate worker; returns its exit code, losses, seconds and figures."""
    folder = job.out.parent
    file, result, log = (folder / name for name in ("job.json", "result.json", "log"))
    file.write_text(job.model_dump_json())
    began = time.perf_counter()
    code = limited.run([WORKER, str(file), str(result)], log, limit)
    lines = job.out / "training_log.jsonl"
    return {
        "code": code if code is not None else f"limit of {limit:.0f} s",
        "seconds": round(time.perf_counter() - began, 1),
        "losses": [entry["loss"] for entry in map(json.loads, lines.read_text().splitlines()) if "loss" in entry]
        if lines.exists()
        else [],
        "end": [] if code == 0 else log.read_text(errors="replace").splitlines()[-60:],
        **(json.loads(result.read_text()) if result.exists() else {}),
    }


def moved(weights: Path) -> dict[str, torch.Tensor]:
    """Change of each tensor in training. Raises ValueError if the saved model has other tensors than the base."""
    after = load_file(weights)
    with safe_open(f"{tiny.PLANNER}/model.safetensors", "pt") as before:
        others = after.keys() ^ set(before.keys())
        if others:
            raise ValueError(f"saved and base model have different tensors: {', '.join(sorted(others))}")
        return {name: after[name].float() - before.get_tensor(name).float() for name in after}


def apart(run: dict[str, torch.Tensor], alone: dict[str, torch.Tensor]) -> dict[str, float]:
    """Cosine of two changes of the weights, and the norm of their difference relative to `alone`."""
    a, b = (torch.cat([way[name].flatten() for name in sorted(alone)]) for way in (run, alone))
    return {
        "cosine": float(torch.nn.functional.cosine_similarity(a, b, dim=0)),
        "difference": float((a - b).norm() / b.norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="DDP on a CPU, no baseline; proves the code path")
    parser.add_argument("--gpus", type=int, default=2, help="processes of a run")
    parser.add_argument("--only", action="append", choices=STRATEGIES, help="again for more; default: all")
    parser.add_argument("--limit", type=float, default=150, help="seconds of a run, its start included")
    options = parser.parse_args()
    name = "_".join([f"strategies_{options.gpus}gpu", *(options.only or [])])
    if not options.quick:
        need_gpus(name, UNIT, options.gpus, "on a CPU")
    say = Log(name, Path(tempfile.mkdtemp(prefix="quick-"))) if options.quick else Log(name)
    wanted = ["ddp"] if options.quick else options.only or STRATEGIES
    placements = {ALONE: Placement()} | {s: Placement(processes=options.gpus, strategy=s) for s in wanted}
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="strategies-") as temporary:
        for kind in ("sft", "grpo"):
            of_one = None
            for of, placement in placements.items():
                folder = Path(temporary) / f"{kind}-{of.replace(' ', '-')}"
                job = job_of(kind, placement, "cpu" if options.quick else "cuda", folder)
                runs[f"{kind}, {of}"] = run = ran(job, options.limit)
                losses, saved = [round(x, 4) for x in run["losses"]], run.get("figures", {}).get("parameters")
                say(
                    f"{kind}, {of}: {run['code']} after {run['seconds']:.0f} s; loss {losses}, {saved} parameters saved"
                )
                for line in run["end"]:
                    say(f"    {line}")
                weights = folder / "out" / "model.safetensors"
                if kind != "sft" or not weights.exists():
                    continue
                try:
                    way = moved(weights)
                except ValueError as why:
                    run["saved"] = str(why)
                    say(f"  {why}")
                    continue
                if of == ALONE:
                    of_one = way
                elif of_one and len(run["losses"]) == STEPS:
                    run |= apart(way, of_one)
                    pairs = zip(run["losses"], runs[f"sft, {ALONE}"]["losses"], strict=True)
                    run["loss_apart"] = max(abs(a - b) / b for a, b in pairs)
                    say(f"  against {ALONE}: {json.dumps(apart(way, of_one))}, losses {run['loss_apart']:.2e}")
    failed = [key for key, run in runs.items() if run["code"] != 0 or "saved" in run]
    worst = max((run["loss_apart"] for run in runs.values() if "loss_apart" in run), default=None)
    if not options.quick:
        write(
            name,
            command=command_line(),
            value=None if worst is None else round(100 * worst, 4),
            unit=UNIT,
            against=ALONE,
            ratio=None,
            repetitions={key: run["losses"] for key, run in runs.items()},
            log=say.path,
            reason="no strategy ended; the log says why" if worst is None else None,
            runs=runs,
            failed=failed,
        )
    if failed:
        raise SystemExit(f"did not end well: {', '.join(failed)}")


if __name__ == "__main__":
    main()
