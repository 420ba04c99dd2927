"""The same tiny training in one process and over several GPUs with DDP, ZeRO-2, ZeRO-3 and FSDP: does it learn the same?

Every run is the job that Dagster starts (`coepg_dagster.resources.worker`), with the placement that an experiment's resources
give it: SFT of the sandbox's planner, which sees the same rows in every placement, and GRPO of it, whose rollouts are drawn
anew by every process. Runs share the GPUs, `--at-once` at a time, each ends after `--limit` seconds at the latest. `value` is
the largest relative difference of an SFT loss from that of one process; weights are compared by how far they moved.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import psutil
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks import sized, tiny
from benchmarks.baseline import FOLDER, Log, command_line, write
from coepg_dagster.experiment import Grpo, Sft
from coepg_dagster.training.launch import Placement
from coepg_dagster.workers import GrpoWork, SftWork, write_steps

WORKER: Final = "coepg_dagster.resources.worker"
ALONE: Final = "one process"
STRATEGIES: Final = ("ddp", "zero2", "zero3", "fsdp")
STEPS: Final = 4
SHOWN: Final = ("attention:", "preflight:", "Traceback", "Error", "error")


def work_of(kind: str, placement: Placement, device: str, folder: Path) -> SftWork | GrpoWork:
    """SFT or GRPO of the sandbox's planner, the same for every placement but for how rows are shared."""
    for name in ("out", "scratch"):
        (folder / name).mkdir(parents=True)
    of_screens = {"sft": lambda: sized.tables("tiny", 96, screens=16), "grpo": lambda: (tiny.train_steps(16),) * 2}
    steps, dataset = of_screens[kind]()
    write_steps(steps, folder / "steps.arrow", ["train"])
    pq.write_table(dataset if kind == "sft" else dataset.select(["step_id"]), folder / "dataset.parquet")
    common: dict[str, Any] = {
        "out": folder / "out",
        "scratch": folder / "scratch",
        "steps": folder / "steps.arrow",
        "models": tiny.settings(),
        "device": device,
        "batch_size": 32,
        "seed": 13,
        "init": tiny.PLANNER,
        "dataset": folder / "dataset.parquet",
        "train_split": "train",
        "placement": placement,
    }
    if kind == "sft":
        micro = 8 // placement.processes
        sft = Sft(max_steps=STEPS, batch_size=16, micro_batch_size=micro, learning_rate=1e-4, freeze_vision=True)
        return SftWork(**common, role="planner", config=sft)
    grpo = Grpo(prompts_per_step=4, group_size=4, micro_batch_size=4, max_steps=2, max_plan_tokens=48)
    verifiers = {name: {"model": str(tiny.GROUNDERS[name])} for name in ("verifier_a", "verifier_b")}
    own = ("base_grounder", str(tiny.GROUNDERS["base_grounder"]))
    return GrpoWork(
        **common, own_grounder=own, verifiers=verifiers, validation_split="", max_point_tokens=12, config=grpo
    )  # type: ignore[arg-type]


