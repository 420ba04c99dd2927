"""What the Dagster instance knows of a loop's artifacts: reading records, and who may write an iteration.

The event log is the one place that says which version of an artifact is current; its record is in the metadata of the
materialization.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
from filelock import FileLock

from coepg_dagster.experiment import Experiment, code_version
from coepg_dagster.project import Project
from coepg_dagster.provenance import LOOP, SHARED, Asset, NotUsable, Record, Ref, Stale, assert_usable, staleness

BACKFILL_TAG = "dagster/backfill"
RECORD = "record"
"""Metadata key of the record."""


def open_instance(project: Project) -> dg.DagsterInstance:
    """The Dagster instance of the project: DAGSTER_HOME, or `.dagster` under the root."""
    os.environ.setdefault("DAGSTER_HOME", str(project.prepare_dagster_home()))
    os.environ.setdefault("COEPG_ROOT", str(project.root))
    return dg.DagsterInstance.get()


@dataclass(frozen=True)
class Loop:
    """One experiment with one seed: its asset keys and its records."""

    experiment: Experiment
    seed: int
    root: Path  # of the project, where relative paths of the experiment start

    @property
    def name(self) -> str:
        """As people refer to it: EXPERIMENT/sSEED."""
        return f"{self.experiment.name}/s{self.seed}"

    def key(self, asset: Asset) -> dg.AssetKey:
        """Benchmarks and open models are shared by the seeds of an experiment."""
        if asset in SHARED:
            return dg.AssetKey([self.experiment.name, asset])
        return dg.AssetKey([self.experiment.name, f"s{self.seed}", asset])

    def twin(self, asset: Asset) -> dg.AssetKey:
        """The key under which iteration k reads `asset` of iteration k - 1."""
        return dg.AssetKey([self.experiment.name, f"s{self.seed}", "previous", asset])

    def partition(self, ref: Ref) -> str | None:
        """The Dagster partition of an artifact."""
        return None if ref.iteration is None else str(ref.iteration)

    def record(self, instance: dg.DagsterInstance, ref: Ref) -> Record | None:
        """The record of the current version of `ref`; None where it was never materialized."""
        partition = self.partition(ref)
        found = instance.fetch_materializations(
            dg.AssetRecordsFilter(self.key(ref.asset), asset_partitions=[partition] if partition else None), limit=1
        ).records
        if not found or found[0].asset_materialization is None:
            return None
        value = found[0].asset_materialization.metadata.get(RECORD)
        if not isinstance(value, dg.JsonMetadataValue):
            raise NotUsable(
                f"{ref} was not made by this project (its metadata has no `{RECORD}`): materialize {ref} again"
            )
        return Record.model_validate(value.value)

    def records(self, instance: dg.DagsterInstance) -> dict[Ref, Record]:
        """The records of everything that is there, but for the report."""
        refs = [Ref(asset) for asset in SHARED]
        refs += [Ref(asset, k) for k in range(self.experiment.iterations + 1) for asset in LOOP]
        found = ((ref, self.record(instance, ref)) for ref in refs)
        return {ref: record for ref, record in found if record is not None}

    def report(self, instance: dg.DagsterInstance) -> Record | None:
        """The record of the report."""
        return self.record(instance, Ref("evolution_report"))

    def code_versions(self) -> dict[Asset, str]:
        """What each asset's code and configuration are now."""
        return {asset: code_version(self.experiment, asset) for asset in (*SHARED, *LOOP)}

    def stale(self, records: Mapping[Ref, Record]) -> dict[Ref, Stale]:
        """The stale ones among `records`."""
        return staleness(records, self.code_versions())

    def require(
        self, context: dg.AssetExecutionContext, refs: list[Ref], iteration: int, accept_stale_input: bool
    ) -> dict[Ref, Record]:
        """The records of what iteration `iteration` is about to read. Raises NotUsable, which ends with the remedy."""
        records = self.records(context.instance)
        stale = self.stale(records)
        usable = {}
        for ref in refs:
            record = records.get(ref)
            crosses = ref.iteration is not None and ref.iteration < iteration
            elsewhere = self._made_elsewhere(context, ref, record) if crosses else None
            usable[ref] = assert_usable(ref, record, stale.get(ref), elsewhere, accept_stale_input)
        return usable

    def _made_elsewhere(self, context: dg.AssetExecutionContext, ref: Ref, record: Record | None) -> str | None:
        """What to say if the running backfill contains `ref` and yet did not make `record`."""
        backfill = context.run.tags.get(BACKFILL_TAG)
        if backfill is None or record is None:
            return None
        made_by = context.instance.get_run_by_id(record.run_id)
        if made_by is not None and made_by.tags.get(BACKFILL_TAG) == backfill:
            return None
        if self.partition(ref) not in _targets(context.instance, backfill, self.key(ref.asset)):
            return None
        return f"was not made by backfill {backfill}, which contains it: it failed or was skipped there"


def _targets(instance: dg.DagsterInstance, backfill_id: str, key: dg.AssetKey) -> set[str]:
    """The partitions of `key` that a backfill is to make."""
    backfill = instance.get_backfill(backfill_id)
    if backfill is None:
        return set()
    if backfill.asset_backfill_data is None:
        return set(backfill.partition_names or [])
    subset = backfill.asset_backfill_data.target_subset.partitions_subsets_by_asset_key.get(key)
    return set(subset.get_partition_keys()) if subset else set()


def claim(context: dg.AssetExecutionContext, folder: Path, iteration: int) -> None:
    """Makes the running run the one that may write `iteration` of a loop, whose locks lie in `folder`.

    A claim ends with its run, however that ends. Raises NotUsable while another run that is not finished holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    holder_file = folder / f"{iteration}.json"
    with FileLock(folder / f"{iteration}.lock", timeout=30):
        if holder_file.exists():
            holder = json.loads(holder_file.read_text())["run_id"]
            run = context.instance.get_run_by_id(holder) if holder != context.run_id else None
            if run is not None and not run.is_finished:
                raise NotUsable(
                    f"iteration {iteration} is being written by run {holder[:8]} ({run.status.value}): "
                    "wait for it, or cancel it, then run this again"
                )
        holder_file.write_text(json.dumps({"run_id": context.run_id}))
