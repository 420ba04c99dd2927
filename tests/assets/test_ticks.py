"""The sensors, ticked by a real daemon; what the conditions decide is in test_automation.py."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from coepg_dagster.assets.automation import REGENERATION, REPORT

from coepg_dagster.provenance import LOOP, SHARED, Ref
from tests.assets.light import plant, steps_log
from tests.deployment import Deployment, Webhook
from tests.project import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.long]

Asked = list[tuple[str | None, set[str]]]


def asked(deployment: Deployment, loop: str, since: float = 0) -> list[dict[str, Any]]:
    """The runs that the sensor asked for since then, oldest first; `of`: the partition, and the assets of the loop."""
    places = (loop.split("/"), loop.split("/")[:1])
    runs = []
    for run in deployment.runs(dagster__sensor_name="automation"):
        assets = {key["path"][-1] for key in run["assetSelection"] if key["path"][:-1] in places}
        if assets and run["creationTime"] >= since:
            runs.append(run | {"of": (run["tags"].get("dagster/partition"), assets)})
    return runs


def after(deployment: Deployment, loop: str, since: float, number: int) -> Asked:
    """What the sensor has asked for since then, when these are so many runs, all ended, and it looked twice again."""
    deployment.wait(
        lambda: (
            len(runs := asked(deployment, loop, since)) >= number
            and all(run["status"] in ("SUCCESS", "FAILURE") for run in runs)
        ),
        f"{number} runs of {loop}",
        1500,
    )
    rest(deployment)
    return [run["of"] for run in asked(deployment, loop, since)]


def rest(deployment: Deployment) -> None:
    """Waits until the sensor has looked twice."""
    now = time.time()

    def looked() -> bool:
        ticks = [tick for tick in deployment.ticks("automation") if tick["timestamp"] > now]
        assert all(tick["error"] is None for tick in ticks), ticks
        return sum(tick["status"] != "STARTED" for tick in ticks) > 1

    deployment.wait(looked, "two ticks")


def new_data(deployment: Deployment, loop: str, text: str | None) -> str:
    """Makes D_0 again, with other content or (None) with the same; returns the run."""
    if text is not None:
        plant(deployment.project, "salt", loop, Ref("dataset", 0), text)
    run = deployment.launch([[*loop.split("/"), "dataset"]], "0")
    deployment.wait_run(run)
    return run


def by_cron(deployment: Deployment, partition: str, since: float = 0) -> list[set[str]]:
    """What of an iteration of timed/s1 cron ticks have asked for."""
    of = [run["of"] for run in asked(deployment, "timed/s1", since)]
    return [assets for k, assets in of if k == partition and assets <= {*REGENERATION, "evaluation"}]


@pytest.fixture(scope="module", autouse=True)
def raised(deployment: Deployment) -> Iterator[float]:
    """When K of `timed` was raised, after cron ticks with the old one. The daemon sees it when it loads the code anew."""
    deployment.switch_on("automation", "alert")
    deployment.wait(lambda: by_cron(deployment, "1"), "cron ticks of timed/s1", 1500)
    file = deployment.project.root / "experiments" / "timed.yaml"
    file.write_text(file.read_text().replace("iterations: 1", "iterations: 2"))
    deployment.load_anew()
    yield time.time()
    deployment.switch_off("automation")


def test_the_daemon_makes_everything_in_order_and_rests(deployment: Deployment) -> None:
    everything = [(None, {*SHARED}), ("0", {*LOOP}), ("1", {*LOOP}), (None, {REPORT})]
    for loop in ("driven/s1", "driven/s2"):
        assert after(deployment, loop, 0, 4) == everything
        steps = [step for step in steps_log(deployment.project) if step["loop"] == loop and step["k"] is not None]
        assert [step["k"] for step in steps] == [0] * len(LOOP) + [1] * len(LOOP)
    now = time.time()
    assert deployment.status(new_data(deployment, "driven/s1", None)) == "SUCCESS"
    rest(deployment)
    assert asked(deployment, "driven/s1", now) == []


def test_the_page_of_an_asset_says_why_it_was_made(deployment: Deployment) -> None:
    """What *Automation* shows: the parts of the condition by their labels, and the run that a tick asked for."""
    docs = (REPOSITORY / "docs" / "using-the-ui.md").read_text().replace("\n", " ")
    sentence = docs.partition("**Why was it made, or not?**")[2].partition("The tick's log")[0]
    answer = deployment.graphql(
        "query($key: AssetKeyInput) { assetConditionEvaluationRecordsOrError(assetKey: $key, limit: 100) {"
        " ... on AssetConditionEvaluationRecords { records { numRequested evaluationNodes { userLabel } } } } }",
        key={"path": ["driven", "s1", "planner"]},
    )["assetConditionEvaluationRecordsOrError"]
    labels = {node["userLabel"] for record in answer["records"] for node in record["evaluationNodes"]}
    named = set(re.findall(r"`([^`]+)`", sentence))
    assert len(named) == 5 and named <= labels
    assert any(record["numRequested"] for record in answer["records"])


def test_new_data_leads_to_all_that_comes_after_unless_a_check_blocks_it(deployment: Deployment) -> None:
    now = time.time()
    blocked = plant(deployment.project, "check", "driven/s2", Ref("dataset", 0))
    new_data(deployment, "driven/s2", "bad")
    new_data(deployment, "driven/s1", "other")
    cascade = [("0", {"data_quality"}), ("1", {*LOOP}), (None, {REPORT})]
    assert after(deployment, "driven/s1", now, 3) == cascade
    assert asked(deployment, "driven/s2", now) == []
    blocked.unlink()
    new_data(deployment, "driven/s2", "good")
    assert after(deployment, "driven/s2", now, 3) == cascade


def test_a_run_that_failed_is_reported_once_and_not_tried_again(deployment: Deployment, webhook: Webhook) -> None:
    now = time.time()
    fails = plant(deployment.project, "fail", "driven/s1", Ref("verdicts", 1))
    new_data(deployment, "driven/s1", "again")
    assert after(deployment, "driven/s1", now, 2) == [("0", {"data_quality"}), ("1", {*LOOP})]
    failed = asked(deployment, "driven/s1", now)[1]["runId"]
    deployment.wait(lambda: any(failed == message["run_id"] for message in webhook.taken), "the alert")
    (message,) = [message for message in webhook.taken if message["run_id"] == failed]
    assert message["text"].startswith("driven/s1, iteration 1: run ") and "planted" in message["failed"][0]["why"]
    log = "".join(path.read_text(errors="replace") for path in deployment.home.glob("*.log"))
    assert "token=secret" not in log
    fails.unlink()
    now = time.time()
    new_data(deployment, "driven/s1", "changed")
    assert after(deployment, "driven/s1", now, 3)[1:] == [("1", {*LOOP}), (None, {REPORT})]


def test_cron_ticks_go_on_after_k_was_raised(deployment: Deployment, raised: float) -> None:
    deployment.wait(
        lambda: ("2", {*LOOP}) in [run["of"] for run in asked(deployment, "timed/s1", raised)], "k = 2", 900
    )
    # whole agents are evaluated again, and the newest D_k is regenerated
    deployment.wait(lambda: {*REGENERATION, "evaluation"} in by_cron(deployment, "2", raised), "a cron tick", 1500)
    deployment.wait(lambda: {"evaluation"} in by_cron(deployment, "0", raised), "that of the first agent", 1500)


def test_never_two_runs_of_a_loop_at_once(deployment: Deployment) -> None:
    steps = [step for step in steps_log(deployment.project) if step["loop"] == "driven/s1"]
    spans: dict[str, tuple[float, float]] = {}
    for step in steps:
        start, end = spans.get(step["run"], (step["start"], step["end"]))
        spans[step["run"]] = min(start, step["start"]), max(end, step["end"])
    assert len(spans) > 6
    assert all(before[1] <= later[0] for before, later in pairwise(sorted(spans.values())))