def ran(work: SftWork | GrpoWork, limit: float) -> dict[str, Any]:
    """The job in a worker of its own: how it ended, what it logged, how long it took."""
    folder = work.out.parent
    (folder / "work.json").write_text(work.model_dump_json())
    result, log = folder / "result.json", folder / "log"
    began = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(folder / "work.json"), str(result)],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
        )
        try:
            code: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = f"limit of {limit:.0f} s"
            for each in psutil.Process(process.pid).children(recursive=True):
                each.send_signal(signal.SIGABRT)  # faulthandler prints where it is
            time.sleep(2)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    printed = log.read_text(errors="replace").splitlines()
    lines = work.out / "training_log.jsonl"
    found: dict[str, Any] = {
        "code": code,
        "seconds": round(time.perf_counter() - began, 1),
        "said": list(dict.fromkeys(line[:200] for line in printed if line.startswith(SHOWN)))[:8],
        "log": [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else [],
    }
    if result.exists():
        return found | json.loads(result.read_text())
    return found | {"end": printed[-60:]}


def moved(weights: Path) -> dict[str, torch.Tensor] | None:
    """How far each trained tensor is from where training began; None where nothing was saved."""
    if not weights.exists():
        return None
    after = load_file(weights)
    with safe_open(f"{tiny.PLANNER}/model.safetensors", "pt") as before:
        return {name: after[name].float() - before.get_tensor(name).float() for name in after}


def apart(run: dict[str, torch.Tensor], alone: dict[str, torch.Tensor]) -> dict[str, float]:
    """The cosine of two ways that weights moved, and the difference as a share of the way."""
    a, b = (torch.cat([way[name].flatten() for name in sorted(alone)]) for way in (run, alone))
    return {
        "cosine": float(torch.nn.functional.cosine_similarity(a, b, dim=0)),
        "difference": float((a - b).norm() / b.norm()),
    }


def losses(found: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in found["log"] if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2, help="processes of a run; on a CPU too, where only ddp is tried")
    parser.add_argument("--only", action="append", choices=STRATEGIES, help="again for more; default: all")
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--limit", type=float, default=150, help="seconds of a run, its start included")
    parser.add_argument("--sft-only", action="store_true")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if on_gpu and torch.cuda.device_count() < options.gpus:
        raise SystemExit(f"{torch.cuda.device_count()} GPUs here, {options.gpus} are asked for: lower --gpus")
    name, device = f"strategies_{options.gpus}gpu", "cuda" if on_gpu else "cpu"
    say = Log(name, FOLDER if on_gpu else Path(tempfile.mkdtemp(prefix="quick-")))
    wanted = options.only or (STRATEGIES if on_gpu else ("ddp",))
    placements = {ALONE: Placement()} | {s: Placement(processes=options.gpus, strategy=s) for s in wanted}
    kinds = ("sft",) if options.sft_only else ("sft", "grpo")
    with tempfile.TemporaryDirectory(prefix="strategies-") as temporary:
        folders = {
            (kind, of): Path(temporary) / f"{kind}-{of.replace(' ', '-')}" for kind in kinds for of in placements
        }

        def one(key: tuple[str, str]) -> dict[str, Any]:
            kind, of = key
            found = ran(work_of(kind, placements[of], device, folders[key]), options.limit)
            figures = found.get("figures", {})
            about = f"loss {[round(x, 4) for x in losses(found)]}, {figures.get('parameters')} parameters saved"
            say(f"{kind}, {of}: ended with {found['code']} after {found['seconds']:.0f} s; {about}")
            for line in (*found["said"], *found.get("end", ())):
                say(f"    {line}")
            return found

        with ThreadPoolExecutor(options.at_once) as pool:
            found = dict(zip(folders, pool.map(one, folders), strict=True))
        ways = {key: moved(folder / "out" / "model.safetensors") for key, folder in folders.items()}
    alone = losses(found["sft", ALONE])
    runs: dict[str, dict[str, Any]] = {}
    for (kind, of), run in found.items():
        run |= {"moved": None}
        way, of_one = ways[kind, of], ways[kind, ALONE]
        if kind == "sft" and of != ALONE and way and of_one:
            run["moved"] = apart(way, of_one)
            run["loss_apart"] = max(abs(a - b) / b for a, b in zip(losses(run), alone, strict=False))
            say(f"{of}: losses of SFT at most {100 * run['loss_apart']:.3f} % from those of {ALONE}; {run['moved']}")
        runs[f"{kind}, {of}"] = run
    worst = max((run["loss_apart"] for run in runs.values() if "loss_apart" in run), default=None)
    bad = [key for key, run in runs.items() if run["code"] != 0]
    whole = worst is not None and math.isfinite(worst)
    if on_gpu:
        write(
            name,
            command=command_line(),
            value=round(100 * worst, 4) if worst is not None and whole else None,
            unit="% at most between losses of SFT",
            against=ALONE,
            ratio=None,
            repetitions={key: losses(run) for key, run in runs.items()},
            log=say.path,
            reason=None if whole else "no strategy ended; the log says why",
            runs=runs,
            failed=bad,
        )
    raise SystemExit(f"did not end well: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
