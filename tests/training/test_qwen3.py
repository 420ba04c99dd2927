"""Qwen3-VL goes the way of Qwen2.5-VL: fine-tuned, sampled, rewarded, with points in 0..1000."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.geometry import Space
from coepg_dagster.training.grpo import train_grpo
from coepg_dagster.training.sft import train_sft
from tests.jobs import grpo_job, quiet, sft_job


def test_qwen3_vl_is_trained_by_sft_and_by_grpo(
    qwen3_checkpoint: Path, models: Models, steps: pa.Table, dataset: pa.Table, tmp_path: Path
) -> None:
    of_qwen3 = models.model_copy(update={"coordinates": Space.NORM_1000})
    sft = Sft(batch_size=4, micro_batch_size=2, max_steps=2, freeze_vision=True)
    for role in ("planner", "grounder"):
        figures = train_sft(sft_job(tmp_path / role, (dataset, steps, of_qwen3), role, qwen3_checkpoint, sft), quiet)
        assert figures["rows"] >= 5 and figures["optimizer_steps"] == 2 and figures["logits_apart"] < 1e-6
    data, checkpoints = (dataset.select(["step_id"]), steps, of_qwen3), (tmp_path / "planner", tmp_path / "grounder")
    grpo = Grpo(prompts_per_step=2, group_size=2, micro_batch_size=4, max_steps=2, max_plan_tokens=8)
    figures = train_grpo(grpo_job(tmp_path / "grpo", data, *checkpoints, grpo, {"open": qwen3_checkpoint}), quiet)
    assert figures["optimizer_steps"] == 2 and figures["logits_apart"] < 1e-6
    rollouts = pq.read_table(tmp_path / "grpo" / "rollouts.parquet")
    assert rollouts.num_rows == 2 * 2 * 2 and all(text is not None for text in rollouts["text"].to_pylist())
