"""What the benchmark of strategies asks for, and what it writes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import baseline, sft_strategies
from benchmarks.baseline import FOLDER
from coepg_dagster.jobs import Placement
from coepg_dagster.planning.estimates import CARDS, rates_of

OPTIONS = argparse.Namespace(size="3B", micro=4, accumulation=4, gpus=2, steps=5, recompute=1.0, quick=False)
SCALED = json.loads((FOLDER / "sft_scaling_2gpu.json").read_text())["runs"]
RATES = rates_of(CARDS["H200-141GB"], FOLDER)


def test_one_process_makes_the_passes_of_all() -> None:
    alone, spread = (sft_strategies.settings_of(OPTIONS, of) for of in (sft_strategies.ALONE, "zero3"))
    assert alone[alone.index("--accumulation") + 1] == "8" and "--strategy" not in alone
    assert spread[spread.index("--accumulation") + 1] == "4" and spread[-2:] == ["--strategy", "zero3"]


def test_the_processes_are_started_as_those_of_a_job(tmp_path: Path) -> None:
    *_, file, _ = sft_strategies.launcher(Placement(processes=2, strategy="fsdp"), tmp_path, on_gpu=True)
    config = yaml.safe_load(Path(file).read_text())
    assert (config["distributed_type"], config["num_processes"]) == ("FSDP", 2)


def test_losses_are_compared_step_by_step() -> None:
    assert sft_strategies.apart([10.0, 9.9], [10.0, 10.0, 9.0]) == pytest.approx(0.01)


def test_the_baseline_has_the_memory_estimate_that_is_farthest_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: dict[str, dict[str, Any]] = {}
    for of, gpus in ((sft_strategies.ALONE, "1"), ("ddp", "2")):
        estimate = sft_strategies.estimated("3B", SCALED[gpus], RATES, of)
        runs[of] = SCALED[gpus] | {"losses": [12.0], "estimate": estimate}
    monkeypatch.setattr(sft_strategies, "write", lambda name, **facts: baseline.write(name, folder=tmp_path, **facts))
    sft_strategies.record("strategies", runs, {"fsdp": "why"}, tmp_path / "log")
    facts = json.loads((tmp_path / "strategies.json").read_text())
    assert facts["memory_ratios"].keys() == runs.keys() and facts["ratio"] in facts["memory_ratios"].values()
    assert facts["rows_per_second"]["ddp"] == pytest.approx(25.2, rel=0.01)
    assert facts["failed"] == {"fsdp": "why"}


@pytest.mark.parametrize(
    ("size", "of"),
    [("3B", of) for of in (sft_strategies.ALONE, *sft_strategies.STRATEGIES)] + [("7B", "zero3")],
)
def test_memory_is_estimated_as_it_was_measured(size: Any, of: str) -> None:
    """The constants come from how each strategy works; both sizes check them."""
    name = "sft_strategies_2gpu_3B" if size == "3B" else "sft_strategies_2gpu_7B_zero3"
    measured = json.loads((FOLDER / f"{name}.json").read_text())["runs"][of]
    estimate = sft_strategies.estimated(size, measured, RATES, of)["gb"]
    assert 0.95 < estimate / measured["memory_gb"] < 1.05
