"""From an experiment to Dagster assets, checks and jobs."""

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from coepg_dagster.assets.about import about
from coepg_dagster.assets.checks import check_specs, partitions
from coepg_dagster.assets.ledger import Loop
from coepg_dagster.assets.report import evolution_report
from coepg_dagster.assets.stage import Resources, StageFunction, materialize
from coepg_dagster.resources.store import StoreResource
from coepg_dagster.resources.training import (
    EnginesResource,
    GrpoCdremResource,
    Processes,
    RegenerationResource,
    SftResource,
)

from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.experiment.versions import code_version
from coepg_dagster.provenance import CONTINUED, CROSSING, SHARED, Asset, continued

DEPS: dict[Asset, tuple[str, ...]] = {
    "planner_sft": ("previous/dataset", "benchmark_steps", "open_models"),
    "grounder": ("previous/dataset", "benchmark_steps", "open_models"),
    "grounder_rl": ("grounder", "previous/dataset"),
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

READ_AGAIN = dg.FreshnessPolicy.time_window(fail_window=timedelta(days=90), warn_window=timedelta(days=30))
"""How soon a benchmark's files should be read again. No partitioned asset has a policy: it would judge the last event of all."""

LIGHT: frozenset[Asset] = frozenset({"dataset", "data_quality"})
"""Partitioned assets that run no model: they take no slot of the pool."""


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

    # No backfill policy: without one a backfill makes one run for each partition. `BackfillPolicy.multi_run(1)` makes as many,
    # but as runs of a range of one (Dagster 1.13), which have no partition tag and whose check results belong to no partition.
    decorate = dg.asset(
        key=loop.key(asset),
        partitions_def=None if shared else partitions(loop.experiment),
        deps=[_dep(loop, dep) for dep in _deps(loop, asset)],
        code_version=code_version(loop.experiment, asset),
        check_specs=check_specs(loop, asset),
        pool=loop.experiment.pool if heavy else None,
        freshness_policy=READ_AGAIN if asset == "benchmark_steps" else None,
        output_required=True,
        group_name=page.group,
        description=page.description,
        kinds=page.kinds,
        owners=page.owners,
        tags=page.tags,
        metadata=page.metadata,
    )
    return decorate(
        _with_resources(asset, lambda context, resources: materialize(context, resources, loop, asset, maker))
    )


if TYPE_CHECKING:
    Made = dg.MaterializeResult[None]
else:
    Made = dg.MaterializeResult  # Dagster reads no annotation with an argument


def _with_resources(asset: Asset, make: Callable[[dg.AssetExecutionContext, Resources], Made]) -> Callable[..., Made]:
    """The function of an asset, whose arguments are the resources that it needs."""

    def training(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        engines: EnginesResource,
        sft: SftResource,
        grpo_cdrem: GrpoCdremResource,
        regeneration: RegenerationResource,
    ) -> Made:
        # GRPO and the pools come after it: whether they can is asked first
        after: dict[str, Processes] = {"grpo_cdrem": grpo_cdrem, "regeneration": regeneration}
        return make(context, Resources(store, engines, {"sft": sft, **after}))

    def reinforcement(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        engines: EnginesResource,
        grpo_cdrem: GrpoCdremResource,
        regeneration: RegenerationResource,
    ) -> Made:
        return make(context, Resources(store, engines, {"grpo_cdrem": grpo_cdrem, "regeneration": regeneration}))

    def inference(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        engines: EnginesResource,
        regeneration: RegenerationResource,
    ) -> Made:
        return make(context, Resources(store, engines, {"regeneration": regeneration}))

    def no_process(context: dg.AssetExecutionContext, store: StoreResource, engines: EnginesResource) -> Made:
        return make(context, Resources(store, engines))

    by_asset: dict[Asset, Callable[..., Made]] = {
        **dict.fromkeys(("planner_sft", "grounder"), training),
        **dict.fromkeys(("grounder_rl", "planner", "end_to_end"), reinforcement),
        **dict.fromkeys(("candidate_plans", "verdicts", "dataset", "evaluation"), inference),
    }
    return by_asset.get(asset, no_process)


def _deps(loop: Loop, asset: Asset) -> tuple[str, ...]:
    if asset == "evaluation" and loop.experiment.agent == "end_to_end":
        return ("end_to_end", "benchmark_steps", "open_models")
    phi = loop.experiment.phi
    deps = DEPS.get(asset, ())
    if asset != "grounder_rl":
        deps = tuple(re.sub(r"(^|/)grounder$", rf"\g<1>{phi}", dep) for dep in deps)
    goes_on = loop.experiment.init == "previous" and asset in CONTINUED
    return (*deps, *([f"previous/{continued(asset, phi)}"] if goes_on else []))


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
