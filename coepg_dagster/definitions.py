"""The code location: the one place where experiments, assets, resources and jobs meet."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from coepg_dagster.assets.automation import alert, automated, checks_of_ended_runs
from coepg_dagster.assets.build import left_out, loop_assets, shared_assets
from coepg_dagster.assets.internals import claim_slots_in_one_statement
from coepg_dagster.assets.ledger import Loop
from coepg_dagster.assets.loop import MAKERS
from coepg_dagster.assets.stage import StageFunction
from coepg_dagster.planning.machine import machine_named
from coepg_dagster.project import Project, find_project
from coepg_dagster.provenance import Asset
from coepg_dagster.resources.store import StoreResource
from coepg_dagster.resources.training import default_resources


def artifacts(
    loops: Sequence[Loop],
    makers: Mapping[Asset, StageFunction] = MAKERS,
    resources: Mapping[str, dg.ConfigurableResource[Any]] | None = None,
) -> dg.Definitions:
    """The assets of some loops of a project, and their resources, with the settings of the machine that COEPG_MACHINE names.

    Args:
        makers: the functions that make the artifacts of the loop.
        resources: replace the default ones, by key: `sft`, `grpo_cdrem`, `regeneration`, `engines`, `store`.
    """
    # asset checks per partition, and conditions of our own; the version range in pyproject.toml guards against changes
    for early in (dg.PreviewWarning, dg.BetaWarning):
        warnings.filterwarnings("ignore", category=early)
    roots = {loop.experiment.name: loop for loop in loops}
    machine = machine_named(loops[0].root) if loops else None
    return dg.Definitions(
        assets=[
            *(asset for loop in roots.values() for asset in shared_assets(loop.experiment, loop.root, makers)),
            *(asset for loop in loops for asset in loop_assets(loop, makers)),
        ],
        resources={"store": StoreResource(), **default_resources(machine), **(resources or {})},
    )


def build(
    project: Project,
    folder: str = "",
    makers: Mapping[Asset, StageFunction] = MAKERS,
    resources: Mapping[str, dg.ConfigurableResource[Any]] | None = None,
    nightly: str = "0 2 * * *",
    weekly: str = "0 3 * * 0",
    seconds: int = 30,
) -> dg.Definitions:
    """What is in use of the experiments in `experiments/FOLDER` of the project (`Project.seeds_in_use`).

    The group LEFT_OUT of the asset graph shows the files that cannot be used, with the reason. What was made of such an
    experiment stays, and its running runs go on, by the settings that were last used; a new run is refused (`stage_context`).

    Args:
        makers, resources: as for `artifacts`.
        nightly, weekly: when agents are evaluated again and D_k is regenerated (cron, UTC), where a file asks for it.
        seconds: between two ticks of a sensor, once it is turned on.
    """
    claim_slots_in_one_statement()
    files = project.experiments(folder)
    last = [one for name in files.left_out if (one := project.last_used(name)) is not None]
    loops = [Loop(one, seed, project.root) for one in (*files.values(), *last) for seed in project.seeds_in_use(one)]
    found = dg.Definitions.merge(
        artifacts(loops, makers, resources),
        dg.Definitions(
            [left_out(name, why) for name, why in files.left_out.items()],
            sensors=[alert(seconds), *checks_of_ended_runs(loops, seconds)],
        ),
    )
    return automated(found, loops, nightly, weekly, seconds)


@dg.definitions
def defs() -> dg.Definitions:
    """What Dagster loads; whoever imports this module for `build` does not pay for it."""
    # What is made here stays: garbage collection while it grows takes a tenth of the time.
    gc.disable()
    try:
        return build(find_project())
    finally:
        gc.freeze()
        gc.enable()
