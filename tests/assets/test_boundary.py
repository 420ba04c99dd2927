"""The boundary between iterations, with the real daemon and the real web server.

Light makers take the place of the heavy ones; see light.py. Runs of several loops go on at the same time.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from coepg_dagster.assets.build import LIGHT

from coepg_dagster.processes import is_alive
from coepg_dagster.provenance import LOOP, SHARED, Ref
from tests.assets.light import plant, steps_log
from tests.deployment import Deployment
from tests.project import run as coepg

pytestmark = [pytest.mark.slow, pytest.mark.long]


def keys(loop: str, assets: Sequence[str] = LOOP) -> list[list[str]]:
    experiment = loop.split("/")[0]
    return [[experiment, asset] if asset in SHARED else [*loop.split("/"), asset] for asset in assets]


@dataclass
class Begun:
    """What runs at the same time: all of light/s1, light/s2, a run that lacks its input, and one that hangs."""

    everything: str  # backfill
    second_seed: str  # backfill
    no_input: str  # run
    hanging: str  # run


@pytest.fixture(scope="module")
def begun(deployment: Deployment) -> Begun:
    for mine, other in (("light/s1", "light/s2"), ("light/s2", "light/s1")):
        plant(deployment.project, "meet", mine, Ref("dataset", 0), other)  # a step that holds no slot
    everything = deployment.backfill(keys("light/s1", (*SHARED, *LOOP, "evolution_report")), ["0", "1", "2"])
    shared = deployment.launch(keys("other/s1", SHARED), None)
    plant(deployment.project, "worker", "other/s1", Ref("planner_sft", 0))
    deployment.wait(
        lambda: len([step for step in steps_log(deployment.project) if step["loop"] == "light/s1"]) >= len(SHARED),
        "benchmark_steps and open_models",
    )
    second_seed = deployment.backfill(keys("light/s2"), ["0", "1", "2"])
    deployment.wait_run(shared, "SUCCESS")
    hanging = deployment.launch(keys("other/s1", ["planner_sft"]), "0")
    no_input = deployment.launch(keys("other/s2", ["dataset"]), "1")
    return Begun(everything, second_seed, no_input, hanging)


def test_an_iteration_without_the_one_before_refuses(deployment: Deployment, begun: Begun) -> None:
    assert deployment.wait_run(begun.no_input, "FAILURE")
    assert "verdicts[1] does not exist: materialize verdicts[1] first" in deployment.why(begun.no_input)
    without = deployment.launch(keys("other/s2", ["planner_sft"]), "1")
    # its step waits for the slot of the hanging run until that is cancelled
    begun.no_input = without


def test_two_runs_of_one_partition_exclude_each_other(deployment: Deployment, begun: Begun) -> None:
    pids = deployment.project.store / ".scratch" / "hanging" / "pids.json"
    deployment.wait(pids.exists, "the worker of the hanging run")
    second = deployment.launch(keys("other/s1", ["data_quality"]), "0")
    assert deployment.wait_run(second, "FAILURE")
    assert f"iteration 0 is being written by run {begun.hanging[:8]}" in deployment.why(second)


def test_a_cancelled_run_leaves_no_process_and_no_half_result(deployment: Deployment, begun: Begun) -> None:
    store = deployment.project.store
    worker, child = json.loads((store / ".scratch" / "hanging" / "pids.json").read_text())
    assert is_alive(worker) and is_alive(child)
    deployment.terminate(begun.hanging)
    assert deployment.wait_run(begun.hanging, "CANCELED")
    deployment.wait(lambda: not is_alive(worker) and not is_alive(child), "the worker and its child to be gone")
    assert not (store / "other" / "s1").exists()
    assert [path for path in (store / ".drafts").iterdir() if path.name.startswith("other-s1")] == []


def test_the_slot_of_a_cancelled_run_comes_back(deployment: Deployment, begun: Begun) -> None:
    (deployment.project.root / "control" / "worker-other-s1-planner_sft-0").unlink()
    again = deployment.launch(keys("other/s1", ["planner_sft"]), "0")
    assert deployment.wait_run(again, "SUCCESS")
    assert deployment.wait_run(begun.no_input, "FAILURE")
    assert "dataset[0] does not exist: materialize dataset[0] first" in deployment.why(begun.no_input)


def test_a_killed_run_is_made_again_by_itself_from_where_it_was(deployment: Deployment, begun: Begun) -> None:
    """The process of the run ends at once, as if the kernel or a machine had ended it."""
    pids = deployment.project.store / ".scratch" / "hanging" / "pids.json"
    pids.unlink(missing_ok=True)
    planted = plant(deployment.project, "worker", "other/s1", Ref("verdicts", 0))
    killed = deployment.launch(keys("other/s1"), "0")
    deployment.wait(pids.exists, "the worker")
    processes = json.loads(pids.read_text())
    planted.unlink()
    os.kill(deployment.process_of(killed), signal.SIGKILL)
    (again,) = deployment.wait(lambda: deployment.runs(dagster__parent_run_id=killed), "Dagster to start it again")
    assert deployment.wait_run(again["runId"], "SUCCESS")
    assert deployment.status(killed) == "FAILURE" and not any(is_alive(pid) for pid in processes)
    steps = [step for step in steps_log(deployment.project) if step["run"] in (killed, again["runId"])]
    assert sorted(step["asset"] for step in steps) == sorted(LOOP)  # each once
    assert {"verdicts", "dataset", "data_quality"} <= {s["asset"] for s in steps if s["run"] == again["runId"]}
    # a run that nobody killed makes the same
    assert deployment.wait_run(deployment.launch(keys("other/s2"), "0"), "SUCCESS")
    assert versions(deployment, "other/s1") == versions(deployment, "other/s2")
    # a step that refused is not tried again
    assert deployment.runs(dagster__parent_run_id=begun.no_input) == []


def versions(deployment: Deployment, loop: str) -> dict[str, str]:
    """Asset → data version of iteration 0."""
    nodes = deployment.graphql(
        'query($k: [AssetKeyInput!]!) { assetNodes(assetKeys: $k) { assetKey { path } dataVersion(partition: "0") } }',
        k=[{"path": key} for key in keys(loop)],
    )["assetNodes"]
    found = {node["assetKey"]["path"][-1]: node["dataVersion"] for node in nodes}
    assert None not in found.values()
    return found


def test_materialize_all_goes_in_order(deployment: Deployment, begun: Begun) -> None:
    assert deployment.wait_backfill(begun.everything) == "COMPLETED_SUCCESS"
    runs = deployment.runs(dagster__backfill=begun.everything)
    assert [run["tags"].get("dagster/partition") for run in runs] == [None, "0", "1", "2", None]
    assert [run["tags"].get("coepg/iteration") for run in runs] == [None, "0", "1", "2", None]
    assert {run["tags"]["coepg/experiment"] for run in runs} == {"light", "light/s1"}
    steps = [step for step in steps_log(deployment.project) if step["loop"] == "light/s1"]
    assert [step["k"] for step in steps] == [None] * len(SHARED) + sorted([0, 1, 2] * len(LOOP))
    assert all(before["end"] <= after["start"] for before, after in pairwise(steps))


def test_a_backfill_goes_in_order_and_takes_turns_with_another(deployment: Deployment, begun: Begun) -> None:
    assert deployment.wait_backfill(begun.second_seed) == "COMPLETED_SUCCESS"
    steps = [step for step in steps_log(deployment.project) if step["loop"].startswith("light/")]
    second = [step["k"] for step in steps if step["loop"] == "light/s2"]
    assert second == sorted([0, 1, 2] * len(LOOP))
    runs = {step["run"] for step in steps}
    spans = [[step for step in steps if step["run"] == run] for run in runs]
    both_at_once = [
        (a, b) for a in spans for b in spans
        if a[0]["loop"] < b[0]["loop"] and a[0]["start"] < b[-1]["end"] and b[0]["start"] < a[-1]["end"]
    ]  # fmt: skip
    assert both_at_once, "no two runs went on at the same time: the test shows nothing"
    pooled = [step for step in steps if step["asset"] not in LIGHT and step["asset"] not in SHARED]
    assert all(before["end"] <= after["start"] for before, after in pairwise(pooled))


@pytest.fixture(scope="module")
def failing(deployment: Deployment, begun: Begun) -> str:
    """A backfill in which iteration 1 fails although an older version of it is there."""
    assert deployment.wait_backfill(begun.second_seed) == "COMPLETED_SUCCESS"
    plant(deployment.project, "fail", "light/s2", Ref("verdicts", 1))
    return deployment.backfill(keys("light/s2"), ["1", "2"])


def test_the_same_content_makes_nothing_stale(deployment: Deployment, begun: Begun, failing: str) -> None:
    assert deployment.wait_run(deployment.launch(keys("light/s1"), "1"), "SUCCESS")
    assert deployment.stale(keys("light/s1"), "2") == {}
    assert stale_in_results(deployment, "light/s1") == {}


def test_other_content_makes_exactly_its_readers_stale(deployment: Deployment, begun: Begun, failing: str) -> None:
    plant(deployment.project, "salt", "light/s1", Ref("dataset", 1))
    assert deployment.wait_run(deployment.launch(keys("light/s1", ["dataset", "data_quality"]), "1"), "SUCCESS")
    stale = deployment.stale(keys("light/s1"), "2")
    assert set(stale) == {"planner_sft", "grounder", "planner", "dataset", "data_quality"}
    assert all("previous/dataset" in str(causes) or "new data version" in str(causes) for causes in stale.values())
    assert deployment.stale(keys("light/s1"), "1") == {}
    everything = stale_in_results(deployment, "light/s1")
    assert set(everything) == {f"{asset}[2]" for asset in LOOP}
    assert all("dataset[1] is now" in why for why in everything.values())


def test_an_older_version_is_no_substitute_for_a_failed_one(deployment: Deployment, begun: Begun, failing: str) -> None:
    assert deployment.wait_backfill(failing) == "COMPLETED_FAILED"
    first, second = deployment.runs(dagster__backfill=failing)
    assert (first["status"], second["status"]) == ("FAILURE", "FAILURE")
    assert f"dataset[1] was not made by backfill {failing}" in deployment.why(second["runId"])


def test_a_run_goes_on_from_its_failure(deployment: Deployment, begun: Begun, failing: str) -> None:
    assert deployment.wait_backfill(failing) == "COMPLETED_FAILED"
    (deployment.project.root / "control" / "fail-light-s2-verdicts-1").unlink()
    failed = deployment.runs(dagster__backfill=failing)[0]["runId"]
    again = deployment.launch(keys("light/s2"), "1", parent=failed, tags={"dagster/backfill": failing})
    assert deployment.wait_run(again, "SUCCESS")
    made = [step["asset"] for step in steps_log(deployment.project) if step["run"] == again]
    assert made == ["verdicts", "dataset", "data_quality"]
    assert deployment.wait_run(deployment.launch(keys("light/s2"), "2"), "SUCCESS")
    assert stale_in_results(deployment, "light/s2") == {}


def stale_in_results(deployment: Deployment, loop: str) -> dict[str, str]:
    """`asset[k]` → why, as `coepg results` says."""
    table: dict[str, Any] = json.loads(coepg(deployment.project.root, "results", loop, "--json"))
    return {f"{asset}[{row['iteration']}]": why for row in table["iterations"] for asset, why in row["stale"].items()}
