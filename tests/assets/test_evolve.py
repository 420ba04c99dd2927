"""`coepg evolve` against the UI's runs: the same results, and never both at once."""

from __future__ import annotations

import json
from pathlib import Path

import dagster as dg
import pytest
from coepg_dagster.assets.evolve import RunFailed, evolve_through, place_of
from rich.console import Console

from coepg_dagster.provenance import LOOP, Ref
from tests.assets.conftest import InProcess
from tests.assets.light import light_project, plant

QUIET = Console(quiet=True)


def versions(light: InProcess) -> dict[str, str]:
    return {str(ref): record.data_version for ref, record in light.loop.records(light.instance).items()}


def evolve(light: InProcess, through: int) -> int:
    return evolve_through(light.defs, light.instance, light.loop, through, QUIET)


def test_training_may_run_on_another_device_than_inference() -> None:
    assert place_of(None) == {"sft": {}, "grpo_cdrem": {}, "regeneration": {}}
    place = place_of("cpu", "cuda", processes=4)
    assert {key: fields["device"] for key, fields in place.items()} == {
        "sft": "cuda",
        "grpo_cdrem": "cuda",
        "regeneration": "cpu",
    }
    assert all(fields["processes"] == 4 for fields in place.values())


def test_the_command_line_makes_what_the_ui_makes(light: InProcess, tmp_path: Path) -> None:
    assert evolve(light, 1) == 4  # inputs, two iterations, report
    assert evolve(light, 1) == 0
    with dg.DagsterInstance.ephemeral() as instance:
        other = InProcess(light_project(tmp_path / "other"), instance)
        assert other.run(None, "open_models").success and other.run(None, "benchmark_steps").success
        assert other.run(0).success
        for asset in LOOP:  # one asset of one iteration after the other
            assert other.run(1, asset).success
        assert versions(light) == versions(other)
        assert evolve(other, 1) == 1  # the report


def test_evolve_goes_on_after_a_failure(light: InProcess) -> None:
    planted = plant(light.project, "fail", "light/s1", Ref("verdicts", 0))
    with pytest.raises(RunFailed, match=r"verdicts, iteration 0: .*planted failure"):
        evolve(light, 0)
    kept = light.loop.record(light.instance, Ref("candidate_plans", 0))
    planted.unlink()
    assert evolve(light, 0) == 2
    assert light.loop.record(light.instance, Ref("candidate_plans", 0)) == kept


def test_evolve_refuses_an_iteration_that_another_run_writes(light: InProcess) -> None:
    light.run(None)
    job = light.defs.resolve_implicit_global_asset_job_def()
    other = light.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    claims = light.project.store / ".claims" / "light" / "s1"
    claims.mkdir(parents=True)
    (claims / "0.json").write_text(json.dumps({"run_id": other.run_id}))
    with pytest.raises(RunFailed, match=f"iteration 0 is being written by run {other.run_id[:8]}"):
        evolve(light, 0)
    light.instance.report_run_canceled(other)
    assert evolve(light, 0) == 2
