"""SFT of a 3B-sized Qwen2.5-VL on one GPU: the share of the card's measured bf16 rate that training reaches.

The count of operations is coepg_dagster.inference.architecture.flops: 6 · parameters · tokens, causal attention, the vision tower
(forward only where it is frozen), the output layer for the scored tokens only; recomputed activations are not counted.
The rate is that of 8192³ bf16 matrix products of random data, measured in the same process just before.

Without `--only` it runs each configuration of DEFAULT in a separate process. The baseline has all that were measured on such a
device, each with its commit, and those that failed; its value is that of the fastest. `--quick` runs the tiny model for a few
steps, on a CPU or a GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import limited
from benchmarks.baseline import FOLDER, Log, command_line, commit, device_name, earlier, write, write_none

NAME: Final = "sft_mfu"
CONFIGURATIONS: Final[dict[str, list[str]]] = {
    "frozen-compiled-12": ["--freeze-vision", "--micro", "12", "--recompute", "0", "--kernels", "compiled"],
    "frozen-compiled-8": ["--freeze-vision", "--micro", "8", "--recompute", "0", "--kernels", "compiled"],
    "frozen-compiled-4": ["--freeze-vision", "--micro", "4", "--recompute", "0", "--kernels", "compiled"],
    "frozen-compiled-6": ["--freeze-vision", "--micro", "6", "--recompute", "0", "--kernels", "compiled"],
    "frozen-compiled-3": ["--freeze-vision", "--micro", "3", "--recompute", "0", "--kernels", "compiled"],
    "frozen-compiled-quarter": ["--freeze-vision", "--micro", "4", "--recompute", "0.25", "--kernels", "compiled"],
    "frozen-compiled-none": ["--freeze-vision", "--micro", "2", "--recompute", "0", "--kernels", "compiled"],
    "frozen-compiled": ["--freeze-vision", "--micro", "4", "--recompute", "0.75", "--kernels", "compiled"],
    "frozen-eager": ["--freeze-vision", "--micro", "4", "--recompute", "0.5"],
    "trained-compiled": ["--micro", "3", "--recompute", "1", "--kernels", "compiled"],
    "frozen-liger": ["--freeze-vision", "--micro", "4", "--recompute", "0.25", "--kernels", "liger"],
    "frozen-sdpa": ["--freeze-vision", "--micro", "4", "--recompute", "1", "--attention", "sdpa"],
}
"""`--recompute` is a share of the layers. MS-SWIFT, the paper's framework, freezes the vision tower by default."""
DEFAULT: Final = ["frozen-liger", "frozen-compiled-3", "frozen-compiled-4"]
"""The safest first: it compiles nothing. The last may exceed 80 GB while layers are compiled."""


