"""The code location: the one place where experiments, assets, resources and jobs meet."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import dagster as dg

from coepg_dagster.assets.automation import alert, automation
from coepg_dagster.assets.build import left_out, loop_assets, shared_assets
from coepg_dagster.assets.ledger import Loop
from coepg_dagster.assets.loop import MAKERS
from coepg_dagster.assets.stage import StageFunction
from coepg_dagster.planning.machine import machine_named
from coepg_dagster.project import Project, find_project
from coepg_dagster.provenance import Asset
from coepg_dagster.resources.store import StoreResource
from coepg_dagster.resources.training import default_resources


def build(
    project: Project,
    folder: str = "",
    makers: Mapping[Asset, StageFunction] = MAKERS,
    resources: Mapping[str, dg.ConfigurableResource[Any]] | None = None,
    nightly: str = "0 2 * * *",
    weekly: str = "0 3 * * 0",
    seconds: int = 30,
) -> dg.Definitions:
    """Every experiment below `experiments/FOLDER` of the project, with all its seeds.

    The defaults of the resources are those of the machine that COEPG_MACHINE names. A file that cannot be used leaves out only
    its experiment; the group LEFT_OUT of the asset graph shows the reason.

    Args:
        makers: the functions that make the artifacts of the loop.
        resources: replace the default ones, by key: `sft`, `grpo_cdrem`, `regeneration`, `engines`, `store`.
        nightly, weekly: when the schedules run (cron, UTC), once they are turned on.
        seconds: between two ticks of a sensor, once it is turned on.
    """
    # asset checks per partition are in preview; the version range in pyproject.toml guards against changes
    warnings.filterwarnings("ignore", category=dg.PreviewWarning)
    files = project.experiments(folder)
    experiments = files.values()
    loops = [Loop(experiment, seed, project.root) for experiment in experiments for seed in experiment.seeds]
    artifacts = dg.Definitions(
        assets=[
            *(asset for experiment in experiments for asset in shared_assets(experiment, project.root, makers)),
            *(asset for loop in loops for asset in loop_assets(loop, makers)),
            *(left_out(name, why) for name, why in files.left_out.items()),
        ],
        sensors=[alert(seconds)],
        resources={"store": StoreResource(), **default_resources(machine_named(project.root)), **(resources or {})},
    )
    return dg.Definitions.merge(artifacts, *(automation(loop, nightly, weekly, seconds) for loop in loops))


defs = build(find_project())
