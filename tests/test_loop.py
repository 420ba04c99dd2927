"""The whole loop, as a user runs it: real tiny models, real workers, the real command line."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from coepg_dagster.assets.ledger import archive

from coepg_dagster.auditing.trace import trace
from coepg_dagster.experiment.files import ABLATIONS
from coepg_dagster.project import Project
from coepg_dagster.provenance import LOOP
from tests.project import REPOSITORY, Forked, coepg, make_project, run, tell
from tests.reproducible import dataset_versions

TINY = REPOSITORY / "tests" / "experiments" / "tiny.yaml"
THROUGH, SECOND_THROUGH = 2, 1

pytestmark = pytest.mark.slow

PROFILE = """
sft: {device: cpu, save_every: 1, on_anomaly: warn, grace_seconds: 40}
grpo_cdrem: {device: cpu, save_every: 3, timeout_minutes: 100}
regeneration: {device: cpu, processes: 2}
vllm: {memory: 0.5}
endpoints: {of_another_experiment: {base_url: "http://10.0.0.7:8000/v1"}}
"""


ABLATION = """description: x
parent: tiny
variant: no_cdrem
take: [planner_sft, grounder]
grpo: {ensemble: false}
"""


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two fresh projects in which the same experiment with the same seed was made, side by side.

    The first by the installed command on a machine with a profile, with another hash seed (that of jobs is 0) and inference in
    two processes; the second by `coepg reproduce`, so by forks, in one, an iteration less, and with an ablation.
    """
    both = [make_project(tmp_path_factory.mktemp("loop") / "project", TINY) for _ in range(2)]

    (both[0] / "machines").unlink()
    (both[0] / "machines").mkdir()
    (both[0] / "machines" / "mine.yaml").write_text(PROFILE)
    file = both[1] / "experiments" / "tiny.yaml"
    file.write_text(file.read_text().replace("iterations: 3", f"iterations: {SECOND_THROUGH}"))
    (both[1] / "experiments" / ABLATIONS).mkdir()
    (both[1] / "experiments" / ABLATIONS / "tiny_no_cdrem.yaml").write_text(ABLATION)
    first = coepg(both[0], "evolve", "tiny", "--through", str(THROUGH), "--on", "mine", PYTHONHASHSEED="1")
    second = Forked(both[1], "reproduce", "tiny", "--jobs", "2", "--seeds", "7", "--out", "docs")
    for process in (first, second):
        out, err = process.communicate(timeout=3000)
        assert process.returncode == 0, f"{out}\n{err}"
    assert out.strip() == "docs/results.md"
    return both


def test_results_have_every_number(projects: list[Path]) -> None:
    table = json.loads(run(projects[0], "results", "tiny", "--json"))
    assert (table["experiment"], table["seed"]) == ("tiny", 7)
    assert [row["iteration"] for row in table["iterations"]] == [0, 1, 2]
    for row in table["iterations"]:
        assert set(row["splits"]) == {"test_seed", "test_text", "test_family"}
        for score in (*row["splits"].values(), row["validation"]):
            assert 6 <= score["steps"] <= 12  # whole episodes
            for metric in ("ele_acc", "op_f1", "step_sr"):
                low, high = score[metric]["ci95"]
                assert 0 <= low <= score[metric]["macro"] <= high <= 100
                assert 0 <= score[metric]["micro"] <= 100
            assert score["step_sr"]["micro"] <= min(score["ele_acc"]["micro"], score["op_f1"]["micro"]) + 1e-9
        assert 0 < row["purity"] <= 100 and row["diversity"] >= 1 and 0 < row["coverage"] <= 100
        assert all(seconds > 0 for seconds in row["seconds"].values()) and "dataset" in row["seconds"]
        assert set(row["pairs"]) == {"judge", "attempts", "oracle_plan"} | (
            {"base_planner"} if row["iteration"] else set()
        )
        assert set(row["pairs"]["judge"]) == {"validation", *row["splits"]}
        assert row["stale"] == {}


