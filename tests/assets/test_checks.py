"""The checks of D_k, with its real maker: what fails blocks, what warns does not."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
from coepg_dagster.assets.checks import CHECKS, check_specs, with_limits
from coepg_dagster.assets.evolve import evolve_through
from coepg_dagster.assets.loop import dataset as real_dataset
from coepg_dagster.assets.stage import Outcome, StageContext
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from coepg_dagster.artifacts import CANDIDATES, STEPS, VERDICTS, write_steps, write_table
from coepg_dagster.experiment.schema import Quality
from coepg_dagster.pools.trends import WARNINGS
from coepg_dagster.provenance import LOOP, Ref
from tests.assets.conftest import InProcess
from tests.assets.light import LIGHT_MAKERS, light_project, plant, steps_log
from tests.auditing.loop import GIVEN, TABLE, WRITTEN
from tests.conftest import step, step_table


def leaking(work: StageContext) -> Outcome:
    """A benchmark whose test split shows the screenshot of a training step."""
    rows = TABLE.to_pylist()
    leak = step("x", split="test_seed", screenshot=rows[0]["screenshot"], boxes=rows[0]["boxes"])
    write_steps(step_table(*rows, leak), work.draft / STEPS, ["train", "test_seed"])
    return Outcome([STEPS], {})


def plans(work: StageContext) -> Outcome:
    write_table(WRITTEN[0], work.draft / CANDIDATES)
    return Outcome([CANDIDATES], {})


def votes(work: StageContext) -> Outcome:
    write_table(GIVEN[0], work.draft / VERDICTS)
    return Outcome([VERDICTS], {})


REAL = {"benchmark_steps": leaking, "candidate_plans": plans, "verdicts": votes, "dataset": real_dataset}


def test_a_leak_keeps_the_next_iteration_from_training(tmp_path: Path) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        light = InProcess(light_project(tmp_path / "project"), instance, {"makers": LIGHT_MAKERS | REAL})
        assert light.run(None).success
        assert not light.run(0).success
        record = light.loop.record(instance, Ref("dataset", 0))
        assert record is not None and record.failed_checks == ["no_test_steps"]
        result = light.run(1)
        assert "dataset[0]: blocking check failed: no_test_steps; look at the check" in light.why(result)
        assert not any(made["k"] == 1 for made in steps_log(light.project))
        # what the experiment allows does not block, and says in the file that it is allowed
        file = light.project.root / "experiments" / "light.yaml"
        file.write_text(file.read_text() + "quality: {shared_steps_at_most: 50}\n")
        assert light.run(0, "dataset", "data_quality").success and light.run(1, "planner_sft").success


def test_a_trend_warns_and_blocks_nothing(light: InProcess) -> None:
    purity = [70.0, 70.0, 20.0]

    def worse(work: StageContext) -> Outcome:
        outcome = LIGHT_MAKERS["data_quality"](work)
        return Outcome(outcome.content, outcome.figures | {"purity": purity[work.k]})

    light.settings["makers"] = LIGHT_MAKERS | {"data_quality": worse}
    light.run(None)
    assert light.run(0).success
    for k, holds in ((1, True), (2, False)):
        result = light.run(k)
        assert result.success
        results = {
            e.check_name: e
            for e in result.get_asset_check_evaluations()
            if e.asset_key == light.loop.key("data_quality")
        }
        assert WARNINGS["data_quality"].keys() <= results.keys()
        assert results["purity_holds"].passed is holds
        assert results["purity_holds"].severity is dg.AssetCheckSeverity.WARN
    assert light.run(2, "data_quality").success
    assert light.loop.stale(light.loop.records(light.instance)) == {}


def shown(light: InProcess, asset: str) -> dict[str, dict[str, str]]:
    """Partition → check → status, as the page of a check shows them."""
    keys = [spec.key for spec in check_specs(light.loop, asset)]
    found = dict[str, dict[str, str]]()
    for info in light.instance.event_log_storage.get_asset_check_partition_info(keys):
        assert info.partition_key is not None
        found.setdefault(info.partition_key, {})[info.check_key.name] = info.latest_execution_status.value
    return found


def newest(light: InProcess, asset: str) -> set[str]:
    """The statuses of an asset's checks in the graph: the newest of each, whatever its partition."""
    keys = [spec.key for spec in check_specs(light.loop, asset)]
    return {
        one.status.value
        for one in light.instance.event_log_storage.get_latest_asset_check_execution_by_key(keys).values()
    }


def test_a_failed_iteration_leaves_the_checks_of_others_as_they_are(light: InProcess) -> None:
    light.make(0)
    planted = plant(light.project, "fail", "light/s1", Ref("verdicts", 1))
    assert not light.run(1).success
    for asset in LOOP:
        found = shown(light, asset)
        made = asset in ("planner_sft", "grounder", "planner", "candidate_plans")
        assert set(found["0"].values()) == {"SUCCEEDED"}, asset
        assert found["1"].keys() == found["0"].keys()
        assert set(found["1"].values()) == {"SUCCEEDED" if made or asset == "evaluation" else "PLANNED"}, asset
        assert newest(light, asset) == {"SUCCEEDED"}, asset
    planted.unlink()
    assert light.run(1, "verdicts", "dataset", "data_quality", "evaluation").success
    assert all(set(of.values()) == {"SUCCEEDED"} for asset in LOOP for of in shown(light, asset).values())