def measure(settings: list[str], say: Log, *, timeout: float, launcher: Sequence[str] = ()) -> dict[str, Any]:
    """The figures of one run of benchmarks.sft_run; after `timeout` seconds it is ended, and the steps until then count.

    Raises RuntimeError with the end of its output if it failed or measured no step.

    Args:
        launcher: a module, with its arguments, that starts sft_run.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "figures.json", Path(folder) / "log"
        arguments = [*launcher, "benchmarks.sft_run", *settings, "--out", str(out)]
        started = time.perf_counter()
        code = limited.run(arguments, log, timeout, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        seconds = time.perf_counter() - started
        lines = log.read_text(errors="replace").splitlines()
        for line in lines:
            if line.startswith(("step ", "rank ", "profile: ")):
                say(f"  {line}")
        end = f"ended after {seconds:.0f} s" if code is None else f"ended with code {code}"
        if code or not out.exists():
            raise RuntimeError(
                "\n".join([f"{end}, before a step was measured" if code is None else end, *lines[-120:]])
            )
        if code is None:
            say("\n".join([f"  {end}; the steps before count", *lines[-120:]]))
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures | {"wall_seconds": seconds} | ({"cut_short": True} if code is None else {})


def line_of(name: str, figures: dict[str, Any]) -> str:
    return (
        f"{name}: {100 * figures['mfu']:.1f} % of {figures['matmul_tflops']:.0f} TFLOP/s, "
        f"{figures['sequences_per_second']:.2f} rows/s, {figures['tokens_per_second']:.0f} tokens/s, "
        f"{figures['memory_gb']:.1f} GB, padding {100 * figures['padding']:.1f} %, {figures['wall_seconds']:.0f} s in all"
    )


def best_settings() -> list[str]:
    """The fastest settings in the committed baseline, or a default; used by other benchmarks."""
    file = FOLDER / f"{NAME}.json"
    fastest = json.loads(file.read_text()).get("fastest") if file.exists() else None
    return CONFIGURATIONS.get(fastest or "", CONFIGURATIONS["frozen-compiled-quarter"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the tiny model, a few steps; proves the code path")
    parser.add_argument("--only", action="append", choices=sorted(CONFIGURATIONS), help="again for more")
    parser.add_argument("--seconds", type=float, default=12, help="of measured steps, for each configuration")
    parser.add_argument("--accumulation", type=int, default=8, help="forward passes per optimizer step")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for each configuration, start included")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if options.quick:
        say = Log(NAME, Path(tempfile.mkdtemp(prefix="quick-")))
        device = "cuda" if cuda else "cpu"
        small = [
            "--size",
            "tiny",
            "--device",
            device,
            "--micro",
            "4",
            "--accumulation",
            "2",
            "--steps",
            "4",
            "--profile",
        ]
        figures = measure(small, say, timeout=options.timeout)
        say(line_of("quick", figures))
        return
    if not cuda:
        write_none(NAME, "TFLOP/s", "no GPU here; `--quick` proves the code path on a CPU")
        raise SystemExit("no GPU here: use --quick")
    say = Log(NAME, keep=True)
    say(command_line())
    runs: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for name in options.only or DEFAULT:
        say(f"{name}: {' '.join(CONFIGURATIONS[name])}")
        warmup = "2" if "compiled" in CONFIGURATIONS[name] else "1"
        settings = [*CONFIGURATIONS[name], "--accumulation", str(options.accumulation), "--steps", "200"]
        try:
            runs[name] = measure(
                [*settings, "--warmup", warmup, "--seconds", str(options.seconds), "--profile"],
                say,
                timeout=options.timeout,
            )
            say(line_of(name, runs[name]))
        except RuntimeError as error:
            failed[name] = str(error)[-1500:]
            say(f"{name} failed: {error}")
        if runs:
            record(say, runs, failed)
    if not runs:
        raise SystemExit("no configuration ran")
    say("\n".join(line_of(name, figures) for name, figures in runs.items()))


def record(say: Log, runs: dict[str, dict[str, Any]], failed: dict[str, str]) -> None:
    """Writes the baseline, after each configuration: a run that is cut short leaves a partial result."""
    before = earlier(NAME, FOLDER, device_name())
    measured = before.get("configurations", {}) | {key: figures | {"commit": commit()} for key, figures in runs.items()}
    name = max(measured, key=lambda key: measured[key]["mfu"])
    fastest = measured[name]
    write(
        NAME,
        command=command_line(),
        value=round(fastest["tflops"], 2),
        unit="TFLOP/s of the model",
        against=round(fastest["matmul_tflops"], 2),
        ratio=round(fastest["mfu"], 4),
        repetitions={key: figures["step_seconds"] for key, figures in measured.items()},
        log=say.path,
        what="Operations of training (see flops) per second, against those of 8192³ bf16 matrix products on the same "
        "card; recomputed activations are not counted.",
        flops="6 · parameters · tokens + 6 · tokens² · width · layers (causal) + vision tower (2 · or 6 · parameters · "
        "patches + attention) + 6 · vocabulary · width · scored tokens",
        fastest=name,
        configurations=measured,
        failed={key: why for key, why in (before.get("failed", {}) | failed).items() if key not in runs},
    )


if __name__ == "__main__":
    main()
