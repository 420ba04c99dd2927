"""Whether a run is large enough to learn, and whether it learnt: warnings before and after it, with settings to change.

Works on numbers alone, without any model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from coepg_dagster.evaluation.change import Change, change_text, rises
from coepg_dagster.experiment.training import MIN_LR_RATE, Grpo, PolicyTraining

FEW_ROLLOUTS: Final = 10_000
"""On the sandbox, fewer move the planner by chance only: the signal's share of the gradient is a few per cent."""
FEW_PROMPTS: Final = 1 / 3
"""Of the steps that D_{k-1} covers."""
MANY_SPREADLESS: Final = 0.5
"""Share of groups without spread: what they cost teaches nothing."""


@dataclass(frozen=True)
class Exposure:
    """How much a GRPO run samples, and how far it may move the policy."""

    steps: int  # of the optimizer
    prompts: int  # different ones that are sampled from
    of: int  # prompts in total
    rollouts: int
    rates: float  # the sum of the learning rates over the steps

    def text(self) -> str:
        return (
            f"GRPO: {self.steps:,} steps see {self.prompts:,} of {self.of:,} prompts in {self.rollouts:,} rollouts; the learning "
            f"rates add up to {self.rates:.2g}"
        )

    def warning(self, config: Grpo) -> str | None:
        """Why the run is likely to learn nothing, and what to change; None: it is large enough."""
        few = []
        if self.rollouts < FEW_ROLLOUTS:
            few.append(f"fewer than {FEW_ROLLOUTS:,} rollouts")
        if self.prompts < FEW_PROMPTS * self.of:
            few.append("fewer than a third of the prompts")
        if not few:
            return None
        return f"GRPO is likely to learn nothing from {' and '.join(few)}: raise {_size(config.model_dump())}"


def exposure(config: PolicyTraining, prompts: int) -> Exposure:
    """The exposure of a run over `prompts` prompts, by its epochs or `max_steps`. Prompts that fill no step are dropped."""
    epoch = prompts // config.prompts_per_step
    steps = (config.max_steps or epoch * config.num_train_epochs * config.num_iterations) if epoch else 0
    sampled = -(-steps // config.num_iterations)  # steps that begin with new rollouts
    at_once = config.prompts_per_step
    rates = sum(config.learning_rate * share for share in schedule(config, steps))
    return Exposure(steps, min(sampled, epoch) * at_once, prompts, sampled * at_once * config.group_size, rates)


def schedule(config: PolicyTraining, steps: int) -> list[float]:
    """The learning rate of each optimizer step as a share of its peak, shape (steps,): linear warm-up, then the schedule."""
    rising = math.ceil(config.warmup_ratio * steps)

    def after(done: float) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        match config.lr_scheduler_type:
            case "cosine":
                return cosine
            case "cosine_with_min_lr":
                return MIN_LR_RATE + (1 - MIN_LR_RATE) * cosine
            case "linear":
                return 1 - done
            case _:
                return 1.0

    return [
        step / rising if step < rising else after((step - rising) / max(1, steps - rising)) for step in range(steps)
    ]


def _size(settings: Mapping[str, Any]) -> str:
    """The settings that make a run larger, with their present values."""
    return ", ".join(
        f"grpo.{name} ({_now(settings[name])})" for name in ("max_steps", "prompts_per_step", "group_size")
    )


def _now(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def grpo_warning(figures: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    """The warning if the greedy answers of a GRPO run did not get better on training steps; None if they did, or without probe.

    `settings` are those of `grpo` that were used.
    """
    probe = figures.get("probe") or {}
    change: Change | None = probe.get("train")
    if change is None or rises(change):
        return None
    steps = figures["optimizer_steps"]
    batches = -(-steps // settings["num_iterations"])  # as in `exposure`
    prompts = batches * settings["prompts_per_step"]
    rollouts = prompts * settings["group_size"]
    seen = f"{rollouts:,} rollouts of {min(prompts, figures['prompts']):,} of {figures['prompts']:,} prompts"
    sentences = [
        f"GRPO did not learn: on {probe['steps']['train']} training steps success by {probe['judge']} went "
        f"{change_text(change)}, not above 0, in {seen}"
    ]
    sampled: Change | None = (probe.get("sampled") or {}).get("train")
    if sampled is not None and rises(sampled):
        sentences.append(
            f"Sampled answers did get better ({change_text(sampled)}); greedy ones follow later: give it more steps"
        )
    changes = [f"more rollouts: {_size(settings)}"]
    if rollouts >= FEW_ROLLOUTS:
        changes = [f"a longer run: {_size(settings)}"]
    worse = change["ci95"] is not None and change["ci95"][1] < 0
    changes.append(f"{'a lower' if worse else 'another'} grpo.learning_rate ({_now(settings['learning_rate'])})")
    spreadless = figures.get("frac_reward_zero_std")
    if spreadless is not None and spreadless > MANY_SPREADLESS:
        changes.append(
            f"more spread, which {100 * spreadless:.0f} % of the groups have none of: a higher grpo.temperature "
            f"({_now(settings['temperature'])}), larger groups"
        )
    if settings["kl_beta"]:
        changes.append(f"a lower grpo.kl_beta ({_now(settings['kl_beta'])})")
    if change["difference"] > 0:
        changes.append(f"more probed steps, to measure a small gain: grpo.probe_steps ({settings['probe_steps']})")
    return ". ".join([*sentences, f"Try {'; '.join(changes)}"])


def sft_warning(figures: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    """The warning if a model is not better than its base on validation after SFT; None if it is, or without probe."""
    probe = figures.get("probe") or {}
    change: Change | None = probe.get("validation")
    if change is None or rises(change):
        return None
    worse = change["ci95"] is not None and change["ci95"][1] < 0
    train: Change | None = probe.get("train")
    beside = f"; on {probe['steps']['train']} training steps {change_text(train)}" if train else ""
    what = "made it worse than its base" if worse else "did not make it better than its base"
    length = "max_steps" if settings["max_steps"] else "epochs"
    changes = f"sft.{length} ({_now(settings[length])}), sft.learning_rate ({_now(settings['learning_rate'])})"
    return (
        f"SFT {what}: {probe['steps']['validation']} validation steps, judged by {probe['judge']}, went {change_text(change)}"
        f"{beside}. Change {changes}, or look at data_quality of D_(k-1)"
        + ("" if worse else f"; a higher sft.probe_steps ({settings['probe_steps']}) measures smaller gains")
    )
