"""Overlays that take artifacts from their parent: keys, records, staleness and what is made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from coepg_dagster.assets.evolve import RunFailed, Wanted, evolve_through
from coepg_dagster.assets.ledger import Loop
from coepg_dagster.assets.pages import lineage_of

from coepg_dagster.experiment.files import ABLATIONS, load_experiment
from coepg_dagster.provenance import LOOP, Ref
from tests.assets.conftest import InProcess
from tests.assets.light import light_artifacts, light_definitions, light_project, plant
from tests.assets.test_evolve import QUIET, runs_of

SHARING = "description: another reward\nparent: light\nvariant: single\ntake: [planner_sft, grounder]\ngrpo: {ensemble: false}\n"
ALONE = "description: no GRPO\nparent: light\nvariant: no_grpo\ngrpo: {enabled: false}\n"


@pytest.fixture(scope="module")
def overlays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """The light project, evolved through iteration 1, and so an overlay that shares its π_k and one with its own loop."""
    project = light_project(tmp_path_factory.mktemp("overlays") / "project")
    folder = project.root / "experiments" / ABLATIONS
    folder.mkdir()
    (folder / "sharing.yaml").write_text(SHARING)
    (folder / "alone.yaml").write_text(ALONE)
    with dg.DagsterInstance.ephemeral() as instance:
        light = InProcess(project, instance)
        evolve_through(light.defs, light.instance, light.loop, 1, QUIET)
        assert evolve(light, "sharing", 1) == 3  # two iterations, report
        assert evolve(light, "alone", 1) == 4  # and its inputs
        yield light


def overlay(project: InProcess, name: str) -> Loop:
    return Loop(project.project.experiments(ABLATIONS)[name], 1, project.project.root)


def evolve(project: InProcess, name: str, through: int) -> int:
    loop = overlay(project, name)
    return evolve_through(light_artifacts(loop), project.instance, loop, through, QUIET)


def test_runs_of_an_ablation_are_those_of_its_code_location(overlays: InProcess) -> None:
    counts = {place: len(runs_of(overlays.instance, place, "alone/s1")) for place in ("coepg", "reproductions")}
    assert counts == {"coepg": 0, "reproductions": 4}


def test_what_takes_its_data_is_made_at_one_iteration_alone(overlays: InProcess) -> None:
    (overlays.project.root / "experiments" / ABLATIONS / "late.yaml").write_text(SHARING)
    try:
        loop = overlay(overlays, "late")
        defs = light_artifacts(loop)
        assert (
            evolve_through(defs, overlays.instance, loop, 1, QUIET, wanted=Wanted(first=1)) == 2
        )  # the iteration, the report
        made = {ref.iteration for ref in loop.records(overlays.instance) if ref.asset in loop.made}
        assert made == {1}
        assert evolve_through(defs, overlays.instance, loop, 1, QUIET) == 2  # iteration 0, and the report again
    finally:
        (overlays.project.root / "experiments" / ABLATIONS / "late.yaml").unlink()


def test_what_is_taken_is_made_anew_in_the_parent(overlays: InProcess) -> None:
    loop = overlay(overlays, "sharing")
    assert loop.where_taken("grounder", 1) == ["it is taken from light/s1: run `coepg evolve light/s1 --through 1`"]
    assert loop.where_taken("planner", 1) == [] == overlays.loop.where_taken("grounder", 1)


def test_the_second_location_points_to_the_keys_of_the_first(overlays: InProcess) -> None:
    graph = light_definitions(overlays.project, folder=ABLATIONS).resolve_asset_graph()
    parents = {key.to_user_string() for key in graph.get(dg.AssetKey(["sharing", "s1", "planner"])).parent_keys}
    assert parents == {"light/s1/planner_sft", "light/s1/grounder", "light/s1/previous/dataset"}
    made = {key.path[-1] for key in graph.materializable_asset_keys if key.path[:2] == ["sharing", "s1"]}
    assert made == {"planner", "evaluation", "evolution_report"}
    mapping = graph.get_partition_mapping(
        dg.AssetKey(["sharing", "s1", "planner"]), dg.AssetKey(["light", "s1", "grounder"])
    )
    assert isinstance(mapping, dg.IdentityPartitionMapping)


def test_an_overlay_makes_what_it_does_not_take_and_says_from_whom(overlays: InProcess) -> None:
    loop, parent = overlay(overlays, "sharing"), overlays.loop
    records = loop.records(overlays.instance)
    assert loop.stale(records) == {} and evolve(overlays, "sharing", 1) == 0
    used = records[Ref("planner", 1)].input("planner_sft")
    assert (used.taken_from, used.data_version) == ("light/s1", overlays.version("planner_sft", 1))
    assert records[Ref("evaluation", 1)].input("planner").taken_from is None
    assert not (parent.root / "store" / "sharing" / "s1" / "dataset").exists()
    alone = overlay(overlays, "alone").records(overlays.instance)
    assert {ref.asset for ref in alone if ref.iteration == 1} == set(LOOP)
    assert all(used.taken_from is None for record in alone.values() for used in record.inputs)


def test_what_is_not_there_yet_is_refused_with_the_command_that_makes_it(overlays: InProcess) -> None:
    with pytest.raises(RunFailed, match=r"planner_sft\[2\] does not exist.*run `coepg evolve light/s1 --through 2`"):
        evolve(overlays, "sharing", 2)
    loop = overlay(overlays, "sharing")
    records = loop.records(overlays.instance)
    assert loop.awaited(records, {}, 2) == [Ref("planner_sft", 2), Ref("grounder", 2)]
    assert loop.awaited(records, {}, 1) == []


def test_the_map_of_an_overlay_shows_whose_its_artifacts_are(overlays: InProcess) -> None:
    page = lineage_of(overlay(overlays, "sharing"), overlays.instance, "http://127.0.0.1:3000")
    assert "planner_sft of light" in page and "/assets/light/s1/planner_sft?" in page
    assert "/assets/sharing/s1/evaluation?" in page and "evaluation of light" not in page


def test_an_overlay_of_the_repository_makes_data_only_where_it_takes_none_of_its_parent(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "experiments" / ABLATIONS
    for file in sorted(folder.glob("*.yaml")):
        experiment = load_experiment(file)
        assert ("dataset" in experiment.made) == (not {"dataset", "planner_sft"} & set(experiment.take)), file


def test_what_is_stale_in_the_parent_is_stale_here_with_its_cause(overlays: InProcess) -> None:
    plant(overlays.project, "salt", "light/s1", Ref("verdicts", 0))
    assert overlays.run(0, "verdicts").success
    loop = overlay(overlays, "sharing")
    records = loop.records(overlays.instance)
    stale = loop.stale(records)
    assert "dataset[0]: in light/s1: verdicts[0] is now" in str(stale[Ref("evaluation", 1)])
    assert Ref("planner", 0) not in stale
    alone = overlay(overlays, "alone")
    assert alone.stale(alone.records(overlays.instance)) == {}
    # once the parent was made again, what was read of it is no longer the current version
    evolve_through(overlays.defs, overlays.instance, overlays.loop, 1, QUIET)
    records = loop.records(overlays.instance)
    assert "planner_sft[1] is now" in str(loop.stale(records)[Ref("planner", 1)])
    assert evolve(overlays, "sharing", 1) == 2
    assert loop.stale(loop.records(overlays.instance)) == {}


LEARNING = """description: both models learn by GRPO
parent: light
variant: both
take: [planner_sft, grounder]
grounder_rl: {enabled: true, point_score: se_gui}
"""


def test_a_grounder_that_learns_by_grpo_is_phi_for_all_that_reads_it(overlays: InProcess) -> None:
    """Made between the grounder and the planner, handed over to the next iteration; elsewhere there is no such asset."""
    (overlays.project.root / "experiments" / ABLATIONS / "both.yaml").write_text(LEARNING)
    try:
        evolve(overlays, "both", 1)
        loop = overlay(overlays, "both")
        records = loop.records(overlays.instance)
        assert loop.made == ("grounder_rl", "planner", "evaluation")
        assert {used.ref for used in records[Ref("grounder_rl", 1)].inputs} == {Ref("grounder", 1), Ref("dataset", 0)}
        for asset in ("planner", "evaluation"):
            read = {used.ref for used in records[Ref(asset, 1)].inputs}
            assert Ref("grounder_rl", 1) in read and Ref("grounder", 1) not in read
        assert loop.stale(records) == {}
        graph = light_definitions(overlays.project, folder=ABLATIONS).resolve_asset_graph()
        keys = {tuple(key.path) for key in graph.get_all_asset_keys()}
        assert ("both", "s1", "grounder_rl") in keys and ("alone", "s1", "grounder_rl") not in keys
        assert loop.key("grounder_rl") in graph.get(loop.key("planner")).parent_keys
        assert loop.key("grounder") in graph.get(loop.key("grounder_rl")).parent_keys
    finally:
        (overlays.project.root / "experiments" / ABLATIONS / "both.yaml").unlink()


def test_a_whole_loop_reads_the_grounder_of_the_iteration_before(overlays: InProcess) -> None:
    whole = LEARNING.replace("take: [planner_sft, grounder]\n", "")
    (overlays.project.root / "experiments" / ABLATIONS / "whole.yaml").write_text(whole)
    try:
        loop = overlay(overlays, "whole")
        graph = light_artifacts(loop).resolve_asset_graph()
        assert {loop.twin("grounder_rl"), loop.key("grounder_rl")} <= graph.get(loop.key("verdicts")).parent_keys
        assert loop.twin("grounder") not in graph.get_all_asset_keys()
    finally:
        (overlays.project.root / "experiments" / ABLATIONS / "whole.yaml").unlink()
