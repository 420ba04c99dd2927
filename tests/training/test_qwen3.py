"""Qwen3-VL goes the way of Qwen2.5-VL: fine-tuned, sampled, rewarded, with points in 0..1000."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from coepg_dagster.experiment import Grpo, Models, Sft
from coepg_dagster.geometry import Space
from coepg_dagster.training.grpo import train_grpo
from coepg_dagster.training.sft import train_sft
from tests.conftest import quiet


def test_qwen3_vl_is_trained_by_sft_and_by_grpo(
    qwen3_checkpoint: Path, models: Models, steps: pa.Table, dataset: pa.Table, tmp_path: Path
) -> None:
    checkpoint = str(qwen3_checkpoint)
    of_qwen3 = models.model_copy(update={"coordinates": Space.NORM_1000})
    sft = Sft(batch_size=4, micro_batch_size=2, max_steps=2, freeze_vision=True)
    for role in ("planner", "grounder"):
        out, scratch = tmp_path / role, tmp_path / f"{role}-scratch"
        figures = train_sft(role, checkpoint, dataset, steps, of_qwen3, sft, 13, "cpu", out, quiet, scratch=scratch)
        assert figures["rows"] >= 5 and figures["optimizer_steps"] == 2 and figures["logits_apart"] < 1e-6
    figures = train_grpo(
        str(tmp_path / "planner"),
        ("grounder", str(tmp_path / "grounder")),
        {"open": checkpoint},
        dataset.select(["step_id"]),
        steps,
        of_qwen3,
        Grpo(prompts_per_step=2, group_size=2, micro_batch_size=4, max_steps=2, max_plan_tokens=8),
        12,
        64,
        13,
        "cpu",
        tmp_path / "grpo",
        quiet,
        scratch=tmp_path / "grpo-scratch",
    )
    assert figures["optimizer_steps"] == 2 and figures["logits_apart"] < 1e-6
    rollouts = pq.read_table(tmp_path / "grpo" / "rollouts.parquet")
    assert rollouts.num_rows == 2 * 2 * 2 and all(text is not None for text in rollouts["text"].to_pylist())
