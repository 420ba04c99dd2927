"""One measured SFT run, through coepg_dagster.training.sft; one process per GPU, with any strategy. Started by other benchmarks.

Weights are random and made on the GPU; nothing is saved. Examples, screenshots, trainer and optimizer are those of the loop.
Writes a JSON file with losses, seconds, operations and memory, anew after each step, so that a run that is cut short leaves a
partial result.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from accelerate import PartialState
from transformers import TrainerCallback
from trl import SFTTrainer

from benchmarks import sized
from coepg_dagster.artifacts import whole
from coepg_dagster.experiment.training import Sft
from coepg_dagster.inference.architecture import Architecture, flops
from coepg_dagster.jobs import Placement, SftJob
from coepg_dagster.processes import end_with_parent
from coepg_dagster.training import common, sft
from coepg_dagster.training.launch import is_main, is_rank, see_one_gpu


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sized.SIZES, default="3B")
    parser.add_argument("--strategy", choices=("ddp", "zero2", "zero3", "fsdp"), default="ddp", help="as a placement's")
    parser.add_argument("--role", choices=("planner", "grounder"), default="planner")
    parser.add_argument("--micro", type=int, default=4, help="rows per GPU and forward pass")
    parser.add_argument("--accumulation", type=int, default=8, help="forward passes per optimizer step")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps at most")
    parser.add_argument("--warmup", type=int, default=1, help="steps that are not measured")
    parser.add_argument("--seconds", type=float, default=0, help="ends sooner; 0: all steps (one process only)")
    parser.add_argument("--recompute", type=float, default=1.0, help="as in an experiment file")
    parser.add_argument("--kernels", choices=("eager", "compiled", "liger"), default="eager")
    parser.add_argument("--attention", choices=("fast", "sdpa"), default="fast", help="sdpa: as transformers does it")
    parser.add_argument("--freeze-vision", action="store_true")
    parser.add_argument("--profile", action="store_true", help="then one more step: what the GPU did in a forward pass")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    return parser.parse_args()


class Clock(TrainerCallback):
    """Seconds of each optimizer step, data loading included, and its loss; calls `keep` after each measured one."""

    def __init__(self, options: argparse.Namespace, keep: Callable[[], None]) -> None:
        self.options, self.keep = options, keep
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.memory: list[float] = []
        self.last = 0.0
        self.over = self.profiled = False

    def now(self) -> float:
        if self.options.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.last = self.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.over:
            control.should_training_stop = True
            return
        now = self.now()
        self.seconds.append(now - self.last)
        self.last = now
        measured = sum(self.seconds[self.options.warmup :])
        if len(self.seconds) >= self.options.steps or (self.options.seconds and measured >= self.options.seconds):
            self.over = True
            control.should_training_stop = not self.options.profile

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" not in (logs or {}) or len(self.losses) == len(self.seconds):
            return
        self.losses.append(logs["loss"])
        self.memory = peaks(self.options.device)
        if is_main():
            each = ", ".join(f"{gb:.1f}" for gb in self.memory)
            print(
                f"step {state.global_step}: {self.seconds[-1]:.2f} s, loss {self.losses[-1]:.4f}, {each} GB at most",
                flush=True,
            )
            if len(self.seconds) > self.options.warmup:
                self.keep()
        self.last = self.now()


def peak() -> float:
    """Peak GPU memory of tensors, in GB."""
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def peaks(device: str) -> list[float]:
    """`peak` of each process."""
    if not torch.distributed.is_initialized():
        return [peak()]
    mine = torch.tensor([peak()], device=device)
    each = [torch.zeros_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(each, mine)
    return [gb.item() for gb in each]


def profiled(work: Callable[[], Any]) -> Any:
    """Runs `work` and prints how the GPU's time was spent; returns its result."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu) as trace:
        started = time.perf_counter()
        result = work()
        if gpu:
            torch.cuda.synchronize()
        wall = (time.perf_counter() - started) * 1000
    kind = DeviceType.CUDA if gpu else DeviceType.CPU
    events = [event for event in trace.key_averages() if event.device_type == kind]
    times = {event.key: (event.self_device_time_total if gpu else event.self_cpu_time_total) / 1000 for event in events}
    groups: dict[str, float] = {}
    for name, milliseconds in times.items():
        lower = name.lower()
        group = next((g for g, words in KERNELS.items() if any(word in lower for word in words)), "other kernels")
        groups[group] = groups.get(group, 0.0) + milliseconds
    busy = sum(times.values())
    print(
        f"profile: one forward and backward pass took {wall:.1f} ms, kernels {busy:.1f} ms ({100 * busy / wall:.0f} %)"
    )
    for group, milliseconds in sorted(groups.items(), key=lambda item: -item[1]):
        print(f"profile: {milliseconds:8.1f} ms  {group}")
    calls = {event.key: event.count for event in events}
    for name, milliseconds in sorted(times.items(), key=lambda item: -item[1])[:18]:
        print(f"profile: {milliseconds:8.1f} ms  {calls[name]:5} × {name[:90]}", flush=True)
    return result


