"""The benchmark of a GRPO step's stages runs end to end on the tiny model: only its size differs on a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from benchmarks import baseline, grpo_breakdown
from coepg_dagster.experiment.models import Member
from coepg_dagster.inference.engine import Engine
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.jobs import Job

TINY = ["--size", "tiny", "--steps", "2", "--group", "4"]


def test_the_stages_of_a_step_add_up_and_every_rollout_is_rewarded(tmp_path: Path) -> None:
    options = grpo_breakdown.arguments(TINY)
    result = grpo_breakdown.run(options, "transformers", tmp_path / "found.json")
    assert len(result["steps"]) == 2 and result["config"]["lora"] is None
    for step in result["steps"]:
        assert {*step} == {"prompts", "rollouts", "rewards", *grpo_breakdown.UPDATE}
        assert all(seconds >= 0 for seconds in step.values())
    file = grpo_breakdown.record([result], {"vllm": "not here"}, tmp_path)
    facts = json.loads(file.read_text())
    measured = result["steps"][1]
    collect = measured["prompts"] + measured["rollouts"] + measured["rewards"]
    assert facts["value"] == pytest.approx(collect, abs=1e-3)
    assert facts["value"] + facts["against"] == pytest.approx(sum(measured.values()), abs=2e-3)
    assert facts["ratio"] == pytest.approx(facts["against"] / facts["value"], rel=0.02)
    found = facts["kinds"]["transformers, tiny"]
    assert found["rollouts_per_second"] == pytest.approx(8 / sum(measured.values()), abs=1e-3)
    assert (facts["rollouts"], facts["trained"], facts["failed"]) == (
        "transformers, tiny",
        "full",
        {"vllm": "not here"},
    )


def test_verifiers_in_servers_are_opened_once_and_asked_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[int]] = {}
    loading = Lock()

    class Remote(TransformersEngine):
        remote = True

        def generate(self, requests: Any, sampling: Any) -> Any:
            asked[self.name].append(len(requests))
            return super().generate(requests, sampling)

    @contextmanager
    def opened(member: Member, job: Job, *, logs: Path, share: int = 1, **_: Any) -> Iterator[Engine]:
        assert member.engine is None or (share, job.serving) == (2, grpo_breakdown.SERVERS)
        with loading:  # transformers loads one model at a time
            engine = (Remote if member.engine else TransformersEngine)(
                member.model, dtype="float32", device="cpu", batch_size=8
            )
        engine.name = logs.name  # type: ignore[attr-defined]
        if member.engine:
            asked[logs.name] = []
        yield engine

    monkeypatch.setattr(grpo_breakdown, "opened", opened)
    options = grpo_breakdown.arguments([*TINY, "--servers", "2"])
    result = grpo_breakdown.run(options, "transformers", tmp_path / "found.json")
    assert result["name"] == "transformers, tiny, 2 servers" and len(result["steps"]) == 2
    assert asked.keys() == {"server_0", "server_1"}
    calls = {sum(requests) for requests in asked.values()}
    assert calls <= set(range(12, 17))  # a tiny planner writes some of 16 answers twice


def test_variants_stand_beside_each_other_in_the_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = json.loads((baseline.FOLDER / "grpo_breakdown.json").read_text())
    made = {"steps": result["repetitions"]["vllm"], "config": result["configurations"]["vllm"], "used_gb": {}}
    made |= result["kinds"]["vllm"] | {"sampling_logp_difference": []}
    grpo_breakdown.record([made | {"name": "vllm"}], {"vllm, compiled": "took too long"}, tmp_path)
    facts = json.loads(grpo_breakdown.record([made | {"name": "vllm, 4 servers"}], {}, tmp_path).read_text())
    assert facts["kinds"].keys() == facts["configurations"].keys() == {"vllm", "vllm, 4 servers"}
    assert facts["failed"] == {"vllm, compiled": "took too long"}
    monkeypatch.setattr(grpo_breakdown, "card", lambda: "another card")
    facts = json.loads(grpo_breakdown.record([made | {"name": "vllm"}], {}, tmp_path).read_text())
    assert facts["kinds"].keys() == {"vllm"} and facts["device"] == "another card"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ([], "vllm"),
        (["--micro", "16", "--engine", "graphs"], "vllm, 16 a pass, graphs"),
        (["--servers", "4"], "vllm, 4 servers"),
        (["--size", "7B", "--processes", "2", "--strategy", "fsdp"], "vllm, 7B, 2 GPUs by fsdp"),
    ],
)
def test_a_variant_is_named_by_what_differs(given: list[str], name: str) -> None:
    assert grpo_breakdown.name_of(grpo_breakdown.arguments(given), "vllm", lora=False) == name


def test_when_nothing_ran_the_baseline_says_why(tmp_path: Path) -> None:
    facts = json.loads(grpo_breakdown.record([], {"vllm": "no GPU"}, tmp_path).read_text())
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
