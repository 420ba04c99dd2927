"""The checks of D_k, with its real maker: what fails blocks, what warns does not."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
from coepg_dagster.assets.loop import dataset as real_dataset
from coepg_dagster.assets.stage import Outcome, StageContext

from coepg_dagster.artifacts import CANDIDATES, STEPS, VERDICTS, write_steps, write_table
from coepg_dagster.pools.trends import WARNINGS
from coepg_dagster.provenance import Ref
from tests.assets.conftest import InProcess
from tests.assets.light import LIGHT_MAKERS, light_project, steps_log
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
