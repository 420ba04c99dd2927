"""Driving the loop from the command line: one run per iteration, in order, with its progress in the terminal."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import dagster as dg
from coepg_dagster.assets.automation import Todo, next_todo, prefix, run_tags
from coepg_dagster.assets.ledger import EVOLVE_TAG, Loop, end_dead_runs, living_run
from coepg_dagster.resources.training import Processes, Training, default_resources
from dagster._core.utils import make_new_run_id
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from coepg_dagster.project import Project

_PROGRESS: Final = re.compile(r"(\d+)/(\d+) ?(.*)")
_QUIET: Final = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


Place: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Where the heavy steps run: resource → fields of `resources.training.Processes`."""


class RunFailed(RuntimeError):
    """A run of the loop failed; the message says which step, why, and where to look."""


def evolve_through(
    defs: dg.Definitions,
    instance: dg.DagsterInstance,
    loop: Loop,
    through: int,
    console: Console,
    place: Place | None = None,
    first: int = 0,
) -> int:
    """Makes what is missing or stale in iterations `first`..`through`, and the report; returns the number of runs.

    Iterations before `first` are left as they are: what is read of them must be there and current.
    `place` says where the heavy steps run.
    """
    for run_id in end_dead_runs(instance, Project(loop.root).store):
        console.print(f"run {run_id[:8]} was killed; what it had finished is used")
    runs, last = 0, None
    while (todo := next_todo(instance, loop, through, first)) is not None:
        if todo == last:
            raise RunFailed(
                f"{', '.join(todo.assets)} of iteration {todo.iteration} were made and are still not current: "
                f"look at `coepg results {loop.name}`"
            )
        _run(defs, instance, loop, todo, console, place)
        runs, last = runs + 1, todo
    return runs


def make_inputs(defs: dg.Definitions, instance: dg.DagsterInstance, loop: Loop, console: Console) -> None:
    """Makes the unpartitioned inputs of an experiment where they are missing or stale: its seeds share them."""
    todo = next_todo(instance, loop, -1)
    if todo is not None and (shared := tuple(asset for asset in todo.assets if asset in loop.shared)):
        _run(defs, instance, loop, Todo(None, shared), console)


def _run(
    defs: dg.Definitions,
    instance: dg.DagsterInstance,
    loop: Loop,
    todo: Todo,
    console: Console,
    place: Place | None = None,
) -> None:
    iteration = todo.iteration
    job = defs.resolve_job_def(f"{prefix(loop)}_{'unpartitioned' if iteration is None else 'iteration'}")
    run_id = make_new_run_id()
    title = f"{loop.name} k={'–' if iteration is None else iteration}"
    with living_run(Project(loop.root).store, run_id), Watch(instance, run_id, title, console):
        result = job.execute_in_process(
            instance=instance,
            run_id=run_id,
            partition_key=None if iteration is None else str(iteration),
            asset_selection=[loop.key(asset) for asset in todo.assets],
            tags=run_tags(loop, iteration) | {EVOLVE_TAG: "yes"},
            run_config=_QUIET | {"resources": {key: {"config": dict(fields)} for key, fields in (place or {}).items()}},
            raise_on_error=False,
        )
    if not result.success:
        raise RunFailed(_why(instance, run_id, iteration))


def place_of(
    device: str | None, train_device: str | None = None, processes: int | None = None, ray: str | None = None
) -> Place:
    """What a person says of where the heavy steps run, by resource; what is None is left as it is.

    Args:
        device: `cpu` or `cuda`; `train_device` the same for training alone.
        processes: that share inference.
        ray: address of a Ray cluster.
    """
    place = {}
    for key, resource in default_resources().items():
        if isinstance(resource, Processes):
            on = (train_device or device) if isinstance(resource, Training) else device
            fields = {"device": on, "processes": processes, "launcher": "ray" if ray else None, "ray_address": ray}
            place[key] = {name: value for name, value in fields.items() if value is not None}
    return place


def _why(instance: dg.DagsterInstance, run_id: str, iteration: int | None) -> str:
    """The first failed step of a run and its message."""
    for entry in instance.all_logs(run_id):
        if entry.dagster_event and entry.dagster_event.is_step_failure:
            failure = entry.dagster_event.step_failure_data
            message = failure.user_failure_data.description if failure.user_failure_data else None
            if message is None and failure.error is not None:
                cause = failure.error.cause or failure.error
                message = cause.message
            return f"run {run_id[:8]}, {entry.step_key}, iteration {iteration}: {(message or 'failed').strip()}"
    return f"run {run_id[:8]} of iteration {iteration} failed before any step: see the run in `make ui`"


class Watch:
    """A progress bar per step of a run, read from the instance's event log while the run goes on."""

    def __init__(self, instance: dg.DagsterInstance, run_id: str, title: str, console: Console) -> None:
        self._instance, self._run_id, self._title = instance, run_id, title
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        self._bars: dict[str, TaskID] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._cursor: str | None = None

    def __enter__(self) -> Watch:
        self._progress.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._read()
        self._progress.stop()

    def _follow(self) -> None:
        while not self._stop.wait(1.0):
            self._read()

    def _read(self) -> None:
        if not self._instance.has_run(self._run_id):
            return
        news = self._instance.get_records_for_run(self._run_id, self._cursor)
        self._cursor = news.cursor
        for entry in (record.event_log_entry for record in news.records):
            step = entry.step_key
            if step is None or step.endswith("record_checks"):
                continue
            event = entry.dagster_event
            if event is None:
                found = _PROGRESS.fullmatch(entry.user_message)
                if found and step in self._bars:
                    self._progress.update(
                        self._bars[step], completed=int(found[1]), total=int(found[2]), figures=found[3]
                    )
            elif event.is_step_start:
                name = step.rpartition("__")[2]
                self._bars[step] = self._progress.add_task(f"{self._title} {name}", total=1, figures="")
            elif event.is_step_success and step in self._bars:
                task = self._progress.tasks[self._bars[step]]
                self._progress.update(self._bars[step], completed=task.total)
