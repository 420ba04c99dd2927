"""How training is spread over processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coepg_dagster.progress import Ended
from coepg_dagster.training.launch import Placement, launch


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_what_accelerate_leaves_out_on_a_cpu_is_refused(strategy: Any, tmp_path: Path) -> None:
    with pytest.raises(Ended, match=f"strategy {strategy} needs GPUs: use `ddp`"):
        launch(Placement(processes=2, strategy=strategy), tmp_path, "no.such.module", [], on_gpu=False)
    assert not list(tmp_path.iterdir())
