"""Plain and batched TRL give the rewards of C-DREM's definition, and runs stand beside each other in one table."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import grpo_samples, ms_swift, plain, sized
from coepg_dagster.experiment.training import Grpo

PYTHON = "COEPG_SWIFT_PYTHON"
"""Environment variable with a Python that has ms-swift, for the test that runs it."""


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
    for graders, ways in ((1, grpo_samples.WAYS), (3, grpo_samples.WAYS[:3])):
        for way, seconds in zip(ways, (10.0, 20.0, 40.0 * graders, 50.0), strict=False):
            steps = [
                {"seconds": 99.0, "rewards": 9.0, "memory_gb": 90.0},
                {"seconds": seconds, "rewards": seconds / 2, "memory_gb": 100.0},
            ]
            found = {"way": way, "graders": [graders, graders], "config": config, "steps": steps}
            if way == grpo_samples.SWIFT:
                found["versions"] = {"ms-swift": "4.6.0"}
            grpo_samples.record(way, graders, found, "", tmp_path, "a card")
    grpo_samples.record("plain TRL", 5, None, "took too long", tmp_path, "a card")
    facts = json.loads((tmp_path / "grpo_samples.json").read_text())
    assert (facts["value"], facts["against"], facts["ratio"]) == (6.4, 0.5333, pytest.approx(12, rel=1e-3))
    assert facts["table"]["1"]["batched TRL"]["rollouts_per_second"] == 3.2
    assert facts["table"]["1"]["MS-SWIFT"]["seconds"] == 50 and "MS-SWIFT" not in facts["table"]["3"]
    assert facts["versions_of_swift"] == {"ms-swift": "4.6.0"}
    assert facts["failed"] == {"plain TRL, 5 graders": "took too long"}
    monkeypatch.setattr(grpo_samples, "FIGURE", tmp_path / "figure.png")
    grpo_samples.draw(tmp_path)
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_steps_of_one_run_count_for_the_number_of_graders_they_had(tmp_path: Path) -> None:
    steps = [{"seconds": n, "rewards": n / 4, "memory_gb": n} for n in (9.0, 10.0, 20.0, 40.0)]
    config = {"prompts_per_step": 8, "group_size": 8}
    found = {"way": "plain TRL", "graders": [1, 1, 1, 3, 3, 5], "config": config, "steps": steps}
    for graders in (1, 3, 5):
        grpo_samples.record("plain TRL", graders, found, "ended by its limit", tmp_path, "a card")
    for graders, of in {1: (15.0, 2), 3: (40.0, 1)}.items():
        figures = grpo_samples.summary(found, graders)
        assert figures and (figures["seconds"], figures["measured_steps"]) == of
    assert grpo_samples.summary(found, 5) is None
    facts = json.loads((tmp_path / "grpo_samples.json").read_text())
    assert facts["value"] is None and facts["failed"] == {"plain TRL, 5 graders": "ended by its limit"}


def test_a_run_without_a_measured_step_is_none() -> None:
    assert (
        grpo_samples.summary({"graders": [1, 1], "steps": [{"seconds": 9.0, "rewards": 1.0, "memory_gb": 1}]}, 1)
        is None
    )


def test_ms_swift_is_measured_only_where_it_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        grpo_samples.arguments(["--way", "MS-SWIFT"])
    assert "needs --python" in capsys.readouterr().err
    asked = ["--size", "tiny"]
    assert grpo_samples.ways_of(grpo_samples.arguments(asked)) == grpo_samples.WAYS[:3]
    assert grpo_samples.ways_of(grpo_samples.arguments([*asked, "--python", "python"])) == grpo_samples.WAYS


def test_ms_swift_is_asked_for_the_same_prompts_and_batch(tmp_path: Path) -> None:
    steps, _ = sized.tables("tiny", 2)
    rows = [json.loads(line) for line in ms_swift.write_data(steps, tmp_path).read_text().splitlines()]
    assert [row["step_id"] for row in rows] == steps["step_id"].to_pylist()
    assert [Path(row["images"][0]).read_bytes() for row in rows] == steps["screenshot"].to_pylist()
    assert all(goal in row["messages"][0]["content"] for goal, row in zip(steps["goal"].to_pylist(), rows, strict=True))
    config = Grpo(prompts_per_step=8, group_size=4, micro_batch_size=16, kl_beta=0.02)
    found = ms_swift.settings_of("planner", config, 1, on_gpu=True)
    assert (found["per_device_train_batch_size"], found["gradient_accumulation_steps"], found["beta"]) == (16, 2, 0.02)
    assert (found["bf16"], found["gradient_checkpointing"]) == ("true", "true")
    assert ms_swift.settings_of("planner", config, 1, on_gpu=False)["bf16"] == "false"


@pytest.mark.slow
def test_a_run_of_ms_swift_writes_the_seconds_of_its_steps(tmp_path: Path) -> None:
    if not (python := os.environ.get(PYTHON)):
        pytest.skip(f"{PYTHON} names no Python of an environment with ms-swift")
    asked = ["--size", "tiny", "--way", "MS-SWIFT", "--graders", "1", "2", "--steps", "1", "--python", python]
    found = grpo_samples.run(grpo_samples.arguments([*asked, "--run", str(tmp_path / "found.json")]))
    assert (found["way"], found["graders"], len(found["steps"])) == ("MS-SWIFT", [1, 1, 2], 3)
    for graders in (1, 2):
        figures = grpo_samples.summary(found, graders)
        assert figures and figures["rewards"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
