"""What this project uses of Dagster that is not public. Nothing else imports it; a test fails where a new Dagster changes it.

Each function says what it is for, and so why nothing public does: a public way, once there is one, replaces it here alone.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import dagster as dg
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.definitions.asset_checks.asset_check_evaluation import AssetCheckEvaluationTargetMaterializationData
from dagster._core.definitions.data_version import DATA_VERSION_TAG
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.definitions.repository_definition import SINGLETON_REPOSITORY_NAME
from dagster._core.errors import DagsterUserCodeUnreachableError as DagsterUserCodeUnreachableError
from dagster._core.event_api import PartitionKeyFilter
from dagster._core.execution.api import execute_run
from dagster._core.execution.context.system import PlanOrchestrationContext
from dagster._core.execution.plan.plan import ExecutionPlan
from dagster._core.execution.retries import RetryMode
from dagster._core.executor.in_process import InProcessExecutor
from dagster._core.launcher import CheckRunHealthResult as CheckRunHealthResult
from dagster._core.launcher import LaunchRunContext as LaunchRunContext
from dagster._core.launcher import WorkerStatus as WorkerStatus
from dagster._core.origin import DEFAULT_DAGSTER_ENTRY_POINT, JobPythonOrigin, RepositoryPythonOrigin
from dagster._core.remote_origin import RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.run_coordinator import SubmitRunContext as SubmitRunContext
from dagster._core.storage.asset_check_execution_record import (
    AssetCheckExecutionRecord,
    AssetCheckExecutionRecordStatus,
)
from dagster._core.workspace.load import location_origin_from_module_name
from dagster._utils import interrupts

if TYPE_CHECKING:
    from dagster._core.workspace.context import WorkspaceProcessContext
    from starlette.applications import Starlette

QUEUE_DAEMON: Final = "QUEUED_RUN_COORDINATOR"
"""The daemon that starts queued runs, in `instance.get_daemon_heartbeats()`."""


def observation(
    key: dg.AssetKey, partition: str, version: str, metadata: Mapping[str, dg.MetadataValue[Any]]
) -> dg.AssetObservation:
    """An observation of a partition of an external asset with a data version, from a step that makes another asset.

    `dg.DataVersion` is public; that an observation carries one is so for observable source assets alone.
    """
    return dg.AssetObservation(key, partition=partition, tags={DATA_VERSION_TAG: version}, metadata=metadata)


def materialization(
    key: dg.AssetKey, partition: str | None, version: str, metadata: Mapping[str, Any]
) -> dg.AssetMaterialization:
    """A materialization with its data version, of a step that the instance does not know.

    In public, `MaterializeResult` alone carries one. Without the versions of its inputs, Dagster's own mark of staleness goes by
    time; ours does not (`provenance.staleness`).
    """
    return dg.AssetMaterialization(key, partition=partition, tags={DATA_VERSION_TAG: version}, metadata=metadata)


# the event log


def json_metadata(instance: dg.DagsterInstance, ids: Sequence[int], name: str) -> Iterator[tuple[str | None, Any]]:
    """(partition, value of the JSON metadata `name`, None without it) of the materializations with these storage ids.

    `fetch_materializations` makes objects of each value in them and takes ten times as long: a third of a second for 800 records.
    """
    # here, since SQLAlchemy and Alembic take a quarter of a second, which the definitions alone can do without
    from dagster._core.storage.event_log.schema import SqlEventLogStorageTable
    from sqlalchemy import select

    events = SqlEventLogStorageTable.c
    with instance.event_log_storage.index_connection() as connection:  # type: ignore[attr-defined]
        for start in range(0, len(ids), 1000):  # SQLite takes so many variables at least
            wanted = events.id.in_(ids[start : start + 1000])
            for partition, event in connection.execute(
                select(events.partition, events.event).where(wanted).order_by(events.id)
            ):
                made = json.loads(event)["dagster_event"]["event_specific_data"]["materialization"]
                entries = {entry["label"]: entry["entry_data"] for entry in made["metadata_entries"]}
                yield partition, entries.get(name, {}).get("data")


# pools


def claim_slots_in_one_statement() -> None:
    """Makes steps of this process claim a free slot of a pool in one statement.

    Dagster reads which slot is free, then takes it. SQLite locks no rows between the two: of two steps that ask at the same
    moment, both take the same slot and run at once. Does nothing in a process that has no event log, and so runs no step.
    """
    if "sqlalchemy" not in sys.modules:
        return
    from dagster._core.storage.event_log.schema import ConcurrencySlotsTable
    from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
    from dagster._utils.concurrency import ConcurrencySlotStatus
    from sqlalchemy import select

    def claim(self: SqlEventLogStorage, concurrency_key: str, run_id: str, step_key: str) -> ConcurrencySlotStatus:
        slots = ConcurrencySlotsTable.c
        free = select(slots.id).where(
            slots.concurrency_key == concurrency_key, slots.step_key.is_(None), ~slots.deleted
        )
        take = ConcurrencySlotsTable.update().values(run_id=run_id, step_key=step_key)
        with self.index_connection() as connection:
            # on other databases two may still find the same one: the second then sees that it is taken
            taken = connection.execute(
                take.where(slots.id == free.limit(1).scalar_subquery(), slots.step_key.is_(None))
            )
        return ConcurrencySlotStatus.CLAIMED if taken.rowcount else ConcurrencySlotStatus.BLOCKED

    SqlEventLogStorage._claim_concurrency_slot = claim  # type: ignore[method-assign]


# runs of the command line


def create_run(
    instance: dg.DagsterInstance,
    job: dg.JobDefinition,
    assets: frozenset[dg.AssetKey],
    place: tuple[str, str, Path],
    run_id: str,
    run_config: Mapping[str, object],
    tags: Mapping[str, str],
) -> dg.DagsterRun:
    """A run of `assets` that the web UI counts among those of a code location, and that its daemon can start.

    `execute_in_process` makes runs that belong to no location; the public clients make them through a web server's address.

    Args:
        place: the location's name, its module, and its working directory.
    """
    location, module, folder = place
    origin = location_origin_from_module_name(module, None, str(folder), location)
    repository = RepositoryPythonOrigin(
        sys.executable, ModuleCodePointer(module, "defs", str(folder)), entry_point=DEFAULT_DAGSTER_ENTRY_POINT
    )
    return instance.create_run_for_job(
        job.get_subset(asset_selection=assets),
        run_id=run_id,
        run_config=run_config,
        tags=tags,
        asset_selection=assets,
        remote_job_origin=RemoteJobOrigin(RemoteRepositoryOrigin(origin, SINGLETON_REPOSITORY_NAME), job.name),
        job_code_origin=JobPythonOrigin(job.name, repository),
    )


def submit(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """Puts a created run into the instance's queue, which reads no workspace; `submit_run` of an instance wants one."""
    instance.run_coordinator.submit_run(SubmitRunContext(run, None))  # type: ignore[arg-type]


