"""What is used of Dagster without being public: one module has it, and each part is still as that module uses it."""

from __future__ import annotations

import inspect
import re
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from coepg_dagster.assets import internals
from dagster._core.storage.event_log.base import EventLogStorage
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import WorkspaceFileTarget
from dagster_webserver.app import create_app_from_workspace_process_context
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.project import REPOSITORY

PRIVATE = re.compile(r"^\s*(from|import) (dagster\._|dagster_webserver|dagster_graphql|dagster_shared)", re.MULTILINE)


def test_one_module_imports_what_is_not_public() -> None:
    folders = [REPOSITORY / name for name in ("assets", "resources", "coepg_dagster", "benchmarks")]
    files = [file for folder in folders for file in folder.rglob("*.py") if PRIVATE.search(file.read_text())]
    assert files == [Path(REPOSITORY / "assets" / "internals.py")]


USED: dict[str, tuple[Any, list[str]]] = {
    "location": (
        internals.location_origin_from_module_name,
        ["module_name", "attribute", "working_directory", "location_name"],
    ),
    "repository": (internals.RepositoryPythonOrigin, ["executable_path", "code_pointer", "entry_point"]),
    "pointer": (internals.ModuleCodePointer, ["module", "fn_name", "working_directory"]),
    "job's origin": (internals.JobPythonOrigin, ["job_name", "repository_origin"]),
    "remote repository": (internals.RemoteRepositoryOrigin, ["code_location_origin", "repository_name"]),
    "remote job": (internals.RemoteJobOrigin, ["repository_origin", "job_name"]),
    "create a run": (
        dg.DagsterInstance.create_run_for_job,
        ["job_def", "run_id", "run_config", "tags", "asset_selection", "remote_job_origin", "job_code_origin"],
    ),
    "queue it": (internals.SubmitRunContext, ["dagster_run", "workspace"]),
    "submit it": (dg.QueuedRunCoordinator.submit_run, ["self", "context"]),
    "cancel it": (dg.QueuedRunCoordinator.cancel_run, ["self", "run_id"]),
    "execute it": (internals.execute_run, ["job", "dagster_run", "instance"]),
    "execute steps": (internals.InProcessExecutor.execute, ["self", "plan_context", "execution_plan"]),
    "handle signals": (internals.interrupts._replace_interrupt_signal, ["new_signal_handler"]),
    "checks": (EventLogStorage.get_latest_asset_check_execution_by_key, ["self", "check_keys", "partition_filter"]),
    "of a partition": (internals.PartitionKeyFilter, ["key"]),
    "target": (internals.AssetCheckEvaluationTargetMaterializationData, ["storage_id", "run_id", "timestamp"]),
    "workspace": (WorkspaceFileTarget, ["paths"]),
    "web server": (WorkspaceProcessContext, ["instance", "workspace_load_target", "version"]),
    "its application": (create_app_from_workspace_process_context, ["workspace_process_context"]),
}
"""Each part with the arguments that it is given, in the order in which they are given or by these names."""


@pytest.mark.parametrize("name", USED)
def test_what_is_not_public_takes_what_it_is_given(name: str) -> None:
    used, arguments = USED[name]
    known = list(inspect.signature(used).parameters)
    if known == ["args", "kwargs"]:  # Dagster's records are made from their fields
        known = list(used.__annotations__)
    assert [argument for argument in known if argument in arguments] == arguments, f"{name}: it takes {known}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(), below, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.text(), JSON, max_size=3) | st.lists(JSON, max_size=3), min_size=1, max_size=5))
def test_json_metadata_is_what_dagster_reads(values: list[Any]) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        for k, value in enumerate(values):
            metadata = {"other": dg.MetadataValue.text("x"), "record": dg.MetadataValue.json(value)}
            instance.report_runless_asset_event(internals.materialization(dg.AssetKey("a"), str(k), "v", metadata))
        instance.report_runless_asset_event(dg.AssetMaterialization("a", metadata={"record": "a text"}))
        instance.report_runless_asset_event(dg.AssetMaterialization("a"))
        events = instance.fetch_materializations(dg.AssetKey("a"), limit=9, ascending=True).records
        by_dagster = [(e.partition_key, e.asset_materialization.metadata["record"].value) for e in events[:-2]]
        assert [value for _, value in by_dagster] == values
        found = list(internals.json_metadata(instance, [event.storage_id for event in reversed(events)], "record"))
        assert found == [*by_dagster, (None, None), (None, None)]


def test_json_metadata_of_more_records_than_a_database_takes_at_once() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        for k in range(3):
            made = internals.materialization(dg.AssetKey("a"), str(k), "v", {"record": dg.MetadataValue.json({"k": k})})
            instance.report_runless_asset_event(made)
        ids = [event.storage_id for event in instance.fetch_materializations(dg.AssetKey("a"), limit=9).records]
        many = [*range(10**6, 10**6 + 40_000), *ids]
        assert sorted(internals.json_metadata(instance, many, "record")) == [(str(k), {"k": k}) for k in range(3)]


def test_two_steps_that_ask_at_the_same_moment_never_have_the_same_slot(tmp_path: Path) -> None:
    pools = {"concurrency": {"pools": {"default_limit": 1}}}
    claimed, had, gate = [False, False], list[bool](), threading.Barrier(2)

    def ask(one: int, storage: Any) -> None:
        for number in range(20):
            gate.wait(60)
            claimed[one] = storage.claim_concurrency_slot("gpu", f"{one}-{number}", "step").is_claimed
            gate.wait(60)
            had.append(claimed[0] != claimed[1])
            gate.wait(60)
            storage.free_concurrency_slots_for_run(f"{one}-{number}")

    with ExitStack() as stack:  # each has its own connections, as a process has
        instances = [stack.enter_context(dg.DagsterInstance.local_temp(str(tmp_path), pools)) for _ in range(2)]
        storages: list[Any] = [instance.event_log_storage for instance in instances]
        internals.claim_slots_in_one_statement()
        storages[0].initialize_concurrency_limit_to_default("gpu")
        both = [threading.Thread(target=ask, args=(one, storages[one])) for one in (0, 1)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
    assert had == [True] * 40


def test_names_that_are_kept_in_databases_are_the_same() -> None:
    assert internals.DATA_VERSION_TAG == "dagster/data_version"
    assert dg.Definitions().get_repository_def().name == internals.SINGLETON_REPOSITORY_NAME
    with dg.instance_for_test(
        overrides={"run_coordinator": {"module": "dagster", "class": "QueuedRunCoordinator"}}
    ) as queued:
        assert internals.QUEUE_DAEMON in queued.get_required_daemon_types()
    assert {"PLANNED", "SUCCEEDED", "FAILED"} <= {status.value for status in internals.AssetCheckExecutionRecordStatus}
