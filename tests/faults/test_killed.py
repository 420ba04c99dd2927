"""Processes that are killed with SIGKILL at random moments: the loop goes on, and ends with what it would have been."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from coepg_dagster.resources import warm

from coepg_dagster.processes import is_alive
from coepg_dagster.provenance import Ref
from tests.assets.light import light_project, plant
from tests.faults.evolving import evolving, kill, left_over, output_of, versions
from tests.project import REPOSITORY, Forked, make_project
from tests.reproducible import dataset_versions

TINY = REPOSITORY / "tests" / "experiments" / "tiny.yaml"


@pytest.fixture
def bare_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Light steps need no models: the server that processes are forked from imports Dagster alone."""
    monkeypatch.setattr(warm, "_server", None)
    monkeypatch.setattr(warm, "IMPORTED", [])
    yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "through", "kills"),
    [(0, 0, 6), *(pytest.param(seed, 1, 12, marks=pytest.mark.long) for seed in range(1, 6))],
)
def test_evolve_that_is_killed_again_and_again_ends_with_the_same_artifacts(
    seed: int, through: int, kills: int, tmp_path: Path, bare_server: None
) -> None:
    whole, began = light_project(tmp_path / "whole"), time.monotonic()
    undisturbed = evolving(whole, through=through)
    assert undisturbed.wait(600) == 0, output_of(whole)
    seconds = time.monotonic() - began
    lines, rng = len(output_of(whole).splitlines()), random.Random(seed)
    killed, at_work, end = light_project(tmp_path / "killed"), 0, time.monotonic() + 1200
    (killed.root / "output").touch()
    for _ in range(kills):
        process = evolving(killed, through=through)
        before, some = len(output_of(killed).splitlines()), rng.randint(0, 2 * lines // kills)
        while len(output_of(killed).splitlines()) < before + some and process.poll() is None:
            assert time.monotonic() < end, output_of(killed)
            time.sleep(0.02)  # by what is done, not by time: the speed of a busy machine changes
        try:
            # a small share of the whole run, which a quick machine ends within seconds
            process.wait(rng.uniform(0, seconds / (4 * kills)))
        except subprocess.TimeoutExpired:
            kill(process.pid)
            code = process.wait(60)
            assert code in (-signal.SIGKILL, 0)  # 0: it was at its end already
            at_work += code != 0
    last = evolving(killed, through=through)
    assert last.wait(600) == 0, output_of(killed)
    assert at_work, "it was never killed at work"
    assert versions(killed) == versions(whole)
    assert left_over(killed) == []


@pytest.mark.slow
@pytest.mark.long
def test_a_worker_that_is_killed_takes_its_children_with_it_and_fails_its_step(
    tmp_path: Path, bare_server: None
) -> None:
    """As the kernel does when memory is full."""
    project = light_project(tmp_path / "project")
    planted = plant(project, "worker", "light/s1", Ref("planner_sft", 0))
    process = evolving(project)
    pids = project.store / ".scratch" / "hanging" / "pids.json"
    end = time.monotonic() + 200
    while not pids.exists() and time.monotonic() < end:
        time.sleep(0.2)
    worker, child = json.loads(pids.read_text())
    kill(worker)
    assert process.wait(200) == 1
    assert not is_alive(worker) and not is_alive(child)
    assert "which the kernel sends when main memory is full: then use fewer processes" in output_of(project)
    planted.unlink()
    again = evolving(project)
    assert again.wait(300) == 0, output_of(project)
    assert left_over(project) == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_so_does_the_loop_with_its_models_whichever_of_its_processes_is_killed(seed: int, tmp_path: Path) -> None:
    """SFT, GRPO, candidates, verdicts, evaluation in two processes: the victim is any process below `coepg evolve`, or it."""
    whole, killed = (make_project(tmp_path / name, TINY) for name in ("whole", "killed"))
    started = time.monotonic()
    process = Forked(whole, "evolve", "tiny", "--through", "1", "--processes", "2")
    out, err = process.communicate(1800)
    assert process.returncode == 0, f"{out}\n{err}"
    seconds, rng, victims = time.monotonic() - started, random.Random(seed), []
    for _ in range(8):
        process = Forked(killed, "evolve", "tiny", "--through", "1", "--processes", "2")
        try:
            process._process.wait(rng.uniform(0.05, 0.35) * seconds)
        except subprocess.TimeoutExpired:
            evolve = psutil.Process(process._process.pid)
            family = [evolve, *evolve.children(recursive=True)]
            victim = rng.choice(family)
            victims.append(" ".join(victim.cmdline())[-60:])
            kill(victim.pid)
            process.communicate(600)  # it ends by itself: with its step, or because its parent is gone
            gone = time.monotonic() + 60
            while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family if _is_ours(one)):
                assert time.monotonic() < gone, f"{victims[-1]} was killed: {[one for one in family if _is_ours(one)]}"
                time.sleep(0.5)
    process = Forked(killed, "evolve", "tiny", "--through", "1", "--processes", "2")
    out, err = process.communicate(1800)
    assert process.returncode == 0, f"{victims}\n{out}\n{err}"
    assert dataset_versions(killed, "tiny", 1) == dataset_versions(whole, "tiny", 1), victims
    made = [sorted(str(path.relative_to(root)) for path in (root / "store" / "tiny").rglob("*") if path.is_dir())
            for root in (whole, killed)]  # fmt: skip
    made = [[path for path in folders if "/evolution_report/all/" not in path] for folders in made]  # it shows minutes
    assert made[0] == made[1], victims
    assert not list((killed / "store" / ".drafts").iterdir()) and not list(
        (killed / "store" / ".claims/evolve").iterdir()
    )


def _is_ours(process: psutil.Process) -> bool:
    """Whether a process of a killed family is still there, and not another with its number."""
    try:
        return process.is_running() and os.getsid(process.pid) != os.getsid(0)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False
