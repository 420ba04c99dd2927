"""The records beside the artifacts, from which the event log is made again where it was damaged or lost.

Only the event log decides which version of an artifact is current. It is one database, and an artifact may have cost days: so
each record is appended to a file in the store too, before the event log has it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Final

import dagster as dg
from coepg_dagster.assets.about import page_link
from coepg_dagster.assets.checks import evaluate_again
from coepg_dagster.assets.internals import materialization, observation
from coepg_dagster.assets.ledger import RECORD, Loop
from coepg_dagster.assets.shown import shown

from coepg_dagster import jsonlines
from coepg_dagster.artifacts import append_line
from coepg_dagster.project import Project
from coepg_dagster.provenance import CROSSING, NotUsable, Record, Ref
from coepg_dagster.store import UNPARTITIONED

RECORDS: Final = ".records"
"""The folder of the records in the store: EXPERIMENT/[sSEED/]ASSET/PARTITION.jsonl."""


def keep_record(store: Path, key: dg.AssetKey, record: Record) -> None:
    """Appends the record of an artifact to its file in the store."""
    file = _file(store, key, record)
    file.parent.mkdir(parents=True, exist_ok=True)
    append_line(file, json.dumps({"at": time.time(), RECORD: record.model_dump(mode="json")}).encode())


def keep_records_of(store: Path, loop: Loop, records: Iterable[Record]) -> None:
    """Keeps those current records of a loop of which the store has no file, as of a project that an older version made."""
    for record in records:
        key = loop.key(record.asset)
        if not _file(store, key, record).exists():
            keep_record(store, key, record)


def _file(store: Path, key: dg.AssetKey, record: Record) -> Path:
    partition = UNPARTITIONED if record.iteration is None else str(record.iteration)
    return store.joinpath(RECORDS, *key.path, f"{partition}.jsonl")


def assert_not_lost(instance: dg.DagsterInstance, folder: Path, known: Collection[object]) -> None:
    """Raises NotUsable where the event log has `known` nothing of what `folder` of RECORDS has records of.

    All would be made again.
    """
    if not known and (files := sum(1 for _ in folder.rglob("*.jsonl"))):
        raise NotUsable(
            f"the event log in {instance.root_directory} knows nothing of what was made here, and {folder} has records of "
            f"{files} artifacts: run `coepg recover`, or delete that folder to make all of it again"
        )


def recover(project: Project, instance: dg.DagsterInstance) -> tuple[int, list[str]]:
    """Puts the records in the store into the event log, but for artifacts of which it knows any version, and evaluates checks.

    Returns the number of artifacts, and what could not be read.
    """
    found: list[tuple[float, dg.AssetKey, Record]] = []
    unreadable = []
    folder = project.store / RECORDS
    for file in sorted(folder.rglob("*.jsonl")):
        key = dg.AssetKey(list(file.relative_to(folder).parts[:-1]))
        if _is_known(instance, key, None if file.stem == UNPARTITIONED else file.stem):
            continue
        at = 0.0
        with file.open("rb") as stream:
            for number, line in jsonlines.lines(stream):
                try:
                    value: Any = jsonlines.parse(line)
                    at = max(at, float(value["at"]))  # in the order of the file, whatever the clock did
                    found.append((at, key, Record.model_validate(value[RECORD])))
                except (ValueError, KeyError, TypeError) as error:
                    unreadable.append(f"{file}:{number + 1} is no record and left out: {str(error).splitlines()[0]}")
    experiments, loops = project.all_experiments(), dict[str, Loop]()
    for _, key, record in sorted(found, key=lambda one: one[0]):
        partition = None if record.iteration is None else str(record.iteration)
        metadata = {"folder": record.folder, RECORD: dg.MetadataValue.json(record.model_dump(mode="json"))}
        loop = Loop(experiments[key.path[0]], record.seed, project.root) if key.path[0] in experiments else None
        if loop is not None:
            metadata = shown(loop, project.store, record)
            loops[loop.name] = loop
        instance.report_runless_asset_event(materialization(key, partition, record.data_version, metadata))
        if loop is not None and (observed := handed_over(loop, record)) is not None:
            instance.report_runless_asset_event(observed)
    for loop in loops.values():
        records = loop.records(instance)
        evaluate_again(instance, loop, records, loop.stale(records))
    return len({(key, record.iteration) for _, key, record in found}), unreadable


def _is_known(instance: dg.DagsterInstance, key: dg.AssetKey, partition: str | None) -> bool:
    """Whether the event log has any version of an artifact."""
    which = dg.AssetRecordsFilter(key, asset_partitions=None if partition is None else [partition])
    return bool(instance.fetch_materializations(which, limit=1).records)


def handed_over(loop: Loop, record: Record) -> dg.AssetObservation | None:
    """The observation of the twin that iteration k + 1 reads, of an artifact of iteration k; None: it does not read it."""
    if record.asset not in CROSSING or record.iteration is None or not _is_read_next(loop, record.ref):
        return None
    true = "/".join(loop.key(record.asset).path)
    metadata = {
        "stands for": dg.MetadataValue.url(f"/assets/{true}?view=partitions&partition={record.iteration}"),
        **page_link(loop, record.ref),
        "run": dg.MetadataValue.dagster_run(record.run_id),
    }
    return observation(loop.twin(record.asset), str(record.iteration + 1), record.data_version, metadata)


def _is_read_next(loop: Loop, ref: Ref) -> bool:
    """Whether the iteration after that of `ref` reads it; the trained pools start at iteration 1."""
    assert ref.iteration is not None
    return any(ref in loop.inputs_of(Ref(reader, ref.iteration + 1)) for reader in loop.made)
