"""Sensors and schedules: each decision, in process, with real events. test_ticks.py has them ticked by a real daemon."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from coepg_dagster.assets.automation import WEBHOOK, AlertFailed, Todo, next_todo, post
from coepg_dagster.assets.ledger import EXPERIMENT_TAG, ITERATION_TAG

from coepg_dagster.provenance import LOOP, SHARED, Ref
from tests.assets.conftest import InProcess
from tests.assets.light import light_project, plant
from tests.deployment import Webhook


def tick(light: InProcess, name: str, cursor: str | None = None) -> Any:
    """What a sensor decides now."""
    repository = light.defs.get_repository_def()
    with dg.build_sensor_context(light.instance, cursor=cursor, repository_def=repository) as context:
        return repository.get_sensor_def(name).evaluate_tick(context)


def requested(decision: Any) -> list[tuple[str | None, list[str]]]:
    """(partition, asset names) of each run that was asked for."""
    return [
        (request.partition_key, [key.path[-1] for key in request.asset_selection or []])
        for request in decision.run_requests
    ]


def make_all(light: InProcess) -> None:
    assert light.run(None).success
    for k in range(3):
        assert light.run(k).success
    assert light.run(None, "evolution_report").success


def test_everything_is_off_until_it_is_turned_on(light: InProcess) -> None:
    repository = light.defs.get_repository_def()
    for definition in (*repository.sensor_defs, *repository.schedule_defs):
        assert definition.default_status.value == "STOPPED" and definition.description


def test_refresh_makes_what_is_missing_in_order(light: InProcess) -> None:
    made = []
    while runs := requested(tick(light, "light_s1_refresh")):
        ((partition, assets),) = runs
        made.append((partition, assets))
        assert light.run(None if partition is None else int(partition), *assets).success
    assert made == [
        (None, list(SHARED)), ("0", list(LOOP)), ("1", list(LOOP)), ("2", list(LOOP)), (None, ["evolution_report"])
    ]  # fmt: skip
    assert "everything is there and current" in tick(light, "light_s1_refresh").skip_message


def test_new_rows_lead_to_the_start_and_everything_after_it_and_touched_files_to_nothing(light: InProcess) -> None:
    make_all(light)
    (light.project.root / "data" / "rows").write_text("1")  # the same rows in a newer file
    assert requested(tick(light, "light_s1_refresh")) == [(None, ["benchmark_steps"])]
    light.run(None, "benchmark_steps")
    assert tick(light, "light_s1_refresh").run_requests == []
    (light.project.root / "data" / "rows").write_text("1, 2")
    assert requested(tick(light, "light_s1_refresh")) == [(None, ["benchmark_steps"])]
    light.run(None, "benchmark_steps")
    ((partition, assets),) = requested(tick(light, "light_s1_refresh"))
    # the base models of iteration 0 do not depend on the rows
    assert partition == "0" and assets == ["candidate_plans", "verdicts", "dataset", "data_quality", "evaluation"]
    light.run(0, *assets)
    assert requested(tick(light, "light_s1_refresh")) == [("1", list(LOOP))]


def test_refresh_does_not_repeat_what_failed_until_something_changed(light: InProcess) -> None:
    light.run(None)
    plant(light.project, "fail", "light/s1", Ref("planner", 0))
    first = tick(light, "light_s1_refresh").run_requests[0]
    assert first.tags[EXPERIMENT_TAG] == "light/s1" and first.tags[ITERATION_TAG] == "0"
    light.run(0, "planner")
    assert tick(light, "light_s1_refresh").run_requests[0].run_key == first.run_key
    light.run(0, "grounder")
    assert tick(light, "light_s1_refresh").run_requests[0].run_key != first.run_key


def test_refresh_waits_for_a_run_that_goes_on(light: InProcess) -> None:
    light.run(None)
    job = light.defs.resolve_implicit_global_asset_job_def()
    light.instance.create_run_for_job(
        job, status=dg.DagsterRunStatus.STARTED, asset_selection=frozenset({light.loop.key("planner")})
    )
    assert "is making something of light/s1" in tick(light, "light_s1_refresh").skip_message


def test_evolve_starts_the_next_iteration_when_a_dataset_has_landed(light: InProcess) -> None:
    light.run(None)
    assert tick(light, "light_s1_evolve").run_requests == []
    light.run(0)
    decision = tick(light, "light_s1_evolve")
    assert requested(decision) == [("1", list(LOOP))]
    assert decision.run_requests[0].tags == {
        EXPERIMENT_TAG: "light/s1", ITERATION_TAG: "1",
        **{k: v for k, v in decision.run_requests[0].tags.items() if k.startswith("dagster/")},
    }  # fmt: skip
    assert tick(light, "light_s1_evolve", decision.cursor).run_requests == []
    light.run(1)
    light.run(2)
    assert "D_2 is the last one" in tick(light, "light_s1_evolve", decision.cursor).skip_message


def test_evolve_does_not_go_on_from_a_failed_check(light: InProcess) -> None:
    light.run(None)
    plant(light.project, "check", "light/s1", Ref("dataset", 0))
    light.run(0)
    assert "blocking check failed" in tick(light, "light_s1_evolve").skip_message


def test_evolve_does_not_go_on_from_something_stale(light: InProcess) -> None:
    light.run(None)
    light.run(0)
    plant(light.project, "salt", "light/s1", Ref("verdicts", 0))
    light.run(0, "verdicts")
    assert "dataset[0] is stale" in tick(light, "light_s1_evolve").skip_message


def test_schedules_ask_for_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    # a schedule opens its instance by reference: one in memory has none
    instance = dg.DagsterInstance.local_temp(str(tmp_path / "home"))
    light = InProcess(light_project(tmp_path / "project"), instance)

    def due(name: str) -> list[Any]:
        now = datetime.datetime(2030, 1, 6, 3, tzinfo=datetime.UTC)
        with dg.build_schedule_context(light.instance, scheduled_execution_time=now) as context:
            decided = light.defs.get_repository_def().get_schedule_def(name)(context)
            return list(decided) if isinstance(decided, Iterator) else [decided]

    assert "no agent yet" in due("light_s1_evaluate_nightly")[0].skip_message
    assert "no D_k yet" in due("light_s1_regenerate_weekly")[0].skip_message
    light.run(None)
    light.run(0)
    light.run(1)
    assert [request.partition_key for request in due("light_s1_evaluate_nightly")] == ["0", "1"]
    assert [request.partition_key for request in due("light_s1_regenerate_weekly")] == ["1"]


def test_the_command_line_makes_the_same_runs_as_refresh(light: InProcess) -> None:
    assert next_todo(light.instance, light.loop, 0) == Todo(None, SHARED)
    light.run(None)
    light.run(0)
    assert next_todo(light.instance, light.loop, 0) == Todo(None, ("evolution_report",))
    assert next_todo(light.instance, light.loop, 1) == Todo(1, LOOP)


def test_an_alert_says_what_failed(light: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    webhook = Webhook()
    monkeypatch.setenv(WEBHOOK, webhook.url)
    plant(light.project, "fail", "light/s1", Ref("planner_sft", 0))
    light.run(None)
    result = light.run(0)
    context = dg.build_run_status_sensor_context(
        "alert",
        next(event for event in result.all_events if event.is_failure and not event.is_step_failure),
        light.instance,
        light.instance.get_run_by_id(result.run_id),
    ).for_run_failure()
    repository = light.defs.get_repository_def()
    repository.get_sensor_def("alert")(context)
    webhook.shutdown()
    (message,) = webhook.taken
    assert message["text"] == (
        f"light/s1, iteration 0: run {result.run_id[:8]} failed: light__s1__planner_sft: RuntimeError: planted failure"
    )
    assert {"step": "light__s1__planner_sft", "why": "RuntimeError: planted failure"} in message["failed"]


def test_the_log_does_not_hear_of_the_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Webhook() as taking, caplog.at_level("INFO"):
        monkeypatch.setenv(WEBHOOK, taking.url)
        post({"text": "x"})
        taking.shutdown()
    assert taking.taken == [{"text": "x"}] and "secret" not in caplog.text


def test_a_failed_alert_never_shows_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WEBHOOK, raising=False)
    with pytest.raises(AlertFailed, match=f"{WEBHOOK} is not set"):
        post({})
    with Webhook(status=500) as refusing:
        secret = refusing.url
        monkeypatch.setenv(WEBHOOK, secret)
        with pytest.raises(AlertFailed, match="status 500"):
            post({})
        refusing.shutdown()
    for address, says in (
        (secret, "cannot be reached"),
        ("file:///etc/secret", "not an http or https"),
        ("http://[::1?secret", "not an http or https"),
    ):
        monkeypatch.setenv(WEBHOOK, address)
        with pytest.raises(AlertFailed, match=says) as failed:
            post({})
        assert "secret" not in str(failed.value)
