"""How training is spread over processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coepg_dagster.experiment import Grpo, Lora, Models, Sft
from coepg_dagster.progress import Ended
from coepg_dagster.training.grpo import train_grpo
from coepg_dagster.training.launch import Placement, launch, refuse_sharded, see_one_gpu
from coepg_dagster.training.sft import train_sft


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_what_accelerate_leaves_out_on_a_cpu_is_refused(strategy: Any, tmp_path: Path) -> None:
    with pytest.raises(Ended, match=f"strategy {strategy} needs GPUs: use `ddp`"):
        launch(Placement(processes=2, strategy=strategy), tmp_path, "no.such.module", [], on_gpu=False)
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
    config: Sft | Grpo, why: str, strategy: Any, models: Models, tmp_path: Path
) -> None:
    """Before anything is loaded: there is no such checkpoint."""
    nothing: Any = pa.table({})
    spread: dict[str, Any] = {"scratch": tmp_path, "placement": Placement(processes=2, strategy=strategy)}
    end = (5, "cuda", tmp_path, lambda done, of, log: None)
    with pytest.raises(Ended, match=why.format(strategy)):
        if isinstance(config, Sft):
            train_sft("planner", "no/checkpoint", nothing, nothing, models, config, *end, **spread)
        else:
            train_grpo("no/checkpoint", ("own", "none"), {}, nothing, nothing, models, config, 8, 8, *end, **spread)
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
