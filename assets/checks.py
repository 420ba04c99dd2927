"""The checks of assets: what each says with its limit, and what it says of an artifact, from the records of its loop.

The step that makes an artifact evaluates its checks, one result for each partition. What a result says may change later, when
something that the artifact was made from is made again, and a run that fails leaves checks that it planned and never
evaluated: `evaluate_again` reports those anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from itertools import groupby
from typing import Final

import dagster as dg
from coepg_dagster.assets.internals import CheckRecord, is_planned, latest_checks, target_of
from coepg_dagster.assets.ledger import Loop, Records

from coepg_dagster.experiment.schema import Experiment, Quality
from coepg_dagster.pools.controls import BLOCKING
from coepg_dagster.pools.trends import WARNINGS, warnings
from coepg_dagster.provenance import SHARED, Asset, Ref, Stale

INPUTS_CURRENT, WEIGHTS = "inputs_current", "weights_are_whole"
_WEIGHTS: Final = {WEIGHTS: "Every file of the checkpoint is there, and it was loaded again after it was saved."}
CHECKS: Final[Mapping[Asset, Mapping[str, str]]] = {
    "planner_sft": _WEIGHTS,
    "grounder": _WEIGHTS,
    "grounder_rl": _WEIGHTS,
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


def checks_of(asset: Asset) -> dict[str, str]:
    """Every check of a partitioned asset with its statement: those that block, and those that warn."""
    current = {INPUTS_CURRENT: "Every version that was read is still current, up to D_0."}
    return {**CHECKS.get(asset, {}), **current, **WARNINGS.get(asset, {})}


def check_specs(loop: Loop, asset: Asset) -> list[dg.AssetCheckSpec]:
    """The checks of an asset of the loop; unpartitioned assets have none."""
    return [
        dg.AssetCheckSpec(
            name,
            asset=loop.key(asset),
            partitions_def=partitions(loop.experiment),
            description=with_limits(text, loop.experiment.quality),
            blocking=name in CHECKS.get(asset, {}),
        )
        for name, text in ({} if asset in SHARED else checks_of(asset)).items()
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


def changed(loop: Loop, before: Records, after: Records, stale: Mapping[Ref, Stale]) -> set[Ref]:
    """The artifacts of `before` whose checks say something else in `after`, where `stale` are the stale ones."""
    stale_before = loop.stale(before)
    mine = [ref for ref in before if ref.asset in loop.made]
    return {ref for ref in mine if results_of(loop, ref, before, stale_before) != results_of(loop, ref, after, stale)}


def evaluate_again(
    instance: dg.DagsterInstance,
    loop: Loop,
    records: Records,
    stale: Mapping[Ref, Stale],
    refs: Collection[Ref] | None = None,
    unevaluated: tuple[str, Collection[Asset]] = ("", ()),
) -> None:
    """Reports the checks of artifacts in `records` whose last result is missing or not true any more.

    What an unfinished run is about to evaluate is left to it.

    Args:
        stale: the stale ones among the records.
        refs: only these; None: all of the loop.
        unevaluated: a run, and the assets that it will not make although it has planned to.
    """
    mine = sorted((ref for ref in records if ref.asset in loop.made), key=lambda ref: ref.iteration or 0)
    last_made = {ref.asset: ref for ref in mine}
    wanted = [ref for ref in mine if refs is None or ref in refs]
    keys = [
        dg.AssetCheckKey(loop.key(asset), name) for asset in {ref.asset for ref in wanted} for name in checks_of(asset)
    ]
    newest = latest_checks(instance, keys)

    @cache
    def is_over(run_id: str, asset: Asset) -> bool:
        run = instance.get_run_by_id(run_id)
        return run is None or run.is_finished or (run_id == unevaluated[0] and asset in unevaluated[1])

    for k, of_partition in groupby(wanted, key=lambda ref: ref.iteration):
        known = latest_checks(instance, keys, str(k))
        for ref in of_partition:
            made_by = records[ref].run_id
            for name, why in results_of(loop, ref, records, stale).items():
                key = dg.AssetCheckKey(loop.key(ref.asset), name)
                shown, first = known.get(key), newest.get(key)
                if shown is not None and is_planned(shown) and not is_over(shown.run_id, ref.asset):
                    continue
                # the graph shows the newest result of all partitions: let it be one that was evaluated
                if (
                    ref == last_made[ref.asset]
                    and first is not None
                    and is_planned(first)
                    and is_over(first.run_id, ref.asset)
                ):
                    _report(instance, loop, ref, name, why, first.run_id)
                elif not _says(shown, why, made_by):
                    _report(instance, loop, ref, name, why, shown.run_id if shown is not None else made_by)


def _says(shown: CheckRecord | None, why: str | None, made_by: str) -> bool:
    """Whether this is what the UI shows of the version that the run `made_by` made."""
    if shown is None or is_planned(shown) or shown.evaluation is None:
        return False
    of = shown.evaluation.target_materialization_data
    return shown.evaluation.passed is (why is None) and (
        shown.run_id == made_by or (of is not None and of.run_id == made_by)
    )


def with_readers(loop: Loop, asset: Asset) -> set[Asset]:
    """`asset` and everything of the same iteration that is made from it."""
    found = {asset}
    for one in loop.made:
        if any(used.iteration == 1 and used.asset in found for used in loop.inputs_of(Ref(one, 1))):
            found.add(one)
    return found


def _report(instance: dg.DagsterInstance, loop: Loop, ref: Ref, check: str, why: str | None, run_id: str) -> None:
    """Reports a result as one of the run `run_id`: Dagster keeps one for each check, partition and run, which this replaces."""
    partition = loop.partition(ref)
    assert partition is not None
    [made] = instance.fetch_materializations(
        dg.AssetRecordsFilter(loop.key(ref.asset), asset_partitions=[partition]), limit=1
    ).records
    evaluation = dg.AssetCheckEvaluation(
        asset_key=loop.key(ref.asset),
        check_name=check,
        passed=why is None,
        description=why,
        severity=_severity(ref.asset, check),
        blocking=check in CHECKS.get(ref.asset, {}),
        partition=partition,
        target_materialization_data=target_of(made),
    )
    run = instance.get_run_by_id(run_id)
    event = dg.DagsterEvent(
        event_type_value=dg.DagsterEventType.ASSET_CHECK_EVALUATION.value,
        event_specific_data=evaluation,
        job_name=run.job_name if run is not None else "",
        message=f"{check} of {ref} {'passed' if why is None else 'failed'}",
    )
    instance.report_dagster_event(event, run_id=run_id)
