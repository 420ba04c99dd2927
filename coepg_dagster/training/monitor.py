"""Training that goes wrong is ended, or warned of: the run says what it saw and which setting to change.

What is looked at is the trainer's own log, so that a continued run knows what was before it. A loss that is no number ends
training at once, and nothing of it is saved. Everything else ends it with a checkpoint: after a change of mind
(`on_anomaly: warn`) the same step goes on from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import psutil
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coepg_dagster.jobs import OnAnomaly
from coepg_dagster.progress import Ended
from coepg_dagster.training.checkpoints import largest

WINDOW: Final = 10
"""Steps over which a log is averaged before it is judged."""
SPREADLESS: Final = 0.9
"""Share of groups without spread: what is left moves the policy by chance."""
KL: Final = 1.0
"""KL(π‖π_k) per token. Healthy runs stay below 0.1; at 1 the policy writes what π_k would not."""
REWARD_LEFT: Final = 0.5
"""Of the best window's reward."""
LOSS_OVER_START: Final = 1.5
"""SFT's loss, against that of its first window."""
MEMORY_WINDOW: Final = 20
MEMORY_WINDOWS: Final = 4
"""MemoryGrowth must have grown from each of so many windows to the next: caches fill up and stop."""
GB: Final = 1e9

Log = Sequence[Mapping[str, float]]


class TrainingMonitor(TrainerCallback):  # type: ignore[misc]
    """Looks at every log line of a trainer, and ends training where something is wrong, or warns."""

    def __init__(self, on_anomaly: OnAnomaly) -> None:
        self._ends = on_anomaly == "stop"
        self._why: str | None = None
        self._memory = {"host": MemoryGrowth(), "GPU": MemoryGrowth()}
        self._warned: dict[str, str] = {}

    @property
    def warnings(self) -> list[str]:
        """The first warning of each kind."""
        return list(self._warned.values())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> TrainerControl:
        if not logs or "loss" not in logs:  # the summary at the end
            return control
        at = f"step {state.global_step} of {state.max_steps}"
        no_number = [name for name in ("loss", "grad_norm", "kl") if not math.isfinite(logs.get(name) or 0.0)]
        if no_number:
            raise Ended(
                f"{at}: {no_number[0]} is {logs[no_number[0]]}: training diverged, and what it made is not saved. Lower "
                f"`learning_rate` (now {args.learning_rate:g}); if it is low already, look for rows that are broken"
            )
        log = [entry for entry in state.log_history if "loss" in entry]
        found = find_anomaly(log) or self._memory_anomaly(state.max_steps - state.global_step, args.device)
        if not largest(int(found is not None), args.device) or state.global_step >= state.max_steps:
            return control
        found = found or "another process of this training has trouble: see its output"
        kind = found.partition(":")[0]
        if self._ends:
            self._why = f"{at}: {found}"
            control.should_save = control.should_training_stop = True
        elif kind not in self._warned:
            self._warned[kind] = f"{at}: {found}"
            print(f"warning: {self._warned[kind]}", flush=True)
        return control

    def end(self) -> None:
        """Called after training. Raises Ended where it was ended here."""
        if self._why is not None:
            raise Ended(
                f"{self._why}. What was trained so far is saved: with `on_anomaly: warn` of the resource the same step goes on "
                "from there; with other settings it starts anew"
            )

    def _memory_anomaly(self, left: int, device: torch.device) -> str | None:
        memory: dict[str, tuple[float, float]] = {"host": (own_memory(), free_memory())}
        if device.type == "cuda":
            spare, _ = torch.cuda.mem_get_info(device)
            allocated = torch.cuda.memory_allocated(device)
            memory["GPU"] = allocated, spare + torch.cuda.memory_reserved(device) - allocated
        for where, (used, free) in memory.items():
            per_step = self._memory[where].growth(used)
            if per_step * left > free:
                return (
                    f"{where} memory creeps up: it grew by {per_step / GB * 1000:.0f} MB a step over "
                    f"{MEMORY_WINDOW * MEMORY_WINDOWS} steps, to {used / GB:.1f} GB; the {free / GB:.1f} GB that are free are "
                    f"used up in {int(free / per_step)} of the {left} steps to come. Running the step again starts with fresh "
                    f"memory from the last checkpoint; "
                    + (
                        "lower `max_plan_tokens` or `micro_batch_size` if it comes back"
                        if where == "GPU"
                        else "choose `save_every` below that number of steps if it comes back"
                    )
                )
        return None


