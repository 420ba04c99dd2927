"""Every sensor and schedule, ticked by a real daemon; what they decide is in test_automation.py."""

from __future__ import annotations

from typing import Any

import pytest
from coepg_dagster.assets.ledger import EXPERIMENT_TAG, ITERATION_TAG

from coepg_dagster.provenance import LOOP
from tests.assets.light import steps_log
from tests.deployment import Deployment, Webhook

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def refreshed(deployment: Deployment) -> Deployment:
    """A loop that was made by `refresh` alone; the sensors are on from the deployment's start."""
    deployment.wait(
        lambda: "current" in _last(deployment, "driven_s1_refresh")["skipReason"], "refresh to be done", 900
    )
    return deployment


def _last(deployment: Deployment, name: str) -> dict[str, Any]:
    ticks = [tick for tick in deployment.ticks(name) if tick["status"] != "STARTED"]
    assert not ticks or ticks[0]["error"] is None, ticks[0]
    return {"skipReason": "", "runIds": []} | {k: v for tick in ticks[:1] for k, v in tick.items() if v is not None}


def test_the_daemon_refreshes_in_order(refreshed: Deployment) -> None:
    runs = refreshed.runs(dagster__sensor_name="driven_s1_refresh")
    assert [run["status"] for run in runs] == ["SUCCESS"] * 4
    assert [run["tags"].get(ITERATION_TAG) for run in runs] == [None, "0", "1", None]
    assert {run["tags"][EXPERIMENT_TAG] for run in runs} == {"driven/s1"}
    steps = [step for step in steps_log(refreshed.project) if step["loop"] == "driven/s1"]
    assert [step["k"] for step in steps] == [None, None] + [0] * len(LOOP) + [1] * len(LOOP)


def test_the_daemon_evolves_alerts_and_keeps_its_schedules(refreshed: Deployment, webhook: Webhook) -> None:
    schedules = ["driven_s1_evaluate_nightly", "driven_s1_regenerate_weekly"]
    refreshed.switch_on(schedules=schedules)
    failing = refreshed.launch([["driven", "s2", "data_quality"]], "1")
    first = refreshed.launch([["driven", "s2", asset] for asset in LOOP], "0")
    refreshed.wait_run(failing, "FAILURE")
    refreshed.wait_run(first, "SUCCESS")
    evolved = refreshed.wait(lambda: refreshed.runs(dagster__sensor_name="driven_s2_evolve"), "evolve to start a run")
    assert [run["tags"]["dagster/partition"] for run in evolved] == ["1"]
    assert refreshed.wait_run(evolved[0]["runId"], "SUCCESS")
    for name, partitions in zip(schedules, ({"0", "1"}, {"1"}), strict=True):
        refreshed.wait(
            lambda name=name, partitions=partitions: (
                {run["tags"]["dagster/partition"] for run in refreshed.runs(dagster__schedule_name=name)} == partitions
            ),
            f"{name} to run",
        )
    refreshed.switch_off(*schedules)
    refreshed.wait(lambda: any(failing == message["run_id"] for message in webhook.taken), "the alert")
    message = next(message for message in webhook.taken if message["run_id"] == failing)
    assert message["text"].startswith("driven/s2, iteration 1: run ")
    assert "does not exist: materialize" in message["failed"][0]["why"]
    log = "".join(path.read_text(errors="replace") for path in refreshed.home.glob("*.log"))
    assert "token=secret" not in log