KERNELS: Final = {
    "copies": ("memcpy", "memset"),
    "attention": ("flash", "fmha", "attn"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "aten::mm", "aten::addmm", "cublas"),
    "compiled (norms, gates, casts)": ("triton",),
    "element by element": ("elementwise", "reduce", "index", "cat", "copy", "scatter", "gather"),
}
"""Group → words in kernel names; the first group that matches counts."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    began = time.perf_counter()

    def say(what: str) -> None:
        print(f"rank {rank}: {what} after {time.perf_counter() - began:.0f} s", flush=True)

    on_gpu = options.device != "cpu"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1:  # first, so that a machine whose processes cannot communicate fails here
        PartialState(cpu=not on_gpu)
        met = torch.ones(1, device=options.device)
        torch.distributed.all_reduce(met)
        say(f"{met.item():.0f} processes met")
    rate = sized.matmul_rate(options.device)
    folder = Path(tempfile.mkdtemp(prefix="sft-run-"))
    processor = sized.write_processor(folder / "processor", options.size)
    batches: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # real tokens, scored tokens of each row; padded length

    def keep() -> None:
        with whole(options.out) as draft:
            draft.write_text(json.dumps(result(options, clock, batches, rate)))

    clock = Clock(options, keep)

    def model_of(init: str, device: str, *_: Any) -> tuple[Any, Any]:
        model = sized.make_model(options.size, options.device, torch.float32).to(device)
        for weight in model.parameters():  # as published ones are; strategies that begin with bf16 need the same start
            weight.data = weight.data.bfloat16().float()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        say(f"model made, on {device}")
        if options.freeze_vision:
            model.model.visual.requires_grad_(False)
        if options.kernels == "liger":
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False)
        return model.train(), processor

    begin, step = SFTTrainer.__init__, SFTTrainer.training_step

    def timed_init(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.add_callback(clock)
        say("trainer made")

    def timed_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = inputs["attention_mask"].sum(1), (inputs["labels"] != -100).sum(1)
        batches.append((*rows, inputs["input_ids"].shape[1]))
        if len(batches) == 1:
            say("first batch")
        # the second pass of a step: gradients exist already, as in most passes
        if clock.over and not clock.profiled and len(batches) % options.accumulation == 2 % options.accumulation:
            clock.profiled = True
            return profiled(lambda: step(self, model, inputs, *args, **kwargs))
        return step(self, model, inputs, *args, **kwargs)

    batch = options.micro * options.accumulation * world
    rows = min(2048 if on_gpu else 64, (options.steps + options.profile) * batch)
    steps, dataset = sized.tables(options.size, rows, screens=128 if on_gpu else 8)
    say("rows made")
    config = Sft(
        epochs=100,
        probe_steps=0,
        max_steps=options.steps + options.profile,
        learning_rate=5e-6,  # losses of random weights fall within a few steps
        batch_size=batch,
        micro_batch_size=options.micro,
        freeze_vision=options.freeze_vision,
        recompute=options.recompute,
        compile=options.kernels == "compiled",
    )
    changed: dict[str, Any] = {"load_for_training": model_of, "save_trained": lambda *_, **__: {}}
    if options.attention == "sdpa":
        changed |= {"expect_right_padding": lambda model: None}
    with (
        patch.multiple(sft, **changed),
        patch.object(common, "fast_vision", lambda *_: False) if options.attention == "sdpa" else nullcontext(),
        patch.multiple(SFTTrainer, __init__=timed_init, training_step=timed_step),
    ):
        job = SftJob(
            **sized.inputs(folder, steps, dataset),
            role=options.role,
            init=str(folder / "processor"),
            models=sized.models_of("random"),
            config=config,
            max_plan_tokens=0,
            max_point_tokens=0,
            batch_size=1,
            device=options.device,
            placement=Placement(processes=world, strategy=options.strategy),
        )
        sft.train_sft(job, lambda done, of, figures: None)
    return result(options, clock, batches, rate)


def result(
    options: argparse.Namespace, clock: Clock, batches: list[tuple[torch.Tensor, torch.Tensor, int]], rate: float
) -> dict[str, Any]:
    """The figures of the measured steps of one process."""
    model = sized.architecture_of(options.size)
    image = sized.SCREENS[options.size]
    skipped = options.warmup * options.accumulation
    seconds = clock.seconds
    measured, times = batches[skipped : len(seconds) * options.accumulation], seconds[options.warmup :]
    lengths = [int(n) for tokens, _, _ in measured for n in tokens]
    scored = [int(n) for _, labels, _ in measured for n in labels]
    padded = sum(length * len(tokens) for tokens, _, length in measured)
    parts = operations(model, image, lengths, scored, freeze_vision=options.freeze_vision)
    total = sum(parts.values())
    return {
        "configuration": {
            key: value
            for key, value in vars(options).items()
            if key not in ("out", "device", "seconds", "steps", "profile")
        },
        "processes": len(clock.memory),
        "losses": clock.losses,
        "step_seconds": times,
        "warmup_seconds": seconds[: options.warmup],
        "sequences": len(lengths),
        "sequences_per_second": len(lengths) / sum(times),
        "tokens_per_second": sum(lengths) / sum(times),
        "tokens_per_sequence": sum(lengths) / len(lengths),
        "scored_per_sequence": sum(scored) / len(scored),
        "image_tokens": model.image_tokens(*image),
        "padding": 1 - sum(lengths) / padded,
        "tflop_per_sequence": {name: value / len(lengths) / 1e12 for name, value in parts.items()},
        "tflops": total / sum(times) / 1e12,
        "matmul_tflops": rate / 1e12,
        "mfu": total / sum(times) / rate,
        "memory_gb": max(clock.memory),
        "memory_gb_each": clock.memory,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if torch.cuda.is_available() else 0.0,
        "host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def operations(
    model: Architecture, image: tuple[int, int], lengths: list[int], scored: list[int], *, freeze_vision: bool
) -> dict[str, float]:
    """Floating-point operations of training on rows of these lengths, by part."""
    visual = model.image_tokens(*image)
    rows = [
        flops(model, image=image, text=n - visual, scored=s, train=True, freeze_vision=freeze_vision)
        for n, s in zip(lengths, scored, strict=True)
    ]
    return {part: sum(getattr(row, part) for row in rows) for part in ("language", "attention", "head", "vision")}


def main() -> None:
    end_with_parent()  # torchrun starts each process in a new session, where it would outlive torchrun
    if not is_rank():
        see_one_gpu()
    options = arguments()
    figures = run(options)
    if is_main():
        options.out.write_text(json.dumps(figures))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