def test_the_ui_plots_the_headline_metrics_over_k(projects: list[Path]) -> None:
    instance = dg.DagsterInstance.from_config(str(projects[0] / ".dagster"))
    event = instance.get_latest_materialization_event(dg.AssetKey(["tiny", "s7", "evaluation"]))
    assert event is not None and event.asset_materialization is not None
    shown = event.asset_materialization.metadata
    splits = ("validation", "test_seed", "test_text", "test_family")
    assert {name for name in shown if "/" in name and not name.startswith("dagster/")} == {
        f"{metric}/{split}" for metric in ("ele_acc", "op_f1", "step_sr") for split in splits
    }


def test_the_same_seed_gives_the_same_data(projects: list[Path]) -> None:
    first, second = (dataset_versions(project, "tiny", SECOND_THROUGH) for project in projects)
    assert first == second and len(set(first)) == SECOND_THROUGH + 1
    both = [sorted((project / "store/tiny/s7").glob("*/[01]/*")) for project in projects]
    made = [[(*folder.parts[-3:-1], folder.name) for folder in folders] for folders in both]
    assert made[0] == made[1] and len(made[0]) == len(LOOP) * (SECOND_THROUGH + 1)


def test_two_variants_from_nothing_to_the_page(projects: list[Path]) -> None:
    project = projects[1]
    content = json.loads((project / "docs" / "results.json").read_text())
    assert set(content) == {"rows", "findings"}
    scored = {(r["variant"], r["iteration"], r["seed"]) for r in content["rows"] if r["metric"] == "step_sr"}
    assert scored == {("full", 0, 7), ("full", 1, 7), ("no_cdrem", 1, 7)}
    for row in content["rows"]:
        assert row["experiment"] == "tiny" and row["split"] != "average"
        if row["ci95"] is not None:
            assert row["ci95"][0] <= row["value"] <= row["ci95"][1]
    claims = {one["claim"]: one["verdict"] for one in content["findings"]}
    assert claims["full - single grounder"] in ("holds for one seed", "not confirmed")
    assert claims["full - uniform"] == "not testable"
    process = Forked(project, "reproduce", "tiny", "--collect", "--out", "again")
    again, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert again.strip() == "again/results.md"
    assert json.loads((project / "again" / "results.json").read_text()) == content


def test_where_it_ran_is_in_the_record_and_changes_no_version(projects: list[Path]) -> None:
    def shown(project: Path, asset: str) -> dict[str, Any]:
        instance = dg.DagsterInstance.from_config(str(project / ".dagster"))
        filters = dg.AssetRecordsFilter(dg.AssetKey(["tiny", "s7", asset]), asset_partitions=["1"])
        event = instance.fetch_materializations(filters, limit=1).records[0].asset_materialization
        assert event is not None
        record: Any = event.metadata["record"].value
        assert event.metadata["place"].value == record["place"]
        return dict(record)

    for asset, used in (
        ("planner", {"save_every": 3}),
        ("verdicts", {"processes": 2}),
        ("grounder", {"save_every": 1}),
    ):
        one, two = (shown(project, asset) for project in projects)
        assert used.items() <= one["place"].items() and not used.items() <= two["place"].items()
        assert (one["place"]["machine"], two["place"]["machine"]) == ("mine", None)
        assert one["place"]["vllm"]["memory"] == 0.5 and "of_another_experiment" in one["place"]["endpoints"]
        assert (one["data_version"], one["code_version"]) == (two["data_version"], two["code_version"])


def test_a_trained_model_has_a_card_that_is_no_part_of_its_version(projects: list[Path]) -> None:
    for asset, base in (("planner_sft", "models/base-planner"), ("planner", "planner_sft[1]")):
        one, two = (next((project / "store" / "tiny" / "s7" / asset / "1").iterdir()) for project in projects)
        cards = [(folder / "README.md").read_text() for folder in (one, two)]
        assert one.name == two.name and all("| seconds |" in card for card in cards)
        assert f"| base | `{base}` |" in cards[0] and "`dataset[0]`" in cards[0]


def test_evolve_skips_what_is_there(projects: list[Path]) -> None:
    process = Forked(projects[0], "evolve", "tiny", "--through", str(THROUGH))
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0 and "everything is up to date" in err


