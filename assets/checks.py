"""The checks of assets: what each says with its limit, and what it says of an artifact, from the records of its loop.

The step that makes an artifact evaluates its checks, one result for each partition. What a result says may change later, when
something that the artifact was made from is made again, and a run that fails leaves checks that it planned and never
evaluated: `evaluate_again` reports those anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

import dagster as dg
from coepg_dagster.assets.ledger import Loop, Records
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluation,
    AssetCheckEvaluationTargetMaterializationData,
)
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus as Status

from coepg_dagster.experiment import Experiment, Quality
from coepg_dagster.pools.controls import BLOCKING
from coepg_dagster.pools.trends import WARNINGS, warnings
from coepg_dagster.provenance import SHARED, Asset, Ref, Stale

INPUTS_CURRENT, WEIGHTS = "inputs_current", "weights_are_whole"
_WEIGHTS: Final = {WEIGHTS: "Every file of the checkpoint is there, and it was loaded again after it was saved."}
CHECKS: Final[Mapping[Asset, Mapping[str, str]]] = {
    "planner_sft": _WEIGHTS,
    "grounder": _WEIGHTS,
    "planner": _WEIGHTS,
    "end_to_end": _WEIGHTS,
    "dataset": BLOCKING,
}
"""Blocking checks, each with the statement that holds if it passes: iteration k + 1 refuses an artifact that failed one."""

Results = dict[str, str | None]
"""Check → None, or why it fails."""


def partitions(experiment: Experiment) -> dg.StaticPartitionsDefinition:
    """One partition set "0".."K" for every asset of the loop."""
    return dg.StaticPartitionsDefinition([str(k) for k in range(experiment.iterations + 1)])


def check_specs(loop: Loop, asset: Asset) -> list[dg.AssetCheckSpec]:
    """The checks of an asset of the loop: those that block, and those that warn; unpartitioned assets have none."""
    if asset in SHARED:
        return []
    quality, blocking = loop.experiment.quality, CHECKS.get(asset, {})
    texts = {
        **blocking,
        INPUTS_CURRENT: "Every version that was read is still current, up to D_0.",
        **WARNINGS.get(asset, {}),
    }
    return [
        dg.AssetCheckSpec(
            name,
            asset=loop.key(asset),
            partitions_def=partitions(loop.experiment),
            description=with_limits(text, quality),
            blocking=name in blocking,
        )
        for name, text in texts.items()
    ]


def with_limits(text: str, quality: Quality) -> str:
    """The statement of a check with the limits that the experiment sets."""
    return text.format(**quality.model_dump())


def results_of(loop: Loop, ref: Ref, records: Records, stale: Mapping[Ref, Stale]) -> Results:
    """The results of all checks of an artifact in `records`. Of a blocking check only the name is recorded, not the reason."""
    record = records[ref]
    failed = f"failed when it was made: see run {record.run_id[:8]}"
    return {
        **{name: failed if name in record.failed_checks else None for name in CHECKS.get(ref.asset, {})},
        INPUTS_CURRENT: str(stale[ref]) if ref in stale else None,
        **warnings(ref.asset, ref.iteration or 0, records, loop.experiment.quality),
    }


def check_results(asset: Asset, results: Results) -> list[dg.AssetCheckResult]:
    """The results of an artifact as its own step reports them."""
    return [
        dg.AssetCheckResult(check_name=name, passed=why is None, description=why, severity=_severity(asset, name))
        for name, why in results.items()
    ]


def _severity(asset: Asset, check: str) -> dg.AssetCheckSeverity:
    return dg.AssetCheckSeverity.ERROR if check in CHECKS.get(asset, {}) else dg.AssetCheckSeverity.WARN


def evaluate_again(
    instance: dg.DagsterInstance,
    loop: Loop,
    records: Records,
    but: Ref | None = None,
    unevaluated: tuple[str, Collection[Asset]] = ("", ()),
) -> None:
    """Reports the checks of every artifact in `records` whose last result is missing or not true any more.

    What an unfinished run is about to evaluate is left to it.

    Args:
        but: an artifact whose step reports its checks itself.
        unevaluated: a run, and the assets that it will not make although it has planned to.
    """
    stale = loop.stale(records)
    finished: dict[str, bool] = {}

    def pending(asset: Asset, status: Status, run_id: str) -> bool:
        if status is not Status.PLANNED or (run_id == unevaluated[0] and asset in unevaluated[1]):
            return False
        if run_id not in finished:
            run = instance.get_run_by_id(run_id)
            finished[run_id] = run is None or run.is_finished
        return not finished[run_id]

    for asset in loop.made:
        refs = sorted((ref for ref in records if ref.asset == asset), key=lambda ref: ref.iteration or 0)
        if not refs:
            continue
        keys = [spec.key for spec in check_specs(loop, asset)]
        known = {
            (info.check_key.name, info.partition_key): info
            for info in instance.event_log_storage.get_asset_check_partition_info(keys)
        }
        last = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
        for ref in refs:
            if ref == but:
                continue
            untrue = {}
            for name, why in results_of(loop, ref, records, stale).items():
                info = known.get((name, loop.partition(ref)))
                if info is not None and pending(asset, info.latest_execution_status, info.latest_planned_run_id):
                    continue
                true = Status.SUCCEEDED if why is None else Status.FAILED
                same = info is not None and info.latest_execution_status is true and info.is_current
                newest = next((one for key, one in last.items() if key.name == name), None)
                # the graph shows the newest result of all partitions: let it be one that was evaluated
                never = newest is not None and newest.status is Status.PLANNED
                hidden = never and ref == refs[-1] and not pending(asset, newest.status, newest.run_id)
                if not same or hidden:
                    untrue[name] = why
            for evaluation in _evaluations(instance, loop, ref, untrue):
                instance.report_runless_asset_event(evaluation)


def with_readers(loop: Loop, asset: Asset) -> set[Asset]:
    """`asset` and everything of the same iteration that is made from it."""
    found = {asset}
    for one in loop.made:
        if any(used.iteration == 1 and used.asset in found for used in loop.inputs_of(Ref(one, 1))):
            found.add(one)
    return found


def _evaluations(
    instance: dg.DagsterInstance, loop: Loop, ref: Ref, results: Results
) -> Iterator[AssetCheckEvaluation]:
    if not results:
        return
    partition = loop.partition(ref)
    assert partition is not None
    [made] = instance.fetch_materializations(
        dg.AssetRecordsFilter(loop.key(ref.asset), asset_partitions=[partition]), limit=1
    ).records
    for name, why in results.items():
        yield AssetCheckEvaluation(
            asset_key=loop.key(ref.asset),
            check_name=name,
            passed=why is None,
            description=why,
            severity=_severity(ref.asset, name),
            blocking=name in CHECKS.get(ref.asset, {}),
            partition=partition,
            target_materialization_data=AssetCheckEvaluationTargetMaterializationData(
                storage_id=made.storage_id, run_id=made.run_id, timestamp=made.timestamp
            ),
        )