class MemoryGrowth:
    """The memory of a process, step by step."""

    def __init__(self) -> None:
        self._floors: list[float] = []
        self._window: list[float] = []

    def growth(self, used: float) -> float:
        """Notes what is used now; bytes a step by which the floor rose from each of the last windows to the next, at least.

        0 where it once did not rise, or is not known yet.
        """
        self._window.append(used)
        if len(self._window) == MEMORY_WINDOW:
            self._floors = [*self._floors, min(self._window)][-MEMORY_WINDOWS:]
            self._window = []
        if len(self._floors) < MEMORY_WINDOWS:
            return 0.0
        rises = [after - before for before, after in zip(self._floors, self._floors[1:], strict=False)]
        return max(0.0, min(rises)) / MEMORY_WINDOW


def find_anomaly(log: Log) -> str | None:
    """What is wrong with training by its log lines so far, and what to change; None: nothing, or too early to say."""
    rewarded = [entry for entry in log if "reward" in entry]  # GRPO; of updates by the same rollouts, the first
    log = rewarded or log
    if len(log) < WINDOW:
        return None
    if not rewarded:
        return _diverging(log)
    reward = _mean(log[-WINDOW:], "reward")
    flat = _mean(log[-WINDOW:], "frac_reward_zero_std")
    if flat > SPREADLESS:
        if reward < 1 - SPREADLESS:
            remedy = "π_k hardly ever gets a reward: train it longer (`sft.epochs`), or raise `grpo.group_size`"
        elif reward > SPREADLESS:
            remedy = (
                "π_k can do these prompts already: raise `grpo.temperature`, or leave GRPO out (`grpo.enabled: false`)"
            )
        else:
            remedy = "raise `grpo.temperature`, so that the rollouts of a prompt differ, or `grpo.group_size`"
        return (
            f"groups without spread: {100 * flat:.0f} % over {WINDOW} steps, at a mean reward of {reward:.2f}. {remedy}"
        )
    if "kl" in log[-1] and _mean(log[-WINDOW:], "kl") > KL:
        return (
            f"KL runs away: {_mean(log[-WINDOW:], 'kl'):.2f} per token over {WINDOW} steps, and a reward of {reward:.2f}. Lower "
            "`grpo.learning_rate`, or raise `grpo.kl_beta`"
        )
    best = max(_mean(log[i : i + WINDOW], "reward") for i in range(len(log) - WINDOW + 1))
    if reward < REWARD_LEFT * best:
        return (
            f"reward collapses: {reward:.2f} over {WINDOW} steps, it was {best:.2f}. Lower `grpo.learning_rate`, or raise "
            "`grpo.kl_beta`"
        )
    return None


def _diverging(log: Log) -> str | None:
    first, last = _mean(log[:WINDOW], "loss"), _mean(log[-WINDOW:], "loss")
    if last <= LOSS_OVER_START * first:
        return None
    return (
        f"loss grows: {last:.3g} over {WINDOW} steps, it began at {first:.3g}. Lower `sft.learning_rate`, or raise "
        "`sft.warmup_ratio`"
    )


def _mean(log: Log, key: str) -> float:
    return fmean(entry[key] for entry in log)


def own_memory() -> float:
    """Bytes that this process alone holds; pages of mapped files, which are given back when needed, are not counted."""
    memory = psutil.Process().memory_info()
    return float(memory.rss - getattr(memory, "shared", 0))


def free_memory() -> float:
    """Bytes that are free on this machine, or in this container where that is less."""
    free = float(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    limit, stat = group / "memory.max", group / "memory.stat"
    if limit.exists() and stat.exists() and limit.read_text().strip() != "max":
        held = dict(line.split() for line in stat.read_text().splitlines())
        free = min(free, float(limit.read_text()) - float(held["anon"]) - float(held["kernel"]))
    return free
