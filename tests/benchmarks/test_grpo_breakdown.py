"""The benchmark of a GRPO step's stages runs end to end on the tiny model: only its size differs on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import grpo_breakdown


def test_the_stages_of_a_step_add_up_and_every_rollout_is_rewarded(tmp_path: Path) -> None:
    options = grpo_breakdown.arguments(["--size", "tiny", "--steps", "2", "--group", "4"])
    result = grpo_breakdown.run(options, "transformers", tmp_path / "found.json")
    assert len(result["steps"]) == 2 and result["config"]["lora"] is None
    for step in result["steps"]:
        assert {*step} == {"prompts", "rollouts", "rewards", *grpo_breakdown.UPDATE}
        assert all(seconds >= 0 for seconds in step.values())
    file = grpo_breakdown.record({"transformers": result}, {"vllm": "not here"}, tmp_path)
    facts = json.loads(file.read_text())
    measured = result["steps"][1]
    collect = measured["prompts"] + measured["rollouts"] + measured["rewards"]
    assert facts["value"] == pytest.approx(collect, abs=1e-3)
    assert facts["value"] + facts["against"] == pytest.approx(sum(measured.values()), abs=2e-3)
    assert facts["ratio"] == pytest.approx(facts["against"] / facts["value"], rel=0.02)
    assert (facts["rollouts"], facts["trained"], facts["failed"]) == ("transformers", "full", {"vllm": "not here"})


def test_when_nothing_ran_the_baseline_says_why(tmp_path: Path) -> None:
    facts = json.loads(grpo_breakdown.record({}, {"vllm": "no GPU"}, tmp_path).read_text())
    assert (facts["value"], facts["reason"]) == (None, "no GPU")


def test_the_reason_of_a_failure_has_no_progress_bars() -> None:
    output = "began\n\rLoading:   0%| | 0/8 [00:00<?, ?it/s]\rLoading: 100%|#| 8/8 [00:24<00:00,  2.95s/it] \n\nended\n"
    assert grpo_breakdown.without_bars(output) == ["began", "ended"]


def test_nested_stages_count_once(tmp_path: Path) -> None:
    stages = grpo_breakdown.Stages({}, tmp_path / "found.json")
    clock = iter([0.0, 1.0, 3.0, 10.0])
    stages.now = lambda: next(clock)  # type: ignore[method-assign]
    with stages.stage("outer"), stages.stage("inner"):
        pass
    assert stages._step == {"inner": 2.0, "outer": 8.0}
