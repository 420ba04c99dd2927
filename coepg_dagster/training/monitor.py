"""The training monitor: stops training that goes wrong, or warns, and says which setting to change.

It reads the trainer's log, which also has the earlier part of a continued run. A loss that is not a number ends training at
once, and nothing is saved. Every other anomaly ends it with a checkpoint, from which the same step continues if it is run
again with `on_anomaly: warn`.
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
"""Share of groups without spread above which the rest moves the policy by chance only."""
KL: Final = 1.0
"""KL(π‖π_k) per token. Healthy runs stay below 0.1; at 1 the policy writes text that π_k would not write."""
REWARD_LEFT: Final = 0.5
"""Smallest allowed share of the best window's reward; both count from the lowest reward of a step, if that is below 0."""
LOSS_OVER_START: Final = 1.5
"""Largest allowed ratio of SFT's loss to that of its first window."""
LOSS_RISE: Final = 0.5
"""… if it also grew by so many nats a token: a model that trains on from an earlier iteration begins near 0."""
MEMORY_WINDOW: Final = 20
MEMORY_WINDOWS: Final = 4
"""Memory counts as growing if it rose from each of so many windows to the next; caches fill up and then stop."""
GB: Final = 1e9

Log = Sequence[Mapping[str, float]]


class TrainingMonitor(TrainerCallback):  # type: ignore[misc]
    """Checks every log line of a trainer, and ends training at an anomaly, or warns.

    Args:
        part: the section of the experiment file that has the settings (`launch.section_of`).
        ordered: the prompts of GRPO are asked in an order, such as from easy to hard, so that their reward says nothing about
            the policy.
    """

    def __init__(self, on_anomaly: OnAnomaly, part: str, *, ordered: bool = False) -> None:
        self._ends, self._part, self._ordered = on_anomaly == "stop", part, ordered
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
                f"{at}: {no_number[0]} is {logs[no_number[0]]}: training diverged, and nothing is saved. Lower "
                f"`{self._part}.learning_rate` (now {args.learning_rate:g}); if it is low already, look for rows that are broken"
            )
        log = [entry for entry in state.log_history if "loss" in entry]
        left = state.max_steps - state.global_step
        anomaly = find_anomaly(log, self._part, ordered=self._ordered) or self._memory_anomaly(left, args.device)
        if not largest(int(anomaly is not None), args.device) or left <= 0:
            return control
        anomaly = anomaly or "another process of this training has an anomaly: see its output"
        kind = anomaly.partition(":")[0]
        if self._ends:
            self._why = f"{at}: {anomaly}"
            control.should_save = control.should_training_stop = True
        elif kind not in self._warned:
            self._warned[kind] = f"{at}: {anomaly}"
            print(f"warning: {self._warned[kind]}", flush=True)
        return control

    def end(self) -> None:
        """To be called after training. Raises Ended if the monitor stopped it."""
        if self._why is not None:
            raise Ended(
                f"{self._why}. The training so far is saved: with `on_anomaly: warn` of the resource the same step continues "
                "from there; with other settings it starts again"
            )

    def _memory_anomaly(self, left: int, device: torch.device) -> str | None:
        memory: dict[str, tuple[float, float]] = {"host": (used_memory(), free_memory())}
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
                        f"lower `{self._part}.micro_batch_size` if it comes back"
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
        """Adds the bytes in use at this step. Returns the smallest growth of the floor between the last windows, in bytes a step.

        The floor is the minimum of a window. 0 if it once did not rise, or there are not enough windows yet.
        """
        self._window.append(used)
        if len(self._window) == MEMORY_WINDOW:
            self._floors = [*self._floors, min(self._window)][-MEMORY_WINDOWS:]
            self._window = []
        if len(self._floors) < MEMORY_WINDOWS:
            return 0.0
        rises = [after - before for before, after in zip(self._floors, self._floors[1:], strict=False)]
        return max(0.0, min(rises)) / MEMORY_WINDOW


def find_anomaly(log: Log, part: str, *, ordered: bool = False) -> str | None:
    """The anomaly in the log lines so far, and what to change; None: there is none, or the log is too short.

    `part`, `ordered`: see `TrainingMonitor`; neither a low reward nor groups without spread are anomalies then.
    """
    model = "ϕ_k" if part == "grounder_rl" else "π_k"
    # GRPO: only the first update by the same rollouts logs a reward
    rewarded = [entry for entry in log if "reward" in entry]
    log = rewarded or log
    if len(log) < WINDOW:
        return None
    if not rewarded:
        return _diverging(log)
    reward = _mean(log[-WINDOW:], "reward")
    flat = _mean(log[-WINDOW:], "frac_reward_zero_std")
    if flat > SPREADLESS and not ordered:
        if reward < 1 - SPREADLESS:
            remedy = f"{model} hardly ever gets a reward: train it longer (`sft.epochs`), or raise `{part}.group_size`"
        elif reward > SPREADLESS:
            remedy = (
                f"{model} can do these prompts already: raise `{part}.temperature`, or leave GRPO out "
                f"(`{part}.enabled: false`)"
            )
        else:
            remedy = f"raise `{part}.temperature`, so that the rollouts of a prompt differ, or `{part}.group_size`"
        return (
            f"groups without spread: {100 * flat:.0f} % over {WINDOW} steps, at a mean reward of {reward:.2f}. {remedy}"
        )
    if "kl" in log[-1] and _mean(log[-WINDOW:], "kl") > KL:
        return (
            f"KL runs away: {_mean(log[-WINDOW:], 'kl'):.2f} per token over {WINDOW} steps, and a reward of {reward:.2f}. Lower "
            f"`{part}.learning_rate`, or raise `{part}.kl_beta`"
        )
    best = max(_mean(log[i : i + WINDOW], "reward") for i in range(len(log) - WINDOW + 1))
    lowest = min(0.0, *(entry["reward"] for entry in log))  # where rewards are negative, a share of them says nothing
    if best > 0 and reward - lowest < REWARD_LEFT * (best - lowest) and not ordered:
        return (
            f"reward collapses: {reward:.2f} over {WINDOW} steps; its best was {best:.2f}. Lower `{part}.learning_rate`, or "
            f"raise `{part}.kl_beta`"
        )
    return None


def _diverging(log: Log) -> str | None:
    first, last = _mean(log[:WINDOW], "loss"), _mean(log[-WINDOW:], "loss")
    if last <= LOSS_OVER_START * first or last - first <= LOSS_RISE:
        return None
    return (
        f"loss grows: {last:.3g} over {WINDOW} steps, it began at {first:.3g}. Lower `sft.learning_rate`, or raise "
        "`sft.warmup_ratio`"
    )


def _mean(log: Log, key: str) -> float:
    return fmean(entry[key] for entry in log)


def used_memory() -> float:
    """Bytes that this process uses alone; pages of mapped files, which the kernel can take back, are not counted."""
    memory = psutil.Process().memory_info()
    return float(memory.rss - getattr(memory, "shared", 0))


def free_memory() -> float:
    """Bytes that are free on this machine, or in this container if that is less."""
    free = float(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    limit, stat = group / "memory.max", group / "memory.stat"
    if limit.exists() and stat.exists() and limit.read_text().strip() != "max":
        held = dict(line.split() for line in stat.read_text().splitlines())
        free = min(free, float(limit.read_text()) - float(held["anon"]) - float(held["kernel"]))
    return free
