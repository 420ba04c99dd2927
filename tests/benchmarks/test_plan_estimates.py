"""The estimates of `coepg plan` against what the committed baselines measured on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import plan_estimates, sized
from benchmarks.baseline import FOLDER
from coepg_dagster.experiment.training import Sft
from coepg_dagster.planning.estimates import CARDS, Example, rates_of, sft_memory, sft_seconds

BASELINE = json.loads((FOLDER / "plan_estimates.json").read_text())
STAGES = {name: stage for name, stage in BASELINE["stages"].items() if "note" not in stage}
CARD = CARDS[BASELINE["card"]]
RATES = rates_of(CARD, FOLDER)


@pytest.mark.parametrize("name", STAGES)
def test_the_estimate_of_what_was_measured_is_within_20_percent(name: str) -> None:
    memory, seconds = plan_estimates.estimated(STAGES[name], RATES, CARD.memory)
    measured = STAGES[name]["measured"]
    assert memory.total / 1e9 == pytest.approx(measured["gb"], rel=0.2)
    assert seconds == pytest.approx(measured.get("seconds", seconds), rel=0.2)


def test_generation_and_both_ways_of_sft_were_measured() -> None:
    assert {"candidates", "verdicts"} <= STAGES.keys()
    assert {STAGES[name]["config"]["compile"] for name in STAGES if name.startswith("sft")} == {True, False}
    assert BASELINE["repetitions"].keys() == {f"{n}: {u}" for n, stage in STAGES.items() for u in stage["measured"]}


@pytest.mark.parametrize("gpus", [1, 2])
def test_sft_in_two_processes_is_estimated_within_20_percent(gpus: int) -> None:
    run = json.loads((FOLDER / "sft_scaling_2gpu.json").read_text())["runs"][str(gpus)]
    stage = plan_estimates.sft_stage(run["configuration"]["size"], run)
    config, example = (
        Sft.model_validate(stage["config"]),
        Example(sized.SCREENS["3B"], stage["prompt"], stage["answer"]),
    )
    model = sized.architecture_of("3B")
    if gpus == 1:  # two held gradients twice then; sft_strategies measured later code
        assert sft_memory(model, config, example).total / 1e9 == pytest.approx(run["memory_gb"], rel=0.2)
    # each process has so many rows
    seconds = sft_seconds(model, config, example, run["sequences"], RATES)
    assert seconds == pytest.approx(sum(run["step_seconds"]), rel=0.2)


def test_a_larger_batch_of_plans_is_estimated_within_20_percent() -> None:
    run = json.loads((FOLDER / "pool_scaling_2gpu.json").read_text())["runs"]["1"]
    # as pool_scaling asks by default: 4 plans of 48 tokens, 128 at a time
    stage = {
        "kind": "generation",
        "size": "3B",
        "prompt": plan_estimates.PROMPT,
        "answer": 48,
        "batch": 128,
        "samples": 4,
    }
    stage["screenshots"] = run["candidates"] // 4
    memory, seconds = plan_estimates.estimated(stage, RATES, CARD.memory)
    assert memory.total / 1e9 == pytest.approx(run["memory_gb"], rel=0.2)
    assert seconds == pytest.approx(run["candidates"] / run["candidates_per_second"], rel=0.2)


def test_what_another_benchmark_measured_again_replaces_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plan_estimates", "grpo_breakdown", "sft_mfu"):
        (tmp_path / f"{name}.json").write_text((FOLDER / f"{name}.json").read_text())
    monkeypatch.setattr(plan_estimates, "FOLDER", tmp_path)
    assert plan_estimates.known_stages("another GPU") == {}
    assert plan_estimates.known_stages(BASELINE["device"]) == BASELINE["stages"]
    again = json.loads((tmp_path / "grpo_breakdown.json").read_text())
    again["kinds"]["vllm"] |= {"commit": "0123456", "memory_gb": 99.0}
    (tmp_path / "grpo_breakdown.json").write_text(json.dumps(again))
    stages = plan_estimates.known_stages(BASELINE["device"])
    newer = stages.pop("grpo, rollouts from vllm")
    assert newer["measured"]["gb"] == 99.0 and "note" not in newer
    assert stages == {name: BASELINE["stages"][name] for name in stages}


def test_stages_that_stay_say_from_which_commit_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_estimates, "FOLDER", tmp_path)
    monkeypatch.setattr(plan_estimates, "device_name", lambda: "a GPU")
    assert plan_estimates.measured_earlier("plan_estimates") == {}
    stages = {"sft": {"kind": "sft"}, "grpo": {"kind": "grpo", "from": "grpo_breakdown, 89abcde"}}
    facts = {"device": "a GPU", "commit": "0123456", "value": 1.0, "stages": stages}
    (tmp_path / "plan_estimates.json").write_text(json.dumps(facts))
    stays = plan_estimates.measured_earlier("plan_estimates")
    assert {name: stage["from"] for name, stage in stays.items()} == {
        "sft": "plan_estimates, 0123456",
        "grpo": "grpo_breakdown, 89abcde",
    }
