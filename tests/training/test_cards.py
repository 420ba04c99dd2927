"""The card of a trained model, as Hugging Face reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.schema import Benchmark
from coepg_dagster.experiment.training import Grpo
from coepg_dagster.provenance import Ref
from coepg_dagster.training.cards import Trained, write_card


@pytest.fixture
def trained(models: Models) -> Trained:
    return Trained(
        loop="sandbox/s13",
        ref=Ref("planner", 2),
        base="planner_sft[2]",
        made_from=[
            ("base", "planner_sft[2]", "0123456789abcdef"),
            ("data, 3,000 rows of 1,100 steps", "dataset[1]", "fedcba9876543210"),
            ("rewarded by", "grounder[2]", "00112233445566aa"),
        ],
        benchmark=Benchmark(reader="miniwob", path=Path("data/miniwob"), test=["test_seed"], protocol="miniwob/point"),
        models=models,
        settings=Grpo(max_steps=16).model_dump(mode="json"),
        figures={
            "tensors": 95,
            "parameters": 1_234_567,
            "logits_apart": 0.0,
            "warnings": ["step 12 of 16: KL runs away"],
            "optimizer_steps": 16,
            "kl_last": None,
            "probe": {
                "train": {"before": 50.0, "after": 60.0, "difference": 10.0, "ci95": [4.0, 16.0]},
                "validation": None,
                "steps": {"train": 128, "validation": 0},
                "judge": "grounder_2",
            },
        },
        seed=13,
        device="cpu",
        seconds=12.34,
    )


def test_a_card_says_what_the_model_is_and_was_made_from(trained: Trained, tmp_path: Path) -> None:
    read = ModelCard.load(write_card(tmp_path, trained, tmp_path))
    assert (read.data.library_name, read.data.pipeline_tag) == ("transformers", "image-text-to-text")
    assert read.data.base_model is None, "an artifact of this store is no name on the hub"
    text = read.text
    for words in (
        "# planner[2] of sandbox/s13",
        "| base | `planner_sft[2]` | `0123456789abcdef` |",
        "| data, 3,000 rows of 1,100 steps | `dataset[1]` | `fedcba9876543210` |",
        "| kl_beta | 0.01 |",
        "| max_steps | 16 |",
        "| seconds | 12.3 |",
        "95 tensors with 1,234,567 parameters",
        "rounded to float32",
        "on 128 steps of train, judged by grounder_2, per cent: 50.0 → 60.0 (+10.0 [+4.0, +16.0]).",
        "Warning during training: step 12 of 16: KL runs away",
        "`train` split of `data/miniwob`",
    ):
        assert words in text, words


def test_a_base_on_the_hub_is_named_so_that_the_hub_finds_it(trained: Trained, tmp_path: Path) -> None:
    hub = replace(trained, ref=Ref("grounder", 1), base="Qwen/Qwen2.5-VL-3B-Instruct")
    read = ModelCard.load(write_card(tmp_path, hub, tmp_path))
    assert read.data.base_model == "Qwen/Qwen2.5-VL-3B-Instruct" and "grounder" in read.data.tags
    local = tmp_path / "models" / "base-grounder"
    local.mkdir(parents=True)
    read = ModelCard.load(write_card(tmp_path, replace(hub, base="models/base-grounder"), tmp_path))
    assert read.data.base_model is None