def execute(instance: dg.DagsterInstance, job: dg.JobDefinition, run: dg.DagsterRun) -> None:
    """Executes a created run in this process. `execute_in_process` would create another."""
    execute_run(InMemoryJob(job.with_executor_def(in_this_process)), run, instance)


class InThisProcess(InProcessExecutor):
    """Runs the steps one after the other in this process. An interrupt cancels the run; Dagster's executor would fail it."""

    def execute(
        self, plan_context: PlanOrchestrationContext, execution_plan: ExecutionPlan
    ) -> Iterator[dg.DagsterEvent]:
        # a Ctrl-C reaches Dagster's log-copying processes too: they inherit this mask, so that it does not kill them
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for event in _interruptible(super().execute(plan_context, execution_plan)):
                if event.event_type in (dg.DagsterEventType.LOGS_CAPTURED, dg.DagsterEventType.STEP_START):
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                yield event
        except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
            plan_context.instance.report_run_canceling(plan_context.dagster_run)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _interruptible(events: Iterator[dg.DagsterEvent]) -> Iterator[dg.DagsterEvent]:
    """The events, interruptible between steps too: Dagster alone would ignore interrupts while it waits for a pool slot."""
    with contextlib.closing(events):  # type: ignore[type-var]
        while True:
            with dg.raise_execution_interrupts():
                event = next(events, None)
            if event is None:
                return
            yield event


Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
"""What `signal.signal` takes and `signal.getsignal` returns."""