def test_a_changed_configuration_is_stale_with_all_that_follows(projects: list[Path]) -> None:
    file = projects[1] / "experiments" / "tiny.yaml"
    before = file.read_text()
    file.write_text(before.replace("max_plans_per_step: 4", "max_plans_per_step: 3"))
    stale = json.loads(run(projects[1], "results", "tiny", "--json"))["iterations"]
    file.write_text(before)
    assert "code or configuration changed" in stale[0]["stale"]["dataset"]
    assert "planner_sft" not in stale[0]["stale"] and "verdicts" not in stale[0]["stale"]
    assert set(stale[1]["stale"]) == set(stale[1]["seconds"])


def test_stale_results_are_shown_as_they_were_measured(projects: list[Path]) -> None:
    project = projects[1]
    file, measured = project / "experiments" / "tiny.yaml", json.loads((project / "docs" / "results.json").read_text())
    before = text = file.read_text()
    for was, now in (
        ("max_train_steps: 24", "max_train_steps: 8"),
        ("max_eval_steps: 12", "max_eval_steps: 40"),
        (", verifier_b: models/verifier-b}", "}"),
    ):
        assert was in text
        text = text.replace(was, now)
    file.write_text(text)
    try:
        run(project, "reproduce", "tiny", "--collect", "--out", str(project / "stale"))
    finally:
        file.write_text(before)
    shown = json.loads((project / "stale" / "results.json").read_text())
    assert shown["rows"] == measured["rows"] and shown["findings"] != measured["findings"]


def test_rewards_are_explained_without_a_model(projects: list[Path], tmp_path: Path) -> None:
    again = json.loads(run(projects[0], "rewards", "recompute", "tiny@1", "--variant", "probability", "--json"))
    assert (again["same_reward"], again["same_advantage"], again["largest_difference"]) == (100, 100, 0)
    file = tmp_path / "prior.parquet"
    run(projects[0], "rewards", "recompute", "tiny@1", "--variant", "prior", "--out", str(file))
    assert pq.read_table(file).num_rows == again["rollouts"] > 0
    calibration = json.loads(run(projects[0], "rewards", "calibration", "tiny@1", "--out", str(tmp_path), "--json"))
    assert set(calibration["rollouts"]) <= set(calibration["verdicts"]) == {"verifier_a", "verifier_b", "grounder_1"}
    assert all(0 <= one["ece"] <= 1 for one in calibration["verdicts"].values())
    assert (tmp_path / "reliability-verdicts.png").stat().st_size > 1000
    code, _, err = tell(projects[0], "rewards", "agreement", "tiny@1")
    assert code == 1 and "was not rewarded by live pages at recorded steps: set `grpo.environment`" in err
    code, _, err = tell(projects[0], "rewards", "recompute", "tiny@0", "--variant", "prior")
    assert code == 1 and "not made by GRPO" in err


def test_unknown_references_are_refused(projects: list[Path]) -> None:
    for reference, word in (("nothing", "no experiment"), ("tiny/s9", "no such seed")):
        code, _, err = tell(projects[0], "results", reference)
        assert code == 1 and word in err


