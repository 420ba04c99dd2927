"""Conditions: each decision, in process, with real events. test_ticks.py has them evaluated by a real daemon."""

from __future__ import annotations

import datetime
import shutil
from typing import Any

import dagster as dg
import pytest
from coepg_dagster.assets.automation import (
    REPORT,
    WEBHOOK,
    AlertFailed,
    Todo,
    Turns,
    Watched,
    conditions,
    next_todo,
    post,
    switches,
)
from coepg_dagster.assets.ledger import Loop

from coepg_dagster.provenance import LOOP, SHARED, Ref
from tests.assets.conftest import InProcess
from tests.assets.light import automate, plant
from tests.deployment import Webhook

Runs = list[tuple[int | None, list[str]]]
DATA = ["candidate_plans", "verdicts", "dataset", "data_quality"]
ORDER = [*SHARED, *LOOP, REPORT]


class Automation:
    """The conditions of light/s1, evaluated tick by tick as the sensor does it; half a minute passes between two ticks."""

    def __init__(self, light: InProcess, *what: str) -> None:
        automate(light.project, "light", *what)
        self.light = light
        self.now = datetime.datetime(2030, 1, 5, 12, tzinfo=datetime.UTC)  # a Saturday
        self.cursor: Any = None

    def results(self) -> dict[str, dg.AutomationResult]:
        """Asset of light/s1 → what its condition says now."""
        self.now += datetime.timedelta(seconds=30)
        evaluated = dg.evaluate_automation_conditions(
            self.light.defs, self.light.instance, cursor=self.cursor, evaluation_time=self.now
        )
        self.cursor = evaluated.cursor
        return {result.key.path[-1]: result for result in evaluated.results if "s2" not in result.key.path}

    def tick(self) -> Runs:
        """The runs that a tick asks for: (iteration, assets)."""
        runs: dict[int, list[str]] = {}
        for asset, result in sorted(self.results().items(), key=lambda item: ORDER.index(item[0])):
            true = result.true_subset
            for k in true.expensively_compute_partition_keys() if true.is_partitioned else ["-1"] * true.size:
                runs.setdefault(int(k), []).append(asset)
        return [(None if k == -1 else k, runs[k]) for k in sorted(runs)]

    def settle(self) -> Runs:
        """Makes what is asked for until twice nothing is; returns the runs."""
        made: Runs = []
        rests = 0
        while rests < 2:
            runs = self.tick()
            rests = 0 if runs else rests + 1
            for k, assets in runs:
                self.light.run(k, *assets)  # type: ignore[arg-type]
            made += runs
            assert len(made) < 20, made
        return made

    def tell(self, asset: str) -> dict[str, bool]:
        """The labelled parts of an asset's refresh, as the UI shows them: whether each holds for some iteration."""
        (refresh,) = [r for r in _all(self.results()[asset]) if r.condition.get_label() == "refresh"]
        return {str(part.condition.get_label()): not part.true_subset.is_empty for part in refresh.child_results}


def _all(result: dg.AutomationResult) -> list[dg.AutomationResult]:
    return [result, *(one for child in result.child_results for one in _all(child))]


def salt(light: InProcess, asset: str, k: int, text: str) -> None:
    """Makes other content of an artifact."""
    plant(light.project, "salt", "light/s1", Ref(asset, k), text)  # type: ignore[arg-type]
    assert light.run(k, asset).success  # type: ignore[arg-type]


@pytest.fixture
def short(light: InProcess) -> InProcess:
    file = light.project.root / "experiments" / "light.yaml"
    file.write_text(file.read_text().replace("[1, 2]", "[1]").replace("iterations: 2", "iterations: 1"))
    return light


