"""GRPO with advantages of episode and step: the steps of an episode are asked together, or there is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import GrounderRl, Grpo
from coepg_dagster.progress import Ended
from coepg_dagster.rewards.estimators import ui_s1_levels
from coepg_dagster.training.examples import NothingToTrainOn
from coepg_dagster.training.grpo import train_grpo
from tests.jobs import grpo_job, quiet

LEVELS: dict[str, Any] = {
    "prompts_per_step": 3,
    "group_size": 3,
    "micro_batch_size": 9,
    "num_train_epochs": 2,
    "learning_rate": 1e-3,
    "max_plan_tokens": 24,
    "temperature": 0.7,
    "kl_beta": 0.0,
    "advantage": ["ui_s1_levels"],
}


def episodes(steps: pa.Table, names: list[str], indices: list[int]) -> pa.Table:
    for name, values, kind in (("episode_id", names, pa.string()), ("step_index", indices, pa.int32())):
        at = steps.schema.get_field_index(name)
        steps = steps.set_column(at, steps.schema.field(name), pa.array(values, kind))
    return steps


def test_steps_of_an_episode_are_asked_together_and_compared(
    trained: Callable[[str, int], Path], dataset: pa.Table, steps: pa.Table, models: Models, tmp_path: Path
) -> None:
    told = episodes(steps, ["a", "b", "a", "b", "a", "b"], [2, 0, 1, 1, 0, 2])
    config = Grpo.model_validate(LEVELS)
    data = (dataset, told, models)
    job = grpo_job(tmp_path / "out", data, trained("planner", 0), trained("grounder", 0), config)
    figures = train_grpo(job, quiet)
    rows = pq.read_table(job.out / "rollouts.parquet").to_pylist()
    assert figures["optimizer_steps"] == 4
    orders = [[row["step_id"] for row in rows if row["optimizer_step"] == step][::3] for step in range(4)]
    assert all(sorted(orders[i : i + 2]) == [["s1", "s3", "s5"], ["s4", "s2", "s0"]] for i in (0, 2))
    for step in range(4):
        of_step = [row for row in rows if row["optimizer_step"] == step]
        rewards = np.array([row["reward"] for row in of_step]).reshape(3, 3)
        expected = ui_s1_levels(rewards, np.zeros(3, int), np.arange(3))
        assert [row["advantage"] for row in of_step] == pytest.approx(expected.reshape(-1), abs=2e-2)
    assert any(row["advantage"] for row in rows)


def test_where_there_are_no_episodes_it_is_refused(
    trained: Callable[[str, int], Path], dataset: pa.Table, steps: pa.Table, models: Models, tmp_path: Path
) -> None:
    apart = episodes(steps, [f"e{i}" for i in range(6)], [0] * 6)
    init = trained("planner", 0), trained("grounder", 0)
    job = grpo_job(tmp_path / "out", (dataset, apart, models), *init, Grpo.model_validate(LEVELS))
    with pytest.raises(NothingToTrainOn, match=r"each of the 6 prompts is of another one: remove ui_s1_levels"):
        train_grpo(job, quiet)
    ordered = Grpo.model_validate(LEVELS | {"curation": {"curriculum": {"samples": 2}}})
    job = grpo_job(tmp_path / "ordered", (dataset, apart, models), *init, ordered)
    with pytest.raises(Ended, match="ui_s1_levels asks about the steps of an episode together, and one of curriculum"):
        train_grpo(job, quiet)
    with pytest.raises(ValidationError, match="max_num_gen_batches asks prompts of other episodes"):
        Grpo.model_validate(LEVELS | {"max_num_gen_batches": 2})
    with pytest.raises(ValidationError, match="a grounder's prompts are plans"):
        GrounderRl.model_validate({"advantage": ["ui_s1_levels"]})
