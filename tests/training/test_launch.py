"""How training is spread over processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coepg_dagster.experiment import Grpo, Lora, Models, Sft
from coepg_dagster.jobs import Placement
from coepg_dagster.progress import Ended
from coepg_dagster.running import run
from coepg_dagster.training.launch import launch_ranks, refuse_sharded, see_one_gpu
from tests.jobs import grpo_job, quiet, sft_job


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_what_accelerate_leaves_out_on_a_cpu_is_refused(strategy: Any, tmp_path: Path) -> None:
    with pytest.raises(Ended, match=f"strategy {strategy} needs GPUs: use `ddp`"):
        launch_ranks(Placement(processes=2, strategy=strategy), tmp_path, "no.such.module", [], on_gpu=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Sft(lora=Lora()), r"`lora` with strategy {}: .*Use `ddp` or `zero2`"),
        (Grpo(lora=Lora()), r"`lora` with strategy {}: .*Use `ddp` or `zero2`"),
        (Grpo(validate_every=1), r"grpo.validate_every with strategy {}: .*use `ddp` or `zero2`"),
    ],
)
def test_what_needs_the_whole_model_is_refused_where_no_process_has_it(
    config: Sft | Grpo,
    why: str,
    strategy: Any,
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
) -> None:
    """Before anything is loaded: there is no such checkpoint."""
    data, none = (dataset, steps, models), "no/checkpoint"
    spread: dict[str, Any] = {"device": "cuda", "placement": Placement(processes=2, strategy=strategy)}
    job = (
        sft_job(tmp_path, data, "planner", none, config, **spread)
        if isinstance(config, Sft)
        else grpo_job(tmp_path, data, none, none, config, **spread)
    )
    with pytest.raises(Ended, match=why.format(strategy)):
        run(job, quiet)
    refuse_sharded(config, Placement(processes=2, strategy="zero2"))


@pytest.mark.parametrize(
    ("seen", "left"),
    [(None, "0"), ("0,1", "0"), ("3,1", "3"), ("GPU-610ad1dd,GPU-f336699f", "GPU-610ad1dd"), ("", "")],
)
def test_training_in_one_process_sees_one_gpu(seen: str | None, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two, TRL ends at once: Trainer would take both, by threads."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen or "")
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    see_one_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left