def test_the_switch_and_the_alert_are_off_until_turned_on(light: InProcess) -> None:
    on = ["checks_after_cancel", "checks_after_failure"]  # they make nothing
    names = [sensor.name for sensor in light.defs.get_repository_def().sensor_defs]
    assert sorted(names) == ["alert", *on]
    automate(light.project, "light", "refresh")
    repository = light.defs.get_repository_def()
    assert sorted(sensor.name for sensor in repository.sensor_defs) == ["alert", "automation", *on]
    assert not repository.schedule_defs
    for sensor in repository.sensor_defs:
        assert sensor.default_status.value == ("RUNNING" if sensor.name in on else "STOPPED") and sensor.description


def test_refresh_makes_everything_in_order_and_rests(short: InProcess) -> None:
    """Then: new content leads to everything after it; the same content and touched files to nothing."""
    light, refresh = short, Automation(short, "refresh")
    light.run(None)
    assert refresh.settle() == [(0, [*LOOP]), (1, [*LOOP]), (None, [REPORT])]
    assert light.run(0, "dataset").success and refresh.settle() == []
    salt(light, "dataset", 0, "other")
    assert refresh.settle() == [(0, ["data_quality"]), (1, [*LOOP]), (None, [REPORT])]
    shutil.rmtree(light.project.store / "light" / "s1" / "dataset" / "1")  # lost files are made again, alone
    assert refresh.settle() == [(1, ["dataset"])]
    (light.project.root / "data" / "rows").write_text("1")  # the same rows in a newer file
    assert refresh.settle() == []
    (light.project.root / "data" / "rows").write_text("1, 2")
    assert refresh.tick() == [(None, ["benchmark_steps"])]
    light.run(None, "benchmark_steps")
    # the base models of iteration 0 do not depend on the rows
    assert refresh.tick() == [(0, [*DATA, "evaluation"])]


def test_a_run_that_failed_is_not_tried_again_until_something_changed(short: InProcess) -> None:
    light, refresh = short, Automation(short, "refresh")
    planted = plant(light.project, "fail", "light/s1", Ref("planner", 0))
    # what the failed run did make is no change
    assert refresh.settle() == [(None, [*SHARED]), (0, [*LOOP])]
    assert light.loop.record(light.instance, Ref("grounder", 0)) is not None
    assert [label for label, holds in refresh.tell("planner").items() if not holds] == [
        "it did not fail before with the same inputs and code, and no other loop starts at this tick"
    ]
    left = [asset for asset in LOOP if asset not in ("planner_sft", "grounder")]
    assert light.run(None, "open_models").success and refresh.settle() == []  # the same content
    file = light.project.root / "experiments" / "light.yaml"
    file.write_text(file.read_text() + "grpo: {max_steps: 7}\n")
    assert refresh.settle() == [(0, left)]
    planted.unlink()
    assert refresh.settle() == []
    assert light.run(0, "planner").success  # by hand
    assert refresh.tick() == [(0, left[1:])]


def test_refresh_waits_while_something_of_the_loop_is_made(short: InProcess) -> None:
    light, refresh = short, Automation(short, "refresh")
    light.run(None)
    job = light.defs.resolve_implicit_global_asset_job_def()
    made = frozenset({light.loop.key("planner")})
    run = light.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, asset_selection=made)
    assert refresh.tick() == [] and not refresh.tell("planner")["nothing of the loop is being made"]
    light.instance.report_run_failed(run)
    light.instance.add_run_tags(run.run_id, {"dagster/will_retry": "true"})  # as Dagster does, with run_retries
    assert refresh.tick() == []
    light.instance.add_run_tags(run.run_id, {"dagster/auto_retry_run_id": "x"})
    assert refresh.tick() == [(0, [*LOOP])]


def test_the_next_iteration_waits_for_the_blocking_checks_of_the_data(short: InProcess) -> None:
    light, refresh = short, Automation(short, "refresh")
    planted = plant(light.project, "check", "light/s1", Ref("dataset", 0))
    made = refresh.settle()
    assert made[:2] == [(None, [*SHARED]), (0, [*LOOP])] and all(k != 1 for k, _ in made)
    planted.unlink()
    salt(light, "dataset", 0, "mended")
    assert refresh.tick() == [(0, ["data_quality"])] and light.run(0, "data_quality").success
    assert refresh.tick() == [(1, [*LOOP])]


