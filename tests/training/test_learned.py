"""Warnings for a run that is too small to learn, and for one that did not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from coepg_dagster.evaluation.change import change_of
from coepg_dagster.experiment.training import MIN_LR_RATE, Grpo, Sft
from coepg_dagster.training.learned import exposure, grpo_warning, schedule, sft_warning

OLD = Grpo(prompts_per_step=8, group_size=8, micro_batch_size=64, max_steps=16, learning_rate=1e-5, kl_beta=0.04)


def change(better: int, worse: int, steps: int = 256) -> dict[str, Any]:
    """Of so many steps, in episodes of two, a fifth of which succeed before."""
    before = [float(i % 5 == 0) for i in range(steps)]
    after = list(before)
    rng = random.Random(better * 1000 + worse)
    for i in rng.sample([i for i in range(steps) if not before[i]], better):
        after[i] = 1.0
    for i in rng.sample([i for i in range(steps) if before[i]], worse):
        after[i] = 0.0
    result = change_of(before, after, [f"e{i // 2}" for i in range(steps)])
    assert result is not None
    return result


def figures(train: dict[str, Any] | None, sampled: dict[str, Any] | None = None, steps: int = 16) -> dict[str, Any]:
    probe = {
        "train": train,
        "validation": None,
        "sampled": {"train": sampled},
        "steps": {"train": 256, "validation": 0},
        "judge": "grounder_1",
    }
    return {"optimizer_steps": steps, "prompts": 1066, "frac_reward_zero_std": 0.6, "probe": probe}


@given(st.integers(0, 60), st.integers(0, 40))
def test_grpo_is_red_unless_the_whole_interval_is_above_0(better: int, worse: int) -> None:
    result = change(better, worse)
    assert (grpo_warning(figures(result), OLD.model_dump()) is None) == (result["ci95"][0] > 0)


@pytest.mark.parametrize("name, learned", [("1,024 rollouts at 1e-5", False), ("as shipped", True)])
def test_measured_runs_of_the_sandbox_are_red_where_too_small_and_green_as_shipped(name: str, learned: bool) -> None:
    """Before and after of whole runs, measured by benchmarks/grpo_curve.py on training steps that no model had seen."""
    curve = json.loads((Path(__file__).parents[2] / "benchmarks/baselines/grpo_curve.json").read_text())
    by_step = curve["repetitions"][name]["unused"]
    settings = curve["settings"][name]
    assert len(by_step["0"]) >= 2, "a run says nothing of other seeds"
    for measured in by_step[max(by_step, key=int)]:
        warning = grpo_warning(figures(measured, steps=settings["max_steps"]), settings)
        assert (warning is None) == learned, (measured, warning)


def test_a_run_that_learns_by_5_points_is_green_and_one_that_flips_answers_is_red() -> None:
    """A run of 1,024 rollouts at 1e-5 flips a few answers either way; one that learns gains more than it loses."""
    for few in (0, 1, 2, 3):
        assert grpo_warning(figures(change(few, few)), OLD.model_dump())
    for flips in range(20):
        result = change(flips + 16, flips)
        assert result["difference"] >= 5
        assert grpo_warning(figures(result), OLD.model_dump()) is None, (flips, result)


def test_the_warning_names_what_to_change_and_what_it_is_now() -> None:
    warning = grpo_warning(figures(change(2, 3), sampled=change(30, 3)), OLD.model_dump())
    assert warning is not None
    for words in (
        "on 256 training steps success by grounder_1 went",
        "1,024 rollouts of 128 of 1,066 prompts",
        "Sampled answers did get better",
        "grpo.max_steps (16)",
        "grpo.prompts_per_step (8)",
        "grpo.group_size (8)",
        "grpo.learning_rate (1e-05)",
        "60 % of the groups have none",
        "grpo.temperature (0.9)",
        "grpo.kl_beta (0.04)",
    ):
        assert words in warning, words
    settings = OLD.model_copy(update={"kl_beta": 0.0}).model_dump()
    fell = grpo_warning(figures(change(0, 30)), settings)
    assert fell is not None and "a lower grpo.learning_rate" in fell and "kl_beta" not in fell


@given(st.integers(1, 8), st.integers(1, 400))
def test_rollouts_are_counted_as_before_the_run(updates: int, steps: int) -> None:
    config = Grpo(prompts_per_step=8, group_size=8, micro_batch_size=8, num_iterations=updates, max_steps=steps)
    rollouts = exposure(config, 1066).rollouts
    warned = grpo_warning(figures(change(2, 2), steps=steps), config.model_dump())
    assert warned is not None and f" in {rollouts:,} rollouts of " in warned
    assert ("more rollouts: " in warned) == (rollouts < 10_000) != ("a longer run: " in warned)


def test_what_was_not_measured_gives_no_warning() -> None:
    assert grpo_warning({}, {}) is None and sft_warning({}, {}) is None
    assert grpo_warning(figures(None), OLD.model_dump()) is None


def test_sft_is_judged_on_validation() -> None:
    def warning(**changes: Any) -> str | None:
        probe = {**changes, "steps": {"train": 64, "validation": 64}, "judge": "verifier_a"}
        return sft_warning({"probe": probe}, Sft(epochs=1, learning_rate=1e-3).model_dump())

    assert warning(train=change(1, 9), validation=change(60, 2)) is None
    worse = warning(train=change(60, 0), validation=change(2, 40))
    assert worse is not None and "made it worse than its base" in worse and "sft.epochs (1)" in worse
    assert "judged by verifier_a" in worse and "sft.learning_rate (0.001)" in worse
    same = warning(train=None, validation=change(2, 2))
    assert same is not None and "did not make it better" in same and "sft.probe_steps (128)" in same
    probe = {"train": None, "validation": change(2, 2), "steps": {"validation": 64}, "judge": "verifier_a"}
    fixed = sft_warning({"probe": probe}, Sft(max_steps=200).model_dump())
    assert fixed is not None and "sft.max_steps (200)" in fixed and "epochs" not in fixed


@pytest.mark.parametrize("steps", [1, 2, 16, 40, 166])
@pytest.mark.parametrize("kind", ["cosine", "cosine_with_min_lr", "linear", "constant_with_warmup"])
def test_the_schedule_is_the_trainers(steps: int, kind: Any) -> None:
    config = Grpo(lr_scheduler_type=kind)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    warmup = torch.ceil(torch.tensor(config.warmup_ratio * steps, dtype=torch.float64)).int().item()
    special = {"min_lr_rate": MIN_LR_RATE} if kind == "cosine_with_min_lr" else None
    scheduler = get_scheduler(kind, optimizer, warmup, steps, special)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert schedule(config, steps) == pytest.approx(rates)


@given(st.integers(0, 5000), st.integers(1, 64), st.integers(2, 16), st.none() | st.integers(1, 400))
def test_what_a_run_sees(prompts: int, at_once: int, group: int, max_steps: int | None) -> None:
    config = Grpo(prompts_per_step=at_once, group_size=group, micro_batch_size=1, max_steps=max_steps)
    seen = exposure(config, prompts)
    assert seen.prompts <= min(prompts, seen.steps * at_once) and seen.rollouts == seen.steps * at_once * group
    assert seen.steps == (0 if prompts < at_once else max_steps or prompts // at_once)
    assert 0 <= seen.rates <= seen.steps * config.learning_rate
    warned = seen.warning(config)
    assert (warned is not None) == (seen.rollouts < 10_000 or 3 * seen.prompts < prompts)


def test_the_sandboxs_old_setting_is_warned_of_before_it_runs() -> None:
    seen = exposure(OLD, 1066)
    assert "16 steps see 128 of 1,066 prompts in 1,024 rollouts" in seen.text() and seen.rates < 1e-4
    warned = seen.warning(OLD)
    assert warned is not None and "fewer than 10,000 rollouts and fewer than a third of the prompts" in warned
