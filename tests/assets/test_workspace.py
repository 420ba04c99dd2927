"""What the web UI shows: experiments and seeds that are in use, and nothing else."""

from __future__ import annotations

import re
import shutil
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest

from coepg_dagster import yaml_files
from coepg_dagster.definitions import build
from coepg_dagster.experiment.files import ABLATIONS, load_experiment
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.project import Project
from tests.assets.light import light_project
from tests.project import REPOSITORY


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The experiments of a fresh clone."""
    root = tmp_path_factory.mktemp("fresh")
    shutil.copytree(REPOSITORY / "experiments", root / "experiments")
    return Project(root)


def shown(project: Project, folder: str = "") -> set[str]:
    """EXPERIMENT, and EXPERIMENT/sSEED, of every asset that is shown."""
    keys = build(project, folder).resolve_asset_graph().get_all_asset_keys()
    return {"/".join(key.path[:-1]) for key in keys if "previous" not in key.path}


def test_a_newcomer_sees_one_loop_of_the_sandbox_from_left_to_right(fresh: Project) -> None:
    graph = build(fresh).resolve_asset_graph()
    groups = {key: str(graph.get(key).group_name) for key in graph.get_all_asset_keys()}
    inputs, iteration, evaluation = "sandbox_inputs", "sandbox_s13_iteration", "sandbox_s13_evaluation"
    assert len(groups) < 20 and set(groups.values()) == {inputs, iteration, evaluation}
    edges = {(groups[parent], groups[key]) for key in groups for parent in graph.get(key).parent_keys}
    assert {edge for edge in edges if edge[0] != edge[1]} == {
        (inputs, iteration), (inputs, evaluation), (iteration, evaluation),
    }  # fmt: skip
    assert shown(fresh, ABLATIONS) == set()
    assert all(graph.get(key).owners == [] for key in groups)


def test_the_selections_that_the_page_names_find_the_assets(fresh: Project) -> None:
    graph = build(fresh).resolve_asset_graph()
    every = graph.get_all_asset_keys()
    named = dict.fromkeys(re.findall(r"filtered by `([^`]+)`", (REPOSITORY / "docs" / "using-the-ui.md").read_text()))
    found = {text: dg.AssetSelection.from_string(text).resolve(graph) for text in named}
    assert found.pop('key:"sandbox/*"') == every
    assert found and all({"sandbox", "s13"} == {*key.path[:2]} for keys in found.values() for key in keys)
    assert all(found.values())


def test_a_benchmark_is_to_be_read_again_within_90_days(fresh: Project) -> None:
    """A policy of a partitioned asset would judge it by its last event."""
    graph = build(fresh).resolve_asset_graph()
    policies = {
        key.path[-1]: policy for key in graph.get_all_asset_keys() if (policy := graph.get(key).freshness_policy)
    }
    [(asset, policy)] = policies.items()
    assert asset == "benchmark_steps" and not graph.get(dg.AssetKey(["sandbox", asset])).is_partitioned
    wanted = dg.FreshnessPolicy.time_window(warn_window=timedelta(days=30), fail_window=timedelta(days=90))
    assert policy == wanted


def test_the_workspace_has_one_location_and_says_how_to_see_the_ablations() -> None:
    text = (REPOSITORY / "workspace.yaml").read_text()
    assert [entry["python_module"]["location_name"] for entry in yaml_files.parse(text)["load_from"]] == ["coepg"]
    asked = text.replace("  # - python", "  - python").replace("  #   ", "    ")
    names = [entry["python_module"]["location_name"] for entry in yaml_files.parse(asked)["load_from"]]
    assert names == ["coepg", "reproductions"]


def test_what_has_artifacts_is_shown(tmp_path: Path) -> None:
    project = light_project(tmp_path / "project", "mine")
    for name in ("light", "mine"):
        file = project.root / "experiments" / f"{name}.yaml"
        file.write_text(file.read_text().replace("shown: [1, 2]", f"shown: {[2] if name == 'light' else []}"))
    assert shown(project) == {"light", "light/s2"}
    (project.store / "mine" / "benchmark_steps").mkdir(parents=True)
    assert shown(project) == {"light", "light/s2", "mine", "mine/s1"}  # inputs alone: with its first seed
    project.use(project.experiments()["mine"], 2)
    assert shown(project) == {"light", "light/s2", "mine", "mine/s2"}
    (project.store / "light" / "s1" / "planner").mkdir(parents=True)
    assert shown(project) == {"light", "light/s1", "light/s2", "mine", "mine/s2"}


def test_an_overlay_is_not_shown_since_its_parent_is(tmp_path: Path) -> None:
    project = light_project(tmp_path / "project")
    (project.root / "experiments" / "child.yaml").write_text("description: x\nparent: light\n")
    assert shown(project) == {"light", "light/s1", "light/s2"}


def test_only_seeds_of_the_experiment_can_be_shown(tmp_path: Path) -> None:
    project = light_project(tmp_path / "project")
    file = project.root / "experiments" / "light.yaml"
    file.write_text(file.read_text().replace("shown: [1, 2]", "shown: [3]"))
    with pytest.raises(ExperimentError, match=r"shown: \[3\] are not among `seeds`"):
        load_experiment(file)


@pytest.mark.parametrize("owner", ["ann@example.org", "team:gui", "a.b+c@ml.example.com"])
def test_owners_are_those_of_the_file(tmp_path: Path, owner: str) -> None:
    project = light_project(tmp_path / "project")
    file = project.root / "experiments" / "light.yaml"
    file.write_text(f"{file.read_text()}owners: ['{owner}']\n")
    graph = build(project).resolve_asset_graph()
    assert graph.get(dg.AssetKey(["light", "s1", "planner"])).owners == [owner]


@pytest.mark.parametrize(
    "owner", ["ann", "team:", "@example.org", "ann@example", "ann@example.organisation", "a b@c.de"]
)
def test_an_owner_that_dagster_would_refuse_is_an_error_of_the_file(tmp_path: Path, owner: str) -> None:
    project = light_project(tmp_path / "project")
    file = project.root / "experiments" / "light.yaml"
    file.write_text(f"{file.read_text()}owners: ['{owner}']\n")
    with pytest.raises(ExperimentError, match=r"key `owners.0`"):
        load_experiment(file)
