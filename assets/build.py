"""From an experiment to Dagster assets, checks and jobs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
from coepg_dagster.assets.about import about
from coepg_dagster.assets.ledger import Loop
from coepg_dagster.assets.report import evolution_report
from coepg_dagster.assets.shared import WEIGHTS
from coepg_dagster.assets.stage import StageFunction, materialize, needed_resources

from coepg_dagster.experiment import Experiment, code_version
from coepg_dagster.pools.controls import BLOCKING
from coepg_dagster.pools.trends import WARNINGS, warnings
from coepg_dagster.provenance import CONTINUED, CROSSING, SHARED, Asset, Ref

INPUTS_CURRENT, RECORD_CHECKS = "inputs_current", "record_checks"

DEPS: dict[Asset, tuple[str, ...]] = {
    "planner_sft": ("previous/dataset", "benchmark_steps", "open_models"),
    "grounder": ("previous/dataset", "benchmark_steps", "open_models"),
    "planner": ("planner_sft", "grounder", "previous/dataset"),
    "candidate_plans": ("planner", "previous/planner", "benchmark_steps", "open_models"),
    "verdicts": ("candidate_plans", "grounder", "previous/grounder", "benchmark_steps", "open_models"),
    "dataset": ("verdicts", "previous/dataset"),
    "data_quality": ("dataset", "verdicts", "previous/dataset"),
    "evaluation": ("planner", "grounder", "benchmark_steps", "open_models"),
    "end_to_end": ("previous/dataset", "benchmark_steps", "open_models"),
}
"""The edges of Dagster's asset graph with `init: base`, see `_deps`. Those to the unpartitioned assets make "materialize all"
run these first, then one whole run per iteration. What is really read is in `provenance.inputs_of`: less than this at
iterations 0 and 1."""

CHECKS: dict[Asset, tuple[str, ...]] = {
    "planner_sft": (WEIGHTS,),
    "grounder": (WEIGHTS,),
    "planner": (WEIGHTS,),
    "end_to_end": (WEIGHTS,),
    "dataset": BLOCKING,
}
"""Blocking checks: iteration k + 1 refuses an artifact that failed one."""

LIGHT: frozenset[Asset] = frozenset({"dataset", "data_quality"})
"""Partitioned assets that run no model: they take no slot of the pool."""


def partitions(experiment: Experiment) -> dg.StaticPartitionsDefinition:
    """One partition set "0".."K" for every asset of the loop."""
    return dg.StaticPartitionsDefinition([str(k) for k in range(experiment.iterations + 1)])


def shared_assets(
    experiment: Experiment, root: Path, makers: Mapping[Asset, StageFunction]
) -> list[dg.AssetsDefinition]:
    """`benchmark_steps` and `open_models`, which the seeds of an experiment share."""
    loop = Loop(experiment, experiment.seeds[0], root)
    return [_asset(loop, asset, makers[asset]) for asset in loop.shared]


def loop_assets(loop: Loop, makers: Mapping[Asset, StageFunction]) -> list[Any]:
    """The twins, the partitioned assets and the report of one experiment and seed."""
    return [*_twins(loop), *(_asset(loop, asset, makers[asset]) for asset in loop.made), evolution_report(loop)]


LEFT_OUT = "left_out"
"""Asset group of experiment files that cannot be used."""


def left_out(name: str, why: str) -> dg.AssetSpec:
    """Placeholder in the asset graph for an experiment whose file cannot be used."""
    return dg.AssetSpec(dg.AssetKey([name, LEFT_OUT]), description=why, group_name=LEFT_OUT, kinds={"error"})


def _asset(loop: Loop, asset: Asset, maker: StageFunction) -> dg.AssetsDefinition:
    shared = asset in SHARED
    heavy = not shared and asset not in LIGHT
    page = about(loop, asset)

    @dg.asset(
        key=loop.key(asset),
        partitions_def=None if shared else partitions(loop.experiment),
        deps=[_dep(loop, dep) for dep in _deps(loop, asset)],
        code_version=code_version(loop.experiment, asset),
        check_specs=[dg.AssetCheckSpec(name, asset=loop.key(asset), blocking=True) for name in CHECKS.get(asset, ())],
        required_resource_keys={"store", "engines", *needed_resources(asset)},
        pool=loop.experiment.pool if heavy else None,
        output_required=True,
        group_name=page.group,
        description=page.description,
        kinds=page.kinds,
        owners=page.owners,
        tags=page.tags,
        metadata=page.metadata,
    )
    def compute(context: dg.AssetExecutionContext) -> dg.MaterializeResult:  # type: ignore[type-arg]
        return materialize(context, loop, asset, maker)

    return compute


def _deps(loop: Loop, asset: Asset) -> tuple[str, ...]:
    if asset == "evaluation" and loop.experiment.agent == "end_to_end":
        return ("end_to_end", "benchmark_steps", "open_models")
    continued = loop.experiment.init == "previous" and asset in CONTINUED
    return (*DEPS.get(asset, ()), *([f"previous/{CONTINUED[asset]}"] if continued else []))


def _dep(loop: Loop, name: str) -> dg.AssetDep:
    before, _, asset = name.rpartition("/")
    key = loop.twin(asset) if before else loop.key(asset)  # type: ignore[arg-type]
    # a parent may be in another code location and have more iterations
    same_partition = asset in loop.experiment.taken and asset not in SHARED
    return dg.AssetDep(key, partition_mapping=dg.IdentityPartitionMapping() if same_partition else None)


def _twins(loop: Loop) -> list[dg.AssetSpec]:
    return [
        dg.AssetSpec(
            loop.twin(asset),
            partitions_def=partitions(loop.experiment),
            group_name=about(loop, asset).group,
            description=f"`{asset}` of the iteration before: partition k stands for {asset}[k - 1], whose step emits it. "
            "The link to it is in each observation.",
            kinds={"previous"},
        )
        for asset in CROSSING
        if asset in loop.made and any(f"previous/{asset}" in _deps(loop, reader) for reader in loop.made)
    ]


def record_checks(loop: Loop) -> dg.AssetChecksDefinition:
    """Checks that warn, computed from the records of an iteration.

    Is every version that an asset read still current, up to D_0? Are its numbers no worse than those of iteration k - 1?
    """

    def spec(name: str, asset: Asset, description: str) -> dg.AssetCheckSpec:
        return dg.AssetCheckSpec(
            name, asset=loop.key(asset), partitions_def=partitions(loop.experiment), description=description
        )

    @dg.multi_asset_check(
        name=f"{loop.experiment.name}_s{loop.seed}_{RECORD_CHECKS}",
        specs=[
            *(
                spec(INPUTS_CURRENT, asset, "Every version that was read is still current, up to D_0.")
                for asset in loop.made
            ),
            *(spec(name, asset, what) for asset in loop.made for name, what in WARNINGS.get(asset, {}).items()),
        ],
        can_subset=True,
    )
    def check(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        records, k = loop.records(context.instance), int(context.partition_key)
        stale = loop.stale(records)
        for key in context.selected_asset_check_keys:
            asset: Any = key.asset_key.path[-1]
            ref = Ref(asset, k)
            if ref not in records:
                why: str | None = f"{ref} does not exist"
            elif key.name == INPUTS_CURRENT:
                why = str(stale[ref]) if ref in stale else None
            else:
                why = warnings(asset, k, records, loop.experiment.quality)[key.name]
            yield dg.AssetCheckResult(
                asset_key=key.asset_key,
                check_name=key.name,
                passed=why is None,
                severity=dg.AssetCheckSeverity.WARN,
                description=why,
            )

    return check
