"""Groups without spread: asked another prompt (DAPO), or given an earlier success (ARPO)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError
from trl import GRPOTrainer

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import GrounderRl, Grpo
from coepg_dagster.jobs import GrounderRlJob, Placement
from coepg_dagster.rewards.cdrem import flatten_spreadless
from coepg_dagster.training.grpo import train_grounder_rl, train_grpo
from coepg_dagster.training.grpo_trainer import CdremTrainer
from coepg_dagster.training.launch import refusals
from tests.jobs import grpo_job, quiet, training_job

SMALL: dict[str, Any] = {
    "prompts_per_step": 2,
    "group_size": 3,
    "micro_batch_size": 3,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "max_plan_tokens": 24,
    "temperature": 0.7,
    "kl_beta": 0.0,
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_groups_without_spread_are_asked_other_prompts(
    attention: str,
    trained: Callable[[str, int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What TRL gets is one batch like any other: each row with its own prompt, screenshot, reward and log-probabilities."""
    sampled: list[tuple[int, list[str]]] = []
    sample = CdremTrainer._sample

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        sampled.append((self.state.global_step, [step_id for step_id, _ in self._asked]))
        return sample(self, *args, **kwargs)

    monkeypatch.setattr(CdremTrainer, "_sample", watched)
    config = Grpo.model_validate(SMALL | {"max_num_gen_batches": 4, "attention": attention})
    data = (dataset, steps, models)
    job = grpo_job(tmp_path / "out", data, trained("planner", 0), trained("grounder", 0), config)
    figures = train_grpo(job, quiet)
    rows = pq.read_table(job.out / "rollouts.parquet").to_pylist()
    assert figures["groups_asked_again"] > 0 and len(sampled) > 3
    assert figures["groups_asked_again"] == sum(len(asked) // 3 for _, asked in sampled) / 3 - 2
    firsts = [next(asked for at, asked in sampled if at == step) for step in range(3)]
    # the order of the epoch is left as it is
    assert sorted(step_id for asked in firsts for step_id in asked) == sorted(steps["step_id"].to_pylist() * 3)
    for step in range(3):
        of_step = [row for row in rows if row["optimizer_step"] == step]
        asked = [row["step_id"] for row in of_step]
        assert asked[0] == asked[1] == asked[2] != asked[3] == asked[4] == asked[5]
    resampled = sum(
        {row["step_id"] for row in rows if row["optimizer_step"] == step} != set(firsts[step]) for step in range(3)
    )
    assert resampled <= 3 * figures["groups_resampled"]
    _, spreadless = flatten_spreadless([row["reward"] for row in rows], 3)
    assert figures["frac_reward_zero_std"] == pytest.approx(spreadless.mean())


def test_of_the_groups_without_spread_those_stay_for_which_none_was_found(
    trained: Callable[[str, int], Path], dataset: pa.Table, steps: pa.Table, models: Models, tmp_path: Path
) -> None:
    """At a temperature near 0 no group has spread: the step has its own prompts, and training ends as it does without."""
    data, init = (dataset, steps, models), (trained("planner", 0), trained("grounder", 0))
    orders = []
    for name, more in (("again", {"max_num_gen_batches": 3}), ("once", {})):
        config = Grpo.model_validate(SMALL | {"temperature": 1e-3, "max_steps": 2} | more)
        job = grpo_job(tmp_path / name, data, *init, config)
        figures = train_grpo(job, quiet)
        orders.append([row["step_id"] for row in pq.read_table(job.out / "rollouts.parquet").to_pylist()])
        if more:
            assert figures["groups_asked_again"] == 4 and figures["groups_resampled"] == 0, "there are 6 prompts"
    assert orders[0] == orders[1] and figures["frac_reward_zero_std"] == 1


@pytest.mark.parametrize("updates", [1, 2])
def test_an_earlier_success_keeps_the_log_probabilities_of_its_policy(
    updates: int,
    trained: Callable[[str, int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ratio of a replayed answer is that to the policy that sampled it, and 1 for others before the first update."""
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    compute = GRPOTrainer._compute_loss

    def computed(self: Any, model: Any, inputs: Any) -> Any:
        loss = compute(self, model, inputs)
        if "old_per_token_logps" in inputs:
            mask, sampled = inputs["completion_mask"].bool(), inputs["sampling_per_token_logps"]
            seen.append((inputs["old_per_token_logps"], self._logps, mask, sampled))
        return loss

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", computed)
    # every group with an earlier success gets one; a KL term keeps rollouts without advantage in the passes
    replay = {"below_mean": 2.0, "below_std": 10.0, "size": 2}
    more = {
        "replay": replay,
        "prompts_per_step": 6,
        "num_iterations": updates,
        "max_steps": 3 * updates,
        "kl_beta": 0.01,
    }
    config = Grpo.model_validate(SMALL | more)
    data = (dataset, steps, models)
    job = grpo_job(tmp_path / "out", data, trained("planner", 0), trained("grounder", 0), config)
    figures = train_grpo(job, quiet)
    rows = pq.read_table(job.out / "rollouts.parquet").to_pylist()
    replayed = [row for row in rows if row["sampled_in"] is not None]
    assert replayed and figures["groups_replayed"] == len(replayed) / 3
    groups = [rows[i : i + 3] for i in range(0, len(rows), 3)]
    for group in groups:
        assert all(row["sampled_in"] is None for row in group[1:]) and len({row["step_id"] for row in group}) == 1
        if group[0]["sampled_in"] is not None:
            assert group[0]["sampled_in"] < group[0]["optimizer_step"] and group[0]["reward"] > 0.1
    expected = np.concatenate([_z(np.array([row["reward"] for row in group])) for group in groups])
    assert [row["advantage"] for row in rows] == pytest.approx(expected, abs=1e-3)
    apart = 0
    for old, now, mask, sampled in seen:
        assert not old[mask].isnan().any()
        foreign = sampled.isnan().any(1)
        apart += int(((old - now).abs() * mask)[foreign].amax() > 1e-4) if foreign.any() else 0
        if updates == 1:
            assert torch.equal(old[~foreign], now[~foreign])
            assert (sampled - old)[~foreign][mask[~foreign]].abs().max() < 1e-3
    assert apart, "the policy has moved since"


def _z(rewards: Any) -> Any:
    spread = rewards.std(ddof=1)
    return (rewards - rewards.mean()) / (spread + 1e-4) if spread > 1e-3 else 0 * rewards


def test_a_grounders_successes_are_those_of_its_plan(
    trained: Callable[[str, int], Path], dataset: pa.Table, steps: pa.Table, models: Models, tmp_path: Path
) -> None:
    replay = {"below_mean": 2.0, "below_std": 10.0}
    more = {"enabled": True, "replay": replay, "max_num_gen_batches": 2, "max_plan_tokens": 8, "prompts_per_step": 5}
    config = GrounderRl.model_validate(SMALL | more)
    init = trained("grounder", 0)
    job = training_job(GrounderRlJob, tmp_path / "out", (dataset, steps, models), init, config=config)
    figures = train_grounder_rl(job, quiet)
    rows = pq.read_table(job.out / "rollouts.parquet").to_pylist()
    assert figures["groups_replayed"] > 0 and any(row["sampled_in"] is not None for row in rows)
    for i in range(0, len(rows), 3):
        assert len({(row["step_id"], row["plan"]) for row in rows[i : i + 3]}) == 1


def test_they_need_one_process_with_the_whole_model() -> None:
    for setting, more in (("max_num_gen_batches", 2), ("replay", {})):
        config = Grpo.model_validate(SMALL | {"prompts_per_step": 4, setting: more})
        assert refusals(config, Placement(), "grpo_cdrem") == []
        for placement, remedy in (
            (Placement(processes=2), "training_processes: 1"),
            (Placement(strategy="zero3"), "strategy: ddp"),
        ):
            (why,) = refusals(config, placement, "grpo_cdrem")
            assert f"grpo.{setting} decides by what was sampled first" in why and remedy in why
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Grpo.model_validate({"max_num_gen_batches": 0})
