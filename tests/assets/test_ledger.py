"""Claims, dead runs, and what a loop remembers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import dagster as dg
import pytest
from coepg_dagster.assets import ledger
from coepg_dagster.assets.automation import failed_inputs
from coepg_dagster.assets.ledger import (
    EVOLVE_TAG,
    Loop,
    archive,
    claim,
    end_dead_runs,
    finished_jobs,
    living_run,
    unfinished_runs,
)
from filelock import FileLock

from coepg_dagster.pools.controls import BLOCKING
from coepg_dagster.provenance import Ref
from tests.assets.conftest import InProcess
from tests.assets.light import EXPERIMENT, plant, steps_log
from tests.assets.test_graph import stale_in_dagster
from tests.project import run


def begin(light: InProcess, status: dg.DagsterRunStatus, **tags: str) -> dg.DagsterRun:
    job = light.defs.resolve_implicit_global_asset_job_def()
    return light.instance.create_run_for_job(job, status=status, tags=tags)


@dataclasses.dataclass
class Running:
    """As much of an execution context as a claim looks at."""

    instance: dg.DagsterInstance
    run: dg.DagsterRun


def test_a_claim_lasts_as_long_as_its_run(light: InProcess) -> None:
    folder = light.project.store / "claims"
    first = begin(light, dg.DagsterRunStatus.STARTED)
    second = begin(light, dg.DagsterRunStatus.STARTED)
    claim(Running(light.instance, first), folder, 1)
    claim(Running(light.instance, first), folder, 1)
    claim(Running(light.instance, second), folder, 2)
    try:
        claim(Running(light.instance, second), folder, 1)
        raise AssertionError("the second run took the claim of the first")
    except RuntimeError as refused:
        assert f"is being written by run {first.run_id[:8]} (STARTED): wait for it" in str(refused)
    light.instance.report_run_canceled(first)
    claim(Running(light.instance, second), folder, 1)
    assert json.loads((folder / "1.json").read_text()) == {"run_id": second.run_id}


def test_a_killed_evolve_gives_its_run_back(light: InProcess) -> None:
    store = light.project.store
    dead = begin(light, dg.DagsterRunStatus.STARTED, **{EVOLVE_TAG: "yes"})
    alive = begin(light, dg.DagsterRunStatus.STARTED, **{EVOLVE_TAG: "yes"})
    other = begin(light, dg.DagsterRunStatus.STARTED)
    with living_run(store, alive.run_id):
        assert end_dead_runs(light.instance, store) == [dead.run_id]
    statuses = [light.instance.get_run_by_id(run.run_id).status.value for run in (dead, alive, other)]
    assert statuses == ["FAILURE", "STARTED", "STARTED"]
    assert list((store / ".claims" / "evolve").iterdir()) == []
    FileLock(store / ".claims" / "evolve" / alive.run_id, timeout=0).acquire().lock.release()


def test_a_failed_blocking_check_keeps_the_next_iteration_from_training(light: InProcess) -> None:
    light.run(None)
    plant(light.project, "check", "light/s1", Ref("dataset", 0))
    assert failed_inputs(light.instance, light.loop) == []
    assert not light.run(0).success
    refused = failed_inputs(light.instance, light.loop)
    assert len(refused) == 1 and refused[0].startswith("dataset[0]: blocking check failed")
    result = light.run(1)
    assert not result.success
    assert f"dataset[0]: blocking check failed: {', '.join(sorted(BLOCKING))}" in light.why(result)
    assert not any(step["k"] == 1 for step in steps_log(light.project))


def test_a_stale_input_is_refused_unless_it_is_accepted(light: InProcess) -> None:
    light.make(0)
    plant(light.project, "salt", "light/s1", Ref("verdicts", 0))
    light.run(0, "verdicts")
    result = light.run(1)
    assert "dataset[0] is stale (verdicts[0] is now" in light.why(result)
    assert "materialize iteration 0 first, or set accept_stale_input" in light.why(result)
    accepted = {"resources": {"store": {"config": {"accept_stale_input": True}}}}
    assert light.run(1, config=accepted).success
    record = light.loop.record(light.instance, Ref("planner_sft", 1))
    assert record is not None and record.accepted_stale_input


def test_raising_k_keeps_what_is_there(light: InProcess) -> None:
    light.make(2)
    before = light.loop.records(light.instance)
    (light.project.root / "experiments" / "light.yaml").write_text(EXPERIMENT.replace("iterations: 2", "iterations: 3"))
    after = light.loop.records(light.instance)
    assert after == before and light.loop.stale(after) == {}
    assert light.run(3).success
    made = light.loop.record(light.instance, Ref("planner_sft", 3))
    assert made is not None and made.input("dataset").data_version == light.version("dataset", 2)
    # D_2 was the last one when it was made; its twin knew the iteration that did not exist yet
    assert stale_in_dagster(light) == {}
    plant(light.project, "salt", "light/s1", Ref("dataset", 2))
    assert light.run(2, "dataset").success
    assert {"planner_sft[3]", "grounder[3]"} <= set(stale_in_dagster(light))


def test_another_seed_or_experiment_leaves_the_first_alone(light: InProcess) -> None:
    light.make(0)
    before = light.loop.records(light.instance)
    (light.project.root / "experiments" / "light.yaml").write_text(EXPERIMENT.replace("[1, 2]", "[1, 2, 3]"))
    (light.project.root / "experiments" / "more.yaml").write_text(EXPERIMENT)
    third = dataclasses.replace(light.loop, seed=3)
    assert light.run(0, loop=third).success
    assert light.loop.records(light.instance) == before and light.loop.stale(before) == {}


def test_a_changed_configuration_marks_what_reads_it(light: InProcess) -> None:
    light.make(1)
    (light.project.root / "experiments" / "light.yaml").write_text(EXPERIMENT + "grpo: {kl_beta: 0.5}\n")
    stale = light.loop.stale(light.loop.records(light.instance))
    assert "code or configuration changed" in stale[Ref("planner", 1)].cause
    # the base pair was not trained, and the pools of iteration 0 hold open models only: M_0, D_0 and π_1 stay
    assert {ref.iteration for ref in stale} == {1} and Ref("planner_sft", 1) not in stale and Ref("dataset", 1) in stale


def test_the_archive_has_every_version(light: InProcess) -> None:
    light.make(0)
    first = light.loop.record(light.instance, Ref("verdicts", 0))
    plant(light.project, "salt", "light/s1", Ref("verdicts", 0))
    light.run(0, "verdicts", "dataset")
    archived = archive(light.project, light.instance)
    assert first is not None and [r.ref for r in archived.records if r.asset == "verdicts"] == [first.ref] * 2
    assert not archived.is_current(first) and archived.newest("light/s1", "verdicts", 0) != first
    now = light.loop.records(light.instance)
    assert {record.ref: record for record in archived.current.values()} == now
    assert [r.ref for r in archived.lineage(now[Ref("dataset", 0)])] == [
        Ref("dataset", 0),
        Ref("verdicts", 0),
        Ref("candidate_plans", 0),
        Ref("benchmark_steps"),
        Ref("open_models"),
    ]


def test_a_job_is_finished_when_its_artifact_is_current(light: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    light.make(0)
    assert finished_jobs(light.project, light.instance) == set()  # there is no scratch folder
    (light.project.store / ".scratch" / "light-s1-verdicts-0-0123456789ab").mkdir(parents=True)
    read: list[str] = []
    records = Loop.records

    def noticed(loop: Loop, *of: Any) -> Any:
        read.append(loop.name)
        return records(loop, *of)

    monkeypatch.setattr(Loop, "records", noticed)
    assert {"light-s1-verdicts-0", "light-s1-planner-0"} <= finished_jobs(light.project, light.instance)
    assert "light-s1-verdicts-1" not in finished_jobs(light.project, light.instance)
    assert set(read) == {"light/s1"}  # of sixty loops, reading all takes seconds
    plant(light.project, "salt", "light/s1", Ref("candidate_plans", 0))
    light.run(0, "candidate_plans")
    assert "light-s1-verdicts-0" not in finished_jobs(light.project, light.instance)
    assert unfinished_runs(light.instance) == []
    running = begin(light, dg.DagsterRunStatus.STARTED)
    assert unfinished_runs(light.instance) == [running.run_id]


def test_a_message_names_the_dagster_instance_that_has_the_input(light: InProcess) -> None:
    where = f"this is the Dagster instance in {light.instance.root_directory}"
    missing = light.why(light.run(0, "planner_sft"))
    assert "open_models does not exist" in missing and missing.endswith(f"({where})")
    home = light.project.prepare_dagster_home()
    with dg.DagsterInstance.from_config(str(home)) as instance:
        assert dataclasses.replace(light, instance=instance).run(None, "open_models").success
    missing = light.why(light.run(0, "planner_sft"))
    assert missing.endswith(f"({where}; the project's own, {home}, has it: set DAGSTER_HOME={home})")
    (home / "dagster.yaml").unlink()
    (home / "dagster.yaml").write_text("storage: [half a dra")
    assert light.why(light.run(0, "planner_sft")).endswith(f"({where}; the project's own, {home}, cannot be opened)")


def test_results_of_a_loop_without_an_iteration_name_its_stale_inputs(
    light: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert light.run(None).success
    file = light.project.root / "experiments" / "light.yaml"
    file.write_text(file.read_text().replace("path: data,", "path: others,"))
    monkeypatch.setattr(ledger, "open_instance", lambda _: light.instance)
    text = run(light.project.root, "results", "light")
    assert "no iteration of light/s1 was made yet" in text and "stale: benchmark_steps: " in text
