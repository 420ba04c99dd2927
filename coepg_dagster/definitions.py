"""The code location: the one place where experiments, assets, resources and jobs meet."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import dagster as dg

from coepg_dagster.assets.build import inputs_current, iteration_job, loop_assets, shared_assets
from coepg_dagster.assets.ledger import Loop
from coepg_dagster.assets.loop import MAKERS
from coepg_dagster.assets.making import Maker
from coepg_dagster.project import Project, find_project
from coepg_dagster.provenance import Asset
from coepg_dagster.resources.store import StoreResource
from coepg_dagster.resources.training import default_resources


def build(project: Project, makers: Mapping[Asset, Maker] = MAKERS) -> dg.Definitions:
    """Every experiment of the project, with all its seeds; `makers` make the artifacts of the loop."""
    # asset checks per partition are in preview; the version range in pyproject.toml guards against changes
    warnings.filterwarnings("ignore", category=dg.PreviewWarning)
    experiments = project.experiments().values()
    loops = [Loop(experiment, seed, project.root) for experiment in experiments for seed in experiment.seeds]
    return dg.Definitions(
        assets=[
            *(asset for experiment in experiments for asset in shared_assets(experiment, project.root)),
            *(asset for loop in loops for asset in loop_assets(loop, makers)),
        ],
        asset_checks=[inputs_current(loop) for loop in loops],
        jobs=[iteration_job(loop) for loop in loops],
        resources={"store": StoreResource(root=str(project.store)), **default_resources()},
    )


defs = build(find_project())
