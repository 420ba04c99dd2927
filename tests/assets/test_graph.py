"""The graph that Dagster is told, and whole iterations in process."""

from __future__ import annotations

import subprocess
import sys

import dagster as dg
from coepg_dagster.assets.about import COLUMN_TEXTS, COLUMNS
from coepg_dagster.assets.build import LEFT_OUT
from coepg_dagster.assets.ledger import EXPERIMENT_TAG, ITERATION_TAG
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

from coepg_dagster.provenance import LOOP, SHARED, Ref
from tests.assets.conftest import InProcess
from tests.assets.light import light_definitions, light_project, plant


def stale_in_dagster(light: InProcess) -> dict[str, str]:
    """`asset[k]` → first root cause, for what Dagster itself marks as stale."""
    graph = light.defs.resolve_asset_graph()
    resolver = CachingStaleStatusResolver(light.instance, graph, LoadingContextForTest(light.instance))
    reasons = {}
    for asset in LOOP:
        for k in range(light.loop.experiment.iterations + 1):
            if resolver.get_status(light.loop.key(asset), str(k)).value == "STALE":
                causes = resolver.get_stale_root_causes(light.loop.key(asset), str(k))
                reasons[f"{asset}[{k}]"] = causes[0].reason
    return reasons


def test_keys_come_in_an_order_in_which_an_iteration_can_be_made(tmp_path) -> None:
    defs = light_definitions(light_project(tmp_path / "project"))
    order = [key.to_user_string() for key in defs.resolve_asset_graph().toposorted_asset_keys]
    mine = [
        name.removeprefix("light/s1/").removeprefix("light/") for name in order if "/s1/" in name or "/s" not in name
    ]
    assert set(mine) == {
        *SHARED,
        *LOOP,
        "previous/dataset",
        "previous/planner",
        "previous/grounder",
        "evolution_report",
    }
    place = {name: i for i, name in enumerate(mine)}
    before = [
        ("benchmark_steps", "planner_sft"), ("open_models", "grounder"), ("previous/dataset", "planner_sft"),
        ("planner_sft", "planner"), ("grounder", "planner"), ("planner", "candidate_plans"),
        ("previous/planner", "candidate_plans"), ("candidate_plans", "verdicts"), ("previous/grounder", "verdicts"),
        ("verdicts", "dataset"), ("dataset", "data_quality"), ("planner", "evaluation"),
        ("evaluation", "evolution_report"), ("data_quality", "evolution_report"),
    ]  # fmt: skip
    assert [pair for pair in before if place[pair[0]] > place[pair[1]]] == []


def test_iterations_run_in_process_and_say_what_they_are_made_from(light: InProcess) -> None:
    for k in range(3):
        result = light.run(k, *SHARED, *LOOP) if k == 0 else light.run(k)  # the first run makes the inputs too
        assert result.success
        tags = light.instance.get_run_by_id(result.run_id).tags
        assert (tags[EXPERIMENT_TAG], tags[ITERATION_TAG]) == ("light/s1", str(k))
    records = light.loop.records(light.instance)
    assert len(records) == len(SHARED) + 3 * len(LOOP) and light.loop.stale(records) == {}
    assert stale_in_dagster(light) == {}
    used = records[Ref("planner_sft", 2)].input("dataset")
    assert used.data_version == records[Ref("dataset", 1)].data_version
    assert {str(i.ref) for i in records[Ref("candidate_plans", 2)].inputs} == {
        "planner[2]", "planner[1]", "benchmark_steps", "open_models",
    }  # fmt: skip
    assert light.run(None, "evolution_report").success


def test_the_twin_says_what_it_stands_for(light: InProcess) -> None:
    light.run(None), light.run(0)
    observations = light.instance.fetch_observations(light.loop.twin("dataset"), limit=5).records
    assert [record.partition_key for record in observations] == ["1"]
    event = observations[0].event_log_entry.asset_observation
    assert event.tags["dagster/data_version"] == light.version("dataset", 0)
    assert event.metadata["stands for"] == dg.MetadataValue.asset(light.loop.key("dataset"))
    assert event.metadata["partition"].value == "0"
    # the pools of iteration 1 hold no model of iteration 0: nothing is handed over
    assert light.instance.fetch_observations(light.loop.twin("planner"), limit=5).records == []


def test_the_same_content_marks_nothing_and_other_content_marks_its_readers(light: InProcess) -> None:
    light.run(None)
    for k in range(3):
        light.run(k)
    assert light.run(1).success
    assert stale_in_dagster(light) == {} and light.loop.stale(light.loop.records(light.instance)) == {}
    plant(light.project, "salt", "light/s1", Ref("dataset", 1))
    assert light.run(1).success
    marked = stale_in_dagster(light)
    assert set(marked) == {"planner_sft[2]", "grounder[2]", "planner[2]", "dataset[2]", "data_quality[2]"}
    stale = light.loop.stale(light.loop.records(light.instance))
    assert set(stale) == {Ref(asset, 2) for asset in LOOP}
    assert all("dataset[1] is now" in str(why) for why in stale.values())


def test_every_column_says_what_it_means() -> None:
    assert set(COLUMN_TEXTS) == {name for schema in COLUMNS.values() for name in schema.names}


def test_a_file_that_cannot_be_used_costs_only_its_experiment(light: InProcess) -> None:
    """The graph shows what was left out, and why; the rest is as it was."""
    before = light.defs.resolve_asset_graph().get_all_asset_keys()
    folder = light.project.root / "experiments"
    (folder / "light copy (1).yaml").write_text((folder / "light.yaml").read_text())
    (folder / "draft.yaml").write_text("description: [half a dra")
    (folder / "child.yaml").write_text("parent: draft\ndescription: x\ntake: [dataset]\n")
    (folder / "._light.yaml").write_bytes(b"\x00\x05\x16\x07")
    graph = light.defs.resolve_asset_graph()
    shown = {key.path[0]: graph.get(key) for key in graph.get_all_asset_keys() - before}
    assert set(shown) == {"light copy (1)", "draft", "child"}
    assert {node.group_name for node in shown.values()} == {LEFT_OUT}
    assert "not valid YAML" in str(shown["draft"].description)
    assert "draft cannot be used" in str(shown["child"].description)
    assert light.run(None).success


def test_the_definitions_load_without_model_libraries() -> None:
    """Each run of Dagster is a new process that loads them: torch and transformers would cost it six seconds."""
    command = "import sys, coepg_dagster.definitions; print(*sys.modules.keys() & {'torch', 'transformers', 'trl'})"
    loaded = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []
