"""How training is spread over processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from coepg_dagster.progress import Ended
from coepg_dagster.training.launch import Placement, launch, see_one_gpu


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_what_accelerate_leaves_out_on_a_cpu_is_refused(strategy: Any, tmp_path: Path) -> None:
    with pytest.raises(Ended, match=f"strategy {strategy} needs GPUs: use `ddp`"):
        launch(Placement(processes=2, strategy=strategy), tmp_path, "no.such.module", [], on_gpu=False)
    assert not list(tmp_path.iterdir())


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
