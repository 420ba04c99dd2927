"""`coepg evolve` beside a real daemon: its runs wait in the queue, and what it makes appears in the web UI."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest
from coepg_dagster.assets.ledger import EVOLVE_TAG, QUEUED

from coepg_dagster.processes import is_alive
from coepg_dagster.provenance import Ref
from tests.assets.light import EXPERIMENT, plant
from tests.deployment import LOCATION, Deployment

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def mine(deployment: Deployment) -> Deployment:
    """An experiment that was added while daemon and web server run, and that nothing shows."""
    text = EXPERIMENT.replace("pool: gpu", "pool: mine").replace("shown: [1, 2]\n", "")
    (deployment.project.root / "experiments" / "mine.yaml").write_text(text)
    return deployment


def evolve(deployment: Deployment, *options: str) -> subprocess.Popen[str]:
    root = deployment.project.root
    env = os.environ | {"COEPG_ROOT": str(root), "DAGSTER_HOME": str(deployment.home)}
    command = [sys.executable, "-m", "coepg_dagster.cli", "evolve", "mine", "--through", "0", *options]
    return subprocess.Popen(command, cwd=root, env=env, stderr=subprocess.PIPE, text=True)


def steps_take(deployment: Deployment, seconds: float) -> None:
    """From now on, and for those that go on: in one piece, since steps look at any time."""
    control = deployment.project.root / "control"
    (control / "new").write_text(str(seconds))
    (control / "new").rename(control / "seconds")


def groups(deployment: Deployment) -> set[str]:
    """The groups of the assets that the web UI shows."""
    nodes: list[dict[str, Any]] = deployment.graphql("{ assetNodes { groupName } }")["assetNodes"]
    return {node["groupName"] for node in nodes}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_cancels_the_queued_run(mine: Deployment, number: signal.Signals, code: int) -> None:
    planted = plant(mine.project, "worker", "mine/s1", Ref("planner_sft", 0))
    pids = mine.project.store / ".scratch" / "hanging" / "pids.json"
    pids.unlink(missing_ok=True)
    process = evolve(mine)
    try:
        mine.wait(lambda: pids.exists() or process.poll() is not None, "the worker of the queued run")
        assert process.poll() is None, process.communicate()[1]
        worker, child = json.loads(pids.read_text())
        [run] = [run for run in mine.runs(coepg__evolve=QUEUED, coepg__iteration="0") if run["status"] == "STARTED"]
        process.send_signal(number)
        _, said = process.communicate(timeout=600)
    finally:
        process.kill()
        planted.unlink()
    assert process.returncode == code, said
    assert "in the queue of the Dagster daemon" in said and f"ended by {number.name}; what was finished is kept" in said
    assert mine.status(run["runId"]) == "CANCELED"
    mine.wait(lambda: not is_alive(worker) and not is_alive(child), "the worker and its child to be gone", 300)
    assert [path for path in (mine.project.store / ".drafts").iterdir() if path.name.startswith("mine-s1")] == []


def test_what_the_command_line_makes_appears_after_a_reload(mine: Deployment) -> None:
    assert not any(group.startswith("mine") for group in groups(mine))
    process = evolve(mine)
    _, said = process.communicate(timeout=1500)
    assert process.returncode == 0, said
    assert "runs are made in this process" not in said
    made = [run for run in mine.runs(coepg__experiment="mine/s1") if run["status"] == "SUCCESS"]
    assert all(run["tags"][EVOLVE_TAG] == QUEUED for run in made)
    assert {"evaluation", "evolution_report"} < {asset["path"][-1] for run in made for asset in run["assetSelection"]}
    mine.graphql(
        "mutation($name: String!) { reloadRepositoryLocation(repositoryLocationName: $name) { __typename } }",
        name=LOCATION,
    )
    mine.wait(lambda: {"mine_inputs", "mine_s1_iteration", "mine_s1_evaluation"} <= groups(mine), "it to appear", 300)
    assert not any(group.startswith("mine_s2") for group in groups(mine))  # a seed that was never used


def test_a_run_that_another_evolve_left_behind_is_awaited(mine: Deployment) -> None:
    """As after a lost connection: the daemon's run goes on, and the next call does not make the same again."""
    shutil.rmtree(mine.project.store / "mine" / "s1" / "evaluation")
    steps_take(mine, 600)
    first = evolve(mine)
    runs = mine.wait(
        lambda: [run for run in mine.runs(coepg__evolve=QUEUED) if run["status"] not in ("SUCCESS", "CANCELED")],
        "a run",
    )
    first.kill()
    first.communicate()
    second, said = evolve(mine), ""
    assert second.stderr is not None
    for line in second.stderr:
        said += line
        if "goes on in the queue" in line:
            steps_take(mine, 0.1)
    second.wait()
    assert f"run {runs[0]['runId'][:8]} goes on in the queue" in said, said
    again = [run for run in mine.runs(coepg__evolve=QUEUED) if run["assetSelection"] == runs[0]["assetSelection"]]
    assert [run["status"] for run in again] == ["SUCCESS"]