def test_ten_rows_of_d_2_are_traced_to_what_the_tables_say(projects: list[Path]) -> None:
    """Expected answers come from the Parquet files and folder names alone, with pandas."""
    project = projects[0]
    home = project / "store" / "tiny" / "s7"

    def table(asset: str, k: int, file: str) -> pd.DataFrame:
        [version] = (home / asset / str(k)).iterdir()
        return pd.read_parquet(version / file)

    def version(asset: str, k: int) -> str:
        [folder] = (home / asset / str(k)).iterdir()
        return folder.name

    [models_file] = (project / "store" / "tiny" / "open_models" / "all").glob("*/models.json")
    opened = json.loads(models_file.read_text())

    def weights(member: str, pool: str, asset: str) -> str:
        trained = re.fullmatch(r"\w+_(\d)", member)
        return version(asset, int(trained[1])) if trained else opened[f"{pool}/{member}"]["version"]

    [steps_file] = (project / "store" / "tiny" / "benchmark_steps" / "all").glob("*/steps.arrow")
    steps = pa.ipc.open_file(steps_file).read_all().to_pandas().set_index("step_id")
    d = {k: table("dataset", k, "dataset.parquet") for k in range(THROUGH + 1)}
    with dg.DagsterInstance.from_config(str(project / ".dagster")) as instance:
        archived = archive(Project(project), instance)
    for number in random.Random(0).sample(range(len(d[2])), 10):
        row = d[2].iloc[number]
        traced = trace(archived, "tiny/s7", 2, str(number))
        made_in = row["made_in"]
        candidates = table("candidate_plans", made_in, "candidates.parquet").set_index("candidate_id")
        votes = table("verdicts", made_in, "verdicts.parquet")
        decided = table("dataset", made_in, "decisions.parquet").set_index("candidate_id")["decision"]
        mine = candidates.loc[row["candidate_id"]]
        step = steps.loc[row["step_id"]]
        assert traced["row"]["id"] == row["row_id"] and traced["row"]["tampered"] == []
        holders = [(k, list(d[k]["row_id"]).index(row["row_id"])) for k in d if row["row_id"] in set(d[k]["row_id"])]
        assert [(one["iteration"], one["number"]) for one in traced["row"]["datasets"]] == holders
        assert (traced["step"]["step_id"], traced["step"]["goal"]) == (row["step_id"], step["goal"])
        shot = hashlib.sha256(step["screenshot"]).hexdigest()[:16]
        assert traced["step"]["screenshot"]["hash"] == shot == row["screenshot_hash"]
        assert (traced["plan"]["plan"], traced["plan"]["text"]) == (row["plan"], mine["text"])
        planner = traced["planner"]
        assert (planner["name"], planner["seed"]) == (mine["planner"], mine["sampling_seed"])
        assert planner["prompt"]["hash"] == mine["prompt_hash"]
        assert planner["weights"] == weights(mine["planner"], "planners", "planner")
        given = votes[votes["candidate_id"] == row["candidate_id"]]
        assert [
            (one["name"], one["hit"], one["point"], one["weights"], pytest.approx(one["confidence"]))
            for one in traced["verdicts"]
        ] == [
            (
                v.verifier,
                v.hit,
                [v.x, v.y],
                weights(v.verifier, "verifiers", "grounder"),
                min(1, math.exp(v.mean_logprob)),
            )
            for v in given.itertuples()
        ]
        assert traced["rule"]["hits"] == given["hit"].sum() == row["hits"]
        others = candidates[(candidates["step_id"] == row["step_id"]) & (decided.reindex(candidates.index) != "kept")]
        assert {one["candidate_id"]: one["reason"] for one in traced["dropped"]} == decided[others.index].to_dict()
        trained = {(a, k + 1) for k, _ in holders if k < THROUGH for a in ("planner_sft", "grounder", "planner")}
        assert {(one["asset"], one["iteration"]) for one in traced["trained"]} == trained
        assert (traced["parents"][-1]["asset"], traced["parents"][-1]["models"].keys()) == (
            "open_models",
            opened.keys(),
        )
    printed = json.loads(run(project, "trace", d[2].iloc[0]["row_id"], "--json"))
    assert printed == json.loads(json.dumps(trace(archived, "tiny/s7", 2, "0")))


def test_the_list_of_open_models_is_in_the_metadata(projects: list[Path]) -> None:
    with dg.DagsterInstance.from_config(str(projects[0] / ".dagster")) as instance:
        event = instance.get_latest_materialization_event(dg.AssetKey(["tiny", "open_models"]))
    assert event is not None and event.asset_materialization is not None
    listed = [record.data for record in event.asset_materialization.metadata["open models"].value.records]
    assert {row["model"]: row["checkpoint"] for row in listed} == {
        "base_planner": "models/base-planner",
        "base_grounder": "models/base-grounder",
        **{f"planners/planner_{x}": f"models/planner-{x}" for x in "ab"},
        **{f"verifiers/verifier_{x}": f"models/verifier-{x}" for x in "ab"},
        "judge": "models/base-grounder",
    }
    for row in listed:
        weights = hashlib.sha256((REPOSITORY / row["checkpoint"] / "model.safetensors").read_bytes()).digest()
        assert row["version"] == hashlib.sha256(weights).hexdigest()[:16]


