"""Dagster's launcher of local runs, which also knows runs whose code server is gone, and its queue, which keeps iterations in
order; dagster.yaml names both.

Dagster cancels a run, and sees that its process has ended, through the code server that started it. Where that was killed, a
cancelled run would go on while its slots are given away, and a run whose process has ended would count as started for ever.
Dagster puts the runs of a backfill into the queue by their partitions as texts: iteration 10 before 2, so that it would lack
its inputs.
"""

from __future__ import annotations

import signal
import socket

import dagster as dg
import psutil
from coepg_dagster.assets.internals import (
    CheckRunHealthResult,
    DagsterUserCodeUnreachableError,
    LaunchRunContext,
    SubmitRunContext,
    WorkerStatus,
)

BACKFILL_TAG, PRIORITY_TAG = "dagster/backfill", "dagster/priority"
HOST_TAG = "coepg/host"
"""Tag with the machine of a run."""


class RunCoordinator(dg.QueuedRunCoordinator):
    """Queues runs as Dagster does; those of a backfill leave the queue by their iterations."""

    def submit_run(self, context: SubmitRunContext) -> dg.DagsterRun:
        run = context.dagster_run
        iteration = run.tags.get("dagster/partition", "")
        if BACKFILL_TAG in run.tags and iteration.isdecimal():
            self._instance.add_run_tags(run.run_id, {PRIORITY_TAG: f"-{iteration}"})
        return super().submit_run(context)


class RunLauncher(dg.DefaultRunLauncher):
    """Launches runs as Dagster does; cancels and watches those without a code server by their processes."""

    def launch_run(self, context: LaunchRunContext) -> None:
        self._instance.add_run_tags(context.dagster_run.run_id, {HOST_TAG: socket.gethostname()})
        super().launch_run(context)

    def terminate(self, run_id: str) -> bool:
        """Interrupts a run, or keeps it from starting; returns whether somebody was there to be interrupted, or will not be."""
        run = self._instance.get_run_by_id(run_id)
        try:
            interrupted = bool(super().terminate(run_id))  # type: ignore[no-untyped-call]
        except DagsterUserCodeUnreachableError:
            pid = None if run is None else _pid(self._instance, run)
            worker = None if pid is None else _worker(pid)
            interrupted = worker is not None
            if worker is not None:
                worker.send_signal(signal.SIGINT)  # as its code server would have done
        if run is not None and run.status is dg.DagsterRunStatus.STARTING:
            # its process leaves what it finds cancelled alone; else Dagster would count it as lost, and make the run again
            self._instance.report_run_canceled(run)
            return True
        return interrupted

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        if is_gone(self._instance, run):
            return CheckRunHealthResult(WorkerStatus.FAILED, "its process is gone: it was killed")
        return CheckRunHealthResult(WorkerStatus.RUNNING)


def what_it_lacks(instance: dg.DagsterInstance) -> str | None:
    """What an instance cannot do that RunLauncher and RunCoordinator can, as where its dagster.yaml is older; None: nothing."""
    if {type(instance.run_launcher), type(instance.run_coordinator)}.isdisjoint(
        (dg.DefaultRunLauncher, dg.QueuedRunCoordinator)
    ):
        return None
    return (
        f"{instance.root_directory}/dagster.yaml does not name the project's launcher and queue of runs: a run whose code "
        "server was killed cannot be cancelled, and its end is not seen; a backfill makes iteration 10 before 2: copy "
        "`run_launcher` and `run_coordinator` (in place of `run_queue`) from the dagster.yaml of the project"
    )


def is_gone(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Whether the process that Dagster started for a run on this machine has ended; False where that cannot be told."""
    pid = _pid(instance, run)
    return pid is not None and _worker(pid) is None


def _pid(instance: dg.DagsterInstance, run: dg.DagsterRun) -> int | None:
    """The id of the process that Dagster started for a run; None for a run of another machine, or before it said so."""
    if run.tags.get(HOST_TAG) != socket.gethostname():
        return None
    for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        event = entry.dagster_event
        if event is not None and (event.message or "").startswith("Started process for run"):
            return int(str(event.engine_event_data.metadata["pid"].value))
    return None


def _worker(pid: int) -> psutil.Process | None:
    """The process of a run, if it is alive; the id may be another process's by now."""
    try:
        process = psutil.Process(pid)
        alive = process.status() != psutil.STATUS_ZOMBIE and "multiprocessing" in " ".join(process.cmdline())
        return process if alive else None
    except psutil.NoSuchProcess:
        return None