@contextmanager
def wrapped_handlers(wrap: Callable[[Handler], Handler]) -> Iterator[None]:
    """While open, `wrap` replaces each handler that Dagster sets for SIGINT and SIGTERM.

    Dagster's handlers raise at every signal, so that a second Ctrl-C breaks the cleanup after the first.
    """
    replace = interrupts._replace_interrupt_signal

    def replace_wrapped(new_signal_handler: Any) -> None:
        replace(wrap(new_signal_handler))

    interrupts._replace_interrupt_signal = replace_wrapped
    try:
        yield
    finally:
        interrupts._replace_interrupt_signal = replace


@dg.executor(name="in_this_process")
def in_this_process(_: dg.InitExecutorContext) -> InThisProcess:
    """The executor of runs in the process of `coepg evolve`."""
    return InThisProcess(retries=RetryMode.ENABLED)


# results of checks: what is shown of each partition, and one more for it without a run

CheckRecord: TypeAlias = AssetCheckExecutionRecord


def latest_checks(
    instance: dg.DagsterInstance, keys: Sequence[dg.AssetCheckKey], partition: str | None = None
) -> Mapping[dg.AssetCheckKey, CheckRecord]:
    """The newest result of each check, of all partitions or of one. No public method has them by partition."""
    chosen = None if partition is None else PartitionKeyFilter(key=partition)
    return instance.event_log_storage.get_latest_asset_check_execution_by_key(keys, partition_filter=chosen)


def is_planned(record: CheckRecord) -> bool:
    """Whether a run has planned this result and not reported it."""
    return record.status is AssetCheckExecutionRecordStatus.PLANNED


def target_of(made: dg.EventLogRecord) -> AssetCheckEvaluationTargetMaterializationData:
    """The materialization that a result of a check is about; an argument of the public `AssetCheckEvaluation`."""
    return AssetCheckEvaluationTargetMaterializationData(
        storage_id=made.storage_id, run_id=made.run_id, timestamp=made.timestamp
    )


# the web UI


@contextmanager
def web_ui(instance: dg.DagsterInstance, workspace: Path) -> Iterator[Starlette]:
    """Dagster's web server for a workspace file, as an application that others can be mounted on; else it is a command."""
    # every run of Dagster imports this module
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget
    from dagster_webserver.app import create_app_from_workspace_process_context

    target = WorkspaceFileTarget([str(workspace)])
    with WorkspaceProcessContext(instance, target, version=dg.__version__) as context, _keeping_code_servers(context):
        yield create_app_from_workspace_process_context(context)


@contextmanager
def _keeping_code_servers(context: WorkspaceProcessContext) -> Iterator[None]:
    """Starts a code server of the web server anew within seconds of its end.

    Dagster does so for its daemon only; until somebody reloads the location, the web server refuses every launch.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(5):
            for name, entry in context.get_current_workspace().code_location_entries.items():
                client = getattr(entry.code_location, "client", None)
                if client is not None and client.socket is not None and not _listens(client.socket):
                    context.reload_code_location(name)

    thread = threading.Thread(target=watch, name="code-servers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _listens(path: str) -> bool:
    """Whether a process listens at a socket, however busy it is."""
    with socket.socket(socket.AF_UNIX) as end:
        try:
            end.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True
