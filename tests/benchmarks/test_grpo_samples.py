"""Plain and batched TRL give the rewards of C-DREM's definition, and runs stand beside each other in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import grpo_samples, plain, sized


def test_batched_grounders_give_the_rewards_of_single_ones() -> None:
    steps, _ = sized.tables("tiny", 3)
    grounders = {"a": plain.PlainGrounder(sized.SOURCE.parent / "base-grounder", 12)}
    names = steps["step_id"].to_pylist()
    answers = [*sized.made_answers(["one", "two", "three"], names)[:2], "no plan"]
    assert answers == [*sized.made_answers(["one", "two"], names[:2]), "no plan"]
    alone = plain.PlainReward(grounders, {"a": 1.0}, steps)
    together = plain.BatchedReward(grounders, {"a": 1.0}, steps)
    assert alone.score(answers, names) == pytest.approx(together.score(answers, names))
    assert (alone.calls, together.calls) == (2, 1)
    asked = [(step["screenshot"], "click the field") for step in steps.to_pylist()]
    for one, of_all in zip(
        map(grounders["a"].ask, *zip(*asked, strict=True)), grounders["a"].ask_all(asked), strict=True
    ):
        assert one[0] == of_all[0] and one[1] == pytest.approx(of_all[1], abs=1e-4)


def test_each_run_adds_to_the_table_and_the_figure_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"prompts_per_step": 8, "group_size": 8}
    for graders in (1, 3):
        for way, seconds in zip(grpo_samples.WAYS, (10.0, 20.0, 40.0 * graders), strict=True):
            steps = [{"seconds": 99.0, "rewards": 9.0}, {"seconds": seconds, "rewards": seconds / 2}]
            found = {"way": way, "graders": graders, "config": config, "steps": steps, "memory_gb": 100.0}
            grpo_samples.record(found, {}, tmp_path, "a card")
    grpo_samples.record(None, {"plain TRL, 5 graders": "took too long"}, tmp_path, "a card")
    facts = json.loads((tmp_path / "grpo_samples.json").read_text())
    assert (facts["value"], facts["against"], facts["ratio"]) == (6.4, 0.5333, pytest.approx(12, rel=1e-3))
    assert facts["table"]["1"]["batched TRL"]["rollouts_per_second"] == 3.2
    assert facts["failed"] == {"plain TRL, 5 graders": "took too long"}
    monkeypatch.setattr(grpo_samples, "FIGURE", tmp_path / "figure.png")
    grpo_samples.draw(tmp_path)
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_a_run_without_a_measured_step_is_none() -> None:
    with pytest.raises(RuntimeError, match="no step after the first"):
        grpo_samples.summary({"steps": [{"seconds": 9.0, "rewards": 1.0}]})