def test_agents_are_evaluated_nightly_and_the_newest_data_regenerated_weekly(short: InProcess) -> None:
    light, automation = short, Automation(short, "evaluate_nightly", "regenerate_weekly")

    def at(day: int, hour: int) -> Runs:
        automation.now = datetime.datetime(2030, 1, day, hour, tzinfo=datetime.UTC)
        return automation.settle()

    light.run(None)
    automation.tick()
    assert at(6, 4) == []  # both ticks have passed, there is nothing to make again
    light.run(0)
    assert automation.settle() == []
    assert at(7, 3) == [(0, ["evaluation"])]
    assert at(8, 1) == []
    file = light.project.root / "experiments" / "light.yaml"
    file.write_text(file.read_text().replace("iterations: 1", "iterations: 3"))
    assert automation.settle() == []
    assert at(13, 4) == [(0, [*DATA, "evaluation"])]
    light.run(1)
    assert automation.settle() == []
    assert at(20, 4) == [(0, ["evaluation"]), (1, [*DATA, "evaluation"])]


def test_each_seed_goes_on_for_itself_in_runs_of_its_own(light: InProcess) -> None:
    file = light.project.root / "experiments" / "light.yaml"
    file.write_text(file.read_text().replace("iterations: 2", "iterations: 1"))
    automate(light.project, "light", "refresh")
    plant(light.project, "fail", "light/s2", Ref("verdicts", 0))
    cursor, asked = None, []
    for _ in range(5):
        evaluated = dg.evaluate_automation_conditions(light.defs, light.instance, cursor=cursor)
        cursor, keys, partition = evaluated.cursor, [], None
        for result in evaluated.results:
            if not result.true_subset.is_empty:
                keys.append(result.key)
                if result.true_subset.is_partitioned:
                    (partition,) = result.true_subset.expensively_compute_partition_keys()
        asked.append(({key.path[1] for key in keys}, partition))
        light.defs.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=light.instance, partition_key=partition, asset_selection=keys, raise_on_error=False
        )
    assert asked == [({*SHARED}, None), ({"s1"}, "0"), ({"s1"}, "1"), ({"s1"}, None), ({"s2"}, "0")]


def test_a_loop_that_cannot_be_looked_at_stops_no_other(light: InProcess) -> None:
    file = light.project.root / "experiments" / "light.yaml"
    file.with_name("broken.yaml").write_text(file.read_text())
    for name in ("broken", "light"):
        automate(light.project, name, "refresh")
    for seed in ("s1", "s2"):  # by hand, without a record
        light.instance.report_runless_asset_event(dg.AssetMaterialization(["broken", seed, "planner"], partition="0"))
    evaluated = dg.evaluate_automation_conditions(light.defs, light.instance)
    asked = {result.key.path[0] for result in evaluated.results if not result.true_subset.is_empty}
    assert asked == {"light"}


@pytest.mark.filterwarnings("ignore::dagster.BetaWarning")
def test_what_decides_together_stays_in_one_sensor(light: InProcess) -> None:
    """Dagster evaluates 500 conditions in one sensor."""
    experiment = light.project.experiments()["light"].model_copy(update={"automation": ["refresh"]})
    loops = [Loop(experiment, seed, light.project.root) for seed in range(100)]
    decided = [set(conditions(Watched(loop, loops, Turns()), "0 0 * * *", "0 0 * * *")) for loop in loops]
    sensors = switches(decided, 30)
    targets = [set(sensor.asset_selection.selected_keys) for sensor in sensors]
    assert [sensor.name for sensor in sensors] == ["automation", "automation_2"]
    assert all(len(target) <= 500 for target in targets) and sum(map(len, targets)) == 902
    assert all(sum(keys <= target for target in targets) == 1 for keys in decided)


def test_the_command_line_makes_the_same_runs_as_refresh(light: InProcess) -> None:
    assert next_todo(light.instance, light.loop, 0) == Todo(None, SHARED)
    light.make(0)
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