def test_two_iterations_differ_and_nothing_is_left_over(projects: list[Path]) -> None:
    diff = json.loads(run(projects[0], "diff", "tiny@1", "tiny@2", "--json"))
    data = diff["data"]
    before, after = data["rows"]
    assert after - before == len(data["gained"]) - len(data["lost"])
    assert data["same"] + len(data["changed"]) + len(data["gained"]) == after
    assert diff["models"]["planner"]["distance"] > 0
    assert {"test_seed", "test_text", "test_family", "validation"} == set(diff["results"])
    assert "none tampered with" in run(projects[0], "audit", "tiny")
    assert run(projects[0], "gc").endswith("removed 0 folders, 0 bytes\n")


def test_iterations_are_compared_on_each_test_split_alone(projects: list[Path]) -> None:
    splits = json.loads(run(projects[0], "compare", "tiny@0", "tiny@1", "--json"))["splits"]
    assert set(splits) == {"test_seed", "test_text", "test_family"}
    rows = {one["iteration"]: one for one in json.loads(run(projects[0], "results", "tiny", "--json"))["iterations"]}
    for split, compared in splits.items():
        of = compared["differences"]["step_sr"]
        scores = [rows[k]["splits"][split] for k in (0, 1)]
        assert compared["steps"] == scores[0]["steps"]
        assert [of["a"], of["b"]] == pytest.approx([score["step_sr"]["macro"] for score in scores])
    table = run(projects[0], "compare", "tiny@0", "tiny@1")
    assert all(f"{split}: " in table for split in splits) and "differs" in table


def test_a_model_that_was_tampered_with_is_named_by_the_command(projects: list[Path]) -> None:
    [weights] = (projects[1] / "store" / "tiny" / "s7" / "grounder" / "1").glob("*/model.safetensors")
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    code, out, err = tell(projects[1], "trace", "tiny@1#0")
    weights.write_bytes(before)
    assert code == 1 and "TAMPERED" in out
    assert "tampered: grounder[1]" in err and "model.safetensors has other content than when it was made" in err


MANY = """description: Plug-ins of every kind at once
parent: tiny
variant: many
take: [dataset]
sft: {curation: {seed_rules: {area_at_most: 1.0}, label_check: {by: verifier_a, side: 300.0}, perplexity_weighted: {}}}
grounder_rl:
  enabled: true
  prompts_per_step: 2
  group_size: 2
  micro_batch_size: 4
  max_steps: 1
  max_plan_tokens: 12
  point_score: se_gui
  terms: {format: 0.5}
  curation: {attention_filter: {threshold: 0.0, layers: 1}}
grpo:
  point_score: gui_g2
  terms: {length: 0.1, sub_goal: 0}
  combiner: infigui_r1
  advantage: [rloo, sngs]
  curation: {frontier: {share: 0.9, samples: 2}}
evaluation:
  inference: {region_vote: {samples: 2}, zoom: {}, best_of_plans: {plans: 2}, consistency_check: {retries: 1}}
"""


@pytest.mark.long
def test_plugins_of_every_kind_run_together(projects: list[Path]) -> None:
    root = projects[0]
    (root / "experiments" / "many.yaml").write_text(MANY)
    run(root, "evolve", "many", "--through", "1")
    pairs = json.loads(run(root, "results", "many", "--json"))["iterations"][1]["pairs"]
    assert {"region_vote", "zoom", "best_of_plans", "consistency_check"} <= {name.removeprefix("by_") for name in pairs}
    [rollouts] = (root / "store" / "many" / "s7" / "planner" / "1").glob("*/rollouts.parquet")
    parts = {part["name"] for row in pq.read_table(rollouts)["parts"].to_pylist() for part in row}
    assert parts == {"parsed", "type", "value", "point", "length", "sub_goal"}
    row = pq.read_table(next((root / "store" / "tiny" / "s7" / "dataset" / "0").glob("*/dataset.parquet")))["row_id"][0]
    told = run(root, "trace", f"tiny@0#{row}")
    assert "grounder_rl[1]" in told and "planner[1]" in told