def test_a_new_version_fails_the_checks_of_what_read_the_old_one(light: InProcess) -> None:
    light.make(2)
    plant(light.project, "salt", "light/s1", Ref("dataset", 0))
    assert light.run(0, "dataset", "data_quality").success
    states = {asset: {k: of["inputs_current"] for k, of in shown(light, asset).items()} for asset in LOOP}
    assert states == {asset: {"0": "SUCCEEDED", "1": "FAILED", "2": "FAILED"} for asset in LOOP}
    plant(light.project, "salt", "light/s1", Ref("dataset", 0), "other")  # what is told twice
    assert light.run(0, "dataset", "data_quality").success
    for k in (1, 2):
        assert light.run(k).success
    assert all(of["inputs_current"] == "SUCCEEDED" for asset in LOOP for of in shown(light, asset).values())


def test_checks_that_a_killed_run_never_evaluated_are_evaluated_on_resume(light: InProcess) -> None:
    light.make(0)
    keys = {light.loop.key(asset) for asset in ("dataset", "evaluation")}
    job = light.defs.resolve_implicit_global_asset_job_def().get_subset(asset_selection=keys)
    run = light.instance.create_run_for_job(job, asset_selection=keys, tags={"dagster/partition": "0"})
    assert set(shown(light, "dataset")["0"].values()) == {"PLANNED"}
    light.instance.report_run_failed(run)
    evolve_through(light.defs, light.instance, light.loop, 0, Console(quiet=True))
    for asset in ("dataset", "evaluation"):
        assert set(shown(light, asset)["0"].values()) == newest(light, asset) == {"SUCCEEDED"}


@pytest.mark.parametrize("ends", ["cancel", "failure"])
def test_a_run_that_ends_before_its_first_step_leaves_the_checks_as_they_are(light: InProcess, ends: str) -> None:
    light.make(0)
    plant(light.project, "check", "light/s1", Ref("dataset", 0))
    light.run(0, "dataset")
    before = {asset: (shown(light, asset), newest(light, asset)) for asset in ("dataset", "evaluation")}
    assert before["dataset"][1] >= {"FAILED"}
    keys = {light.loop.key(asset) for asset in before}
    job = light.defs.resolve_implicit_global_asset_job_def().get_subset(asset_selection=keys)
    run = light.instance.create_run_for_job(job, asset_selection=keys, tags={"dagster/partition": "1"})
    assert newest(light, "dataset") == {"PLANNED"}
    (light.instance.report_run_canceled if ends == "cancel" else light.instance.report_run_failed)(run)
    last = light.instance.all_logs(run.run_id)[-1].dagster_event
    ended = light.instance.get_run_by_id(run.run_id)
    assert last is not None and ended is not None and ended.is_finished
    sensor = light.defs.get_repository_def().get_sensor_def(f"checks_after_{ends}")
    sensor(dg.build_run_status_sensor_context(sensor.name, last, light.instance, ended))
    for asset in before:
        assert (shown(light, asset)["0"], newest(light, asset)) == (before[asset][0]["0"], before[asset][1])


def test_a_cancelled_step_leaves_the_checks_as_they_are(light: InProcess) -> None:
    def cancelled(work: StageContext) -> Outcome:
        raise dg.DagsterExecutionInterruptedError

    light.make(0)
    light.settings["makers"] = LIGHT_MAKERS | {"candidate_plans": cancelled}
    assert not light.run(1).success
    for asset in LOOP:
        assert newest(light, asset) == {"SUCCEEDED"}, asset


def test_the_reason_of_a_failed_check_is_told_and_those_behind_it_are_not_failed(light: InProcess) -> None:
    light.make(0)
    plant(light.project, "check", "light/s1", Ref("planner_sft", 0))
    assert not light.run(0).success
    assert shown(light, "planner_sft")["0"] == {
        "weights_are_whole": "FAILED",
        "inputs_current": "SUCCEEDED",
        "sft_learns": "SUCCEEDED",
    }
    assert newest(light, "evaluation") == {"SUCCEEDED"}


@given(
    st.builds(
        Quality, shared_steps_at_most=st.floats(0, 100), purity_may_fall=st.floats(0, 100), legible_px=st.floats(1, 99)
    )
)
def test_every_check_says_its_limit(quality: Quality) -> None:
    texts = {
        name: with_limits(text, quality) for of in (*CHECKS.values(), *WARNINGS.values()) for name, text in of.items()
    }
    assert not any("{" in text.replace("D_{k-1}", "") for text in texts.values())
    for name, limit in (
        ("no_test_steps", f"at most {quality.shared_steps_at_most:g} %"),
        ("purity_holds", f"more than {quality.purity_may_fall:g} points"),
        ("targets_are_legible", f"less than {quality.legible_px:g} px"),
    ):
        assert limit in texts[name]


def test_every_asset_of_an_iteration_has_its_checks_by_partition(light: InProcess) -> None:
    for asset in LOOP:
        specs = check_specs(light.loop, asset)
        assert {"inputs_current", *CHECKS.get(asset, ()), *WARNINGS.get(asset, ())} == {spec.name for spec in specs}
        assert all(spec.description and spec.partitions_def for spec in specs)
