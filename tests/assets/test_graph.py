"""The graph that Dagster is told, and whole iterations in process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import dagster as dg
from coepg_dagster.assets.about import COLUMN_TEXTS, COLUMNS
from coepg_dagster.assets.build import LEFT_OUT
from coepg_dagster.assets.ledger import EXPERIMENT_TAG, ITERATION_TAG
from coepg_dagster.assets.loop import _start
from coepg_dagster.assets.stage import StageContext
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

from coepg_dagster.auditing.archive import MODELS
from coepg_dagster.definitions import build
from coepg_dagster.experiment.files import ABLATIONS
from coepg_dagster.provenance import CONTINUED, LOOP, SHARED, Record, Ref, inputs_of
from coepg_dagster.store import Store
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
    light.make(0)
    observations = light.instance.fetch_observations(light.loop.twin("dataset"), limit=5).records
    assert [record.partition_key for record in observations] == ["1"]
    event = observations[0].event_log_entry.asset_observation
    assert event.tags["dagster/data_version"] == light.version("dataset", 0)
    assert event.metadata["stands for"].value == "/assets/light/s1/dataset?view=partitions&partition=0"
    assert list(event.metadata) == ["stands for", "page", "run"]
    # the pools of iteration 1 hold no model of iteration 0: nothing is handed over
    assert light.instance.fetch_observations(light.loop.twin("planner"), limit=5).records == []


def test_the_same_content_marks_nothing_and_other_content_marks_its_readers(light: InProcess) -> None:
    light.make(2)
    assert light.run(1).success
    assert stale_in_dagster(light) == {} and light.loop.stale(light.loop.records(light.instance)) == {}
    plant(light.project, "salt", "light/s1", Ref("dataset", 1))
    assert light.run(1).success
    marked = stale_in_dagster(light)
    assert set(marked) == {"planner_sft[2]", "grounder[2]", "planner[2]", "dataset[2]", "data_quality[2]"}
    stale = light.loop.stale(light.loop.records(light.instance))
    assert set(stale) == {Ref(asset, 2) for asset in LOOP}
    assert all("dataset[1] is now" in str(why) for why in stale.values())


def test_a_run_of_a_range_has_no_checks_by_partition_so_no_asset_has_a_backfill_policy(light: InProcess) -> None:
    """`BackfillPolicy.multi_run(1)` makes such runs. Once a Dagster reports their checks by partition, it can be set."""
    graph = light.defs.resolve_asset_graph()
    assert {graph.get(key).backfill_policy for key in graph.get_all_asset_keys()} == {None}
    light.run(None)
    result = light.defs.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=light.instance,
        asset_selection=[light.loop.key("planner_sft")],
        tags={"dagster/asset_partition_range_start": "0", "dagster/asset_partition_range_end": "0"},
    )
    assert {event.partition for event in result.get_asset_materialization_events()} == {"0"}
    assert {evaluation.partition for evaluation in result.get_asset_check_evaluations()} == {None}
    assert {evaluation.partition for evaluation in light.run(0).get_asset_check_evaluations()} == {"0"}


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
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.yaml")).write_text("")
    graph = light.defs.resolve_asset_graph()
    shown = {key.path[0]: graph.get(key) for key in graph.get_all_asset_keys() - before}
    assert set(shown) == {"light copy (1)", "draft", "child", r"caf\udce9"}
    assert {node.group_name for node in shown.values()} == {LEFT_OUT}
    assert "not valid YAML" in str(shown["draft"].description)
    assert "draft cannot be used" in str(shown["child"].description)
    assert light.run(None).success


def test_the_definitions_load_without_heavy_libraries() -> None:
    """Each run of Dagster is a new process that loads them: torch and transformers would cost it six seconds."""
    heavy = {
        "dagster_webserver",
        "huggingface_hub.hf_api",
        "matplotlib",
        "pandas",
        "scipy",
        "torch",
        "transformers",
        "trl",
    }
    command = f"import sys; from coepg_dagster.definitions import defs; defs(); print(*sys.modules.keys() & {heavy})"
    loaded = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_what_goes_on_from_the_models_before_is_an_edge_and_makes_stale(light: InProcess) -> None:
    file = light.project.root / "experiments" / "light.yaml"
    file.write_text(file.read_text() + "init: previous\n")
    graph = light.defs.resolve_asset_graph()
    for asset, before in (("planner_sft", "planner"), ("grounder", "grounder")):
        assert light.loop.twin(before) in graph.get(light.loop.key(asset)).parent_keys
    light.run(None)
    for k in range(3):
        assert light.run(k).success
    records = light.loop.records(light.instance)
    assert light.loop.stale(records) == {} and stale_in_dagster(light) == {}
    assert {str(used.ref) for used in records[Ref("planner_sft", 2)].inputs if used.iteration is not None} == {
        "dataset[1]", "planner[1]",
    }  # fmt: skip
    assert Ref("grounder", 0) not in {used.ref for used in records[Ref("grounder", 1)].inputs}
    plant(light.project, "salt", "light/s1", Ref("planner", 1))
    light.run(1, "planner")
    stale = light.loop.stale(light.loop.records(light.instance))
    assert "planner[1] is now" in stale[Ref("planner_sft", 2)].cause and Ref("grounder", 2) in stale  # by D_1
    assert "planner_sft[2]" in stale_in_dagster(light)


def test_an_end_to_end_agent_may_go_on_from_the_one_before(light: InProcess) -> None:
    folder = light.project.root / "experiments" / ABLATIONS
    folder.mkdir()
    text = "description: one model\nparent: light\nvariant: one\nagent: end_to_end\ntake: [dataset]\nshown: [1]\n"
    for init in ("base", "previous"):
        (folder / f"{init}.yaml").write_text(f"{text}init: {init}\n")
    graph = build(light.project, ABLATIONS).resolve_asset_graph()
    twins = {init: dg.AssetKey([init, "s1", "previous", "end_to_end"]) for init in ("base", "previous")}
    assert twins["previous"] in graph.get(dg.AssetKey(["previous", "s1", "end_to_end"])).parent_keys
    assert twins["base"] not in graph.get_all_asset_keys()


def test_training_starts_from_the_base_or_from_the_model_before(light: InProcess, tmp_path: Path) -> None:
    """The checkpoint, and its name on the card."""
    store, loop = Store(tmp_path / "store"), light.loop
    entry = {"checkpoint": "models/base", "version": "f00d"}
    (store.root / "models").mkdir(parents=True)
    (store.root / "models" / MODELS).write_text(json.dumps({"base_planner": entry, "base_grounder": entry}))
    for k, init in itertools.product((1, 2), ("base", "previous")):
        for asset in ("planner_sft", "grounder"):
            ref = Ref(asset, k)
            inputs = {
                used: Record(
                    asset=used.asset, iteration=used.iteration, data_version="beef", run_id="", inputs=[], config={}, seed=1,
                    folder="models" if used == Ref("open_models") else str(used), code_version="", seconds=0, device="",
                    figures={},
                )
                for used in inputs_of(ref, init=init)
            }  # fmt: skip
            start = _start(StageContext(None, None, loop, ref, inputs, store, tmp_path), asset, "base_planner")
            if (k, init) == (2, "previous"):
                before = f"{CONTINUED[asset]}[1]"
                assert start == (str(store.root / before), ("base", before, "beef"))
            else:
                assert start == ("models/base", ("base", "models/base", "f00d"))


def test_a_run_goes_on_while_its_file_cannot_be_used_and_a_new_one_is_refused(light: InProcess) -> None:
    light.make(0)
    loop, file = light.loop, light.project.root / "experiments" / "light.yaml"
    keys = set(light.defs.resolve_asset_graph().get_all_asset_keys())
    whole = file.read_text()
    file.write_text(f"{whole}sft: {{max_steps: 4")
    now = light.defs.resolve_asset_graph()
    assert keys < set(now.get_all_asset_keys()), "nothing is missing, and the file is named"
    refused = light.run(1, loop=loop)
    assert not refused.success and f"{file}, line" in light.why(refused)
    os.utime(file, (time.time() + 60,) * 2)  # it was changed after the run began
    assert light.run(1, loop=loop).success
    file.write_text(whole)
    assert set(light.defs.resolve_asset_graph().get_all_asset_keys()) == keys
    assert light.loop.stale(light.loop.records(light.instance)) == {}
