"""GRPO with a three-grounder reward on the tiny planner: optimizer steps per second, against plain TRL.

Ours is `train_grpo`, as the sandbox runs it. Plain is TRL's GRPOTrainer with the reward written the obvious way: a function
with one call of `generate` per completion and grounder. The same prompts, seed, optimizer and number
of steps; the first rewards of both are asserted to be the same. Runs take turns, on one thread; loading and the first step
are not counted.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PrinterCallback, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from benchmarks import baseline, tiny
from benchmarks.plain import PlainGrounder, PlainReward
from coepg_dagster.experiment.training import Grpo
from coepg_dagster.inference.processing import vision_token_ids
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.training.common import load_for_training
from coepg_dagster.training.examples import grpo_prompts

NAME = "grpo_vs_trl"
REPETITIONS, SEED = 3, 11
CONFIG = Grpo(
    prompts_per_step=8,
    group_size=8,
    micro_batch_size=64,
    max_steps=4,
    learning_rate=1e-4,
    kl_beta=0.04,
    max_plan_tokens=tiny.MAX_PLAN_TOKENS,
)


class Clock:
    """When each optimizer step ended, and the mean reward that was logged for it."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.rewards: list[float] = []

    def __call__(self, done: int, of: int, figures: Any) -> None:
        if "reward" in figures:
            self.times.append(time.perf_counter())
            self.rewards.append(float(figures["reward"]))

    @property
    def steps_per_second(self) -> float:
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


class Ticks(TrainerCallback):  # type: ignore[misc]
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self._clock(state.global_step, state.max_steps, logs or {})


def ours(steps: pa.Table) -> Clock:
    clock = Clock()
    tiny.train(CONFIG, steps, SEED, clock)
    return clock


def plain(steps: pa.Table) -> Clock:
    """TRL alone."""
    clock = Clock()
    grounders = {name: PlainGrounder(path, tiny.MAX_POINT_TOKENS) for name, path in tiny.GROUNDERS.items()}
    reward = PlainReward(grounders, tiny.PRIORS, steps)
    train_plain(tiny.PLANNER, steps, reward, CONFIG, Ticks(clock), device="cpu")
    return clock


def train_plain(
    planner: str, steps: pa.Table, reward: Any, config: Grpo, callback: TrainerCallback, *, device: str
) -> None:
    """TRL's GRPOTrainer with our settings. Vision tokens are suppressed in its completions, since it fails on them."""
    set_seed(SEED)
    model, processor = load_for_training(planner, device, "float32", config)
    screens = Screens(steps, TransformersEngine.of(model, processor, batch_size=1).resize)
    prompts = grpo_prompts(steps["step_id"].to_pylist(), steps, screens, "compact")
    out = Path(tempfile.mkdtemp(prefix="coepg-bench-"))
    rollouts, on_gpu = config.prompts_per_step * config.group_size, device != "cpu"
    trainer = GRPOTrainer(
        model=model,
        processing_class=processor,
        reward_funcs=reward,
        train_dataset=prompts,
        callbacks=[callback],
        args=GRPOConfig(
            output_dir=str(out),
            num_train_epochs=1,
            max_steps=config.max_steps,
            num_generations=config.group_size,
            per_device_train_batch_size=config.micro_batch_size,
            gradient_accumulation_steps=rollouts // config.micro_batch_size,
            max_completion_length=config.max_plan_tokens,
            temperature=config.temperature,
            top_p=1.0,
            top_k=0,
            learning_rate=config.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=0.03,
            beta=config.kl_beta,
            epsilon=config.clip_epsilon,
            loss_type="grpo",
            scale_rewards="group",
            use_bias_correction_kl=False,
            generation_kwargs={"suppress_tokens": vision_token_ids(processor.tokenizer)},
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=SEED,
            data_seed=SEED,
            use_cpu=not on_gpu,
            bf16=on_gpu,
            gradient_checkpointing=on_gpu,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train()
    finally:
        shutil.rmtree(out)


def conclude(
    name: str, log: baseline.Log, rates: Mapping[str, Sequence[float]], against_what: str, **more: Any
) -> None:
    """Writes the baseline of optimizer steps per second: the medians of ours, first in `rates`, and of the other."""
    value, against = (baseline.median(values) for values in rates.values())
    log(f"{value:.3f} against {against:.3f} optimizer steps/s: {value / against:.1f} times")
    baseline.write(
        name,
        command=baseline.command_line(),
        value=value,
        unit="optimizer steps/s",
        against=against,
        ratio=value / against,
        repetitions={"steps/s": rates},
        device=baseline.cpu_name(),
        against_what=against_what,
        threads=1,
        rollouts_per_step=CONFIG.prompts_per_step * CONFIG.group_size,
        grounders=list(tiny.GROUNDERS),
        **more,
    )


def main() -> None:
    tiny.one_thread()
    log = baseline.Log(NAME)
    steps = tiny.train_steps(CONFIG.prompts_per_step * (CONFIG.max_steps or 1))
    rates: dict[str, list[float]] = {"ours": [], "plain TRL": []}
    for repetition in range(REPETITIONS):
        fast, slow = ours(steps), plain(steps)
        # groups without spread are rounded to 1/1024 in ours
        if abs(fast.rewards[0] - slow.rewards[0]) > 2e-3:
            raise AssertionError(f"rewards differ from the first step on: {fast.rewards[0]}, {slow.rewards[0]}")
        rates["ours"].append(fast.steps_per_second)
        rates["plain TRL"].append(slow.steps_per_second)
        log(json.dumps({"repetition": repetition} | {name: round(r[-1], 4) for name, r in rates.items()}))
        log(f"  mean rewards: ours {fast.rewards}, plain {slow.rewards}")
    conclude(NAME, log, rates, "TRL's GRPOTrainer with one call of transformers' generate per completion and grounder")


if __name__ == "__main__":
    main()
