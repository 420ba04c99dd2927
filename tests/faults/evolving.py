"""`coepg evolve` over light makers in its own process, and what a loop may leave behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import dagster as dg
from coepg_dagster.assets.ledger import Loop
from coepg_dagster.resources.launcher import job_environment
from coepg_dagster.resources.warm import WarmProcess

from coepg_dagster.project import Project
from tests.project import REPOSITORY

MODULE = "tests.faults.evolve_light"


def evolving(project: Project, loop: str = "light/s1", through: int = 0) -> WarmProcess:
    """Starts it, as a fork of a process that has Dagster imported; its output is in `output_of(project)`."""
    home = project.prepare_dagster_home()
    return WarmProcess(
        MODULE,
        [str(project.root), loop, str(through)],
        env=job_environment(1) | {"COEPG_ROOT": str(project.root), "DAGSTER_HOME": str(home)},
        cwd=REPOSITORY,
        output=project.root / "output",
        starts_jobs=True,
    )


def output_of(project: Project) -> str:
    return (project.root / "output").read_text()


@contextlib.contextmanager
def opened(project: Project) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.from_config(str(project.dagster_home)) as instance:
        yield instance


def versions(project: Project, loop: str = "light/s1", instance: dg.DagsterInstance | None = None) -> dict[str, str]:
    """The data version of every current artifact of a loop."""
    with contextlib.ExitStack() as stack:
        known = instance or stack.enter_context(opened(project))
        experiment, seed = loop.split("/s")
        records = Loop(project.experiments()[experiment], int(seed), project.root).records(known)
        assert not records.lost
        return {str(ref): record.data_version for ref, record in records.items()}


def left_over(project: Project, pool: str = "gpu") -> list[str]:
    """What must not outlive a run: runs that seem to go on, slots, claims of the living, drafts, half-written files."""
    with opened(project) as instance:
        left = [f"run {run.run_id} is {run.status.value}" for run in instance.get_runs() if not run.is_finished]
        slots = instance.event_log_storage.get_concurrency_info(pool)
        left += [f"a slot of {slot.run_id}" for slot in slots.claimed_slots]
        left += [f"a step of {step.run_id} waits for a slot" for step in slots.pending_steps]
    for folder in (".claims/evolve", ".drafts"):
        place = project.store / folder
        left += [str(path) for path in place.iterdir()] if place.is_dir() else []
    return left + [str(path) for path in project.store.rglob("*.partial")]


def kill(pid: int, number: int = 9) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
