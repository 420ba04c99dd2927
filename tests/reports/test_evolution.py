"""The evolution report: the case study by its rule, what is missing with its command, and foreign text as text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from coepg_dagster.artifacts import BOARDS, PAIRS
from coepg_dagster.experiment.schema import Evaluation, Experiment
from coepg_dagster.provenance import Record, Ref
from coepg_dagster.reports.evolution import Evolution, ShownLoop, case_study, write_report
from coepg_dagster.reports.lineage import key_number
from coepg_dagster.results import (
    board_notes,
    board_tables,
    learned_text,
    overview,
    pairs_text,
    results,
    rows_of,
    short_splits,
)
from tests.assets.light import score_of
from tests.chromium import NEEDS_CHROMIUM
from tests.conftest import png, step, step_table
from tests.reports.test_lineage import experiment

BAD = "<script>alert(1)</script>"
STEPS = step_table(
    *(
        step(name, split="test_seed", family=family, goal=BAD, screenshot=png(box=(10, 10, 20, 20)))
        for name, family in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("c1", "c"))
    ),
    step("v", split="validation", screenshot=png()),
)


def predictions(**hits: bool) -> pa.Table:
    """One answer for each step of STEPS; a hit lies in the box."""
    rows = [
        {"step_id": name, "plan": f"plan of {name}", "action_type": "CLICK", "value": ""}
        | {"x": 15.0 if hits.get(name) else 50.0, "y": 15.0}
        for name in STEPS["step_id"].to_pylist()
    ]
    return pa.Table.from_pylist(rows)


def test_cases_are_the_first_step_of_each_family_that_failed_first_and_succeeds_now() -> None:
    made = {
        0: predictions(a1=True),
        1: predictions(c1=True, v=False),
        2: predictions(b1=True),
        3: predictions(a1=True, a2=True, b1=True, c1=True, v=True),
    }
    cases = case_study("miniwob/point", STEPS, made, ["test_seed"])
    assert [case["step"]["id"] for case in cases] == [
        "a1",
        "b1",
    ]  # not a2: of the same family; c1 was right; v is no test
    assert [(one["k"], one["right"]) for one in cases[1]["attempts"]] == [(1, False), (2, True), (3, True)]
    assert cases[0]["attempts"][0]["plan"] == "plan of a1" and cases[0]["attempts"][2]["x"] == 15
    assert [case["step"]["id"] for case in case_study("miniwob/point", STEPS, made, ["test_seed"], count=1)] == ["a1"]
    assert case_study("miniwob/point", STEPS, {0: made[0], 1: made[3]}, ["test_seed"]) == []
    # M_1 was not asked a1, and M_2 not b1: that is no failure
    some = made | {1: made[1].filter(pc.not_equal(made[1]["step_id"], "a1"))}
    assert [case["step"]["id"] for case in case_study("miniwob/point", STEPS, some, ["test_seed"])] == ["a2", "b1"]
    some |= {2: made[2].filter(pc.not_equal(made[2]["step_id"], "b1"))}
    assert [case["step"]["id"] for case in case_study("miniwob/point", STEPS, some, ["test_seed"])] == ["a2"]
    assert case_study("miniwob/point", STEPS, made | {3: made[3].slice(0, 0)}, ["test_seed"]) == []


def record(asset: Any, k: int, figures: dict[str, Any]) -> Record:
    about = {
        "data_version": f"v{k}",
        "run_id": "r",
        "folder": "f",
        "inputs": [],
        "code_version": "1",
        "config": {"rule": "any"},
    }
    return Record(asset=asset, iteration=k, **about, seed=1, seconds=60, device="cpu", figures=figures)


def evolution(of: Experiment) -> Evolution:
    records: dict[Ref, Record] = {}
    for k in range(3):
        split = score_of(40.0 + 5 * k, [35.0 + 5 * k, 46.0 + 5 * k])
        records[Ref("evaluation", k)] = record("evaluation", k, {"validation": split, "test_seed": split})
        figures = {"purity": 70.0 + k, "purity_open": 69.0, "diversity": 2.0 + k, "coverage": 80.0}
        records[Ref("data_quality", k)] = record("data_quality", k, figures)
    made = {1: predictions(), 2: predictions(b1=True)}
    cases = case_study("miniwob/point", STEPS, made, ["test_seed"])
    return Evolution(of, 1, results(of, 1, records, {}), [ShownLoop(of, records)], cases=cases)


def test_what_each_training_changed_is_among_the_results(tmp_path: Path) -> None:
    of = experiment(tmp_path)
    change = {"before": 58.6, "after": 65.7, "difference": 7.1, "ci95": [3.0, 11.2]}
    probe = {"train": change, "validation": change, "steps": {"train": 9, "validation": 9}, "judge": "grounder_1"}
    records = {
        Ref(asset, k): record(asset, k, figures)
        for asset, k, figures in (
            ("planner_sft", 0, {}),
            ("planner_sft", 1, {"probe": probe | {"train": None}}),
            ("planner", 1, {"probe": probe}),
        )
    }
    first, second = results(of, 1, records, {})["iterations"]
    assert first["sft_planner"] is None and learned_text(first) == []
    assert second["grpo"] == {"train": change, "validation": change}
    assert second["sft_planner"] == {"train": None, "validation": change} and second["sft_grounder"] is None
    text = "58.6 → 65.7 (+7.1 [+3.0, +11.2])"
    assert learned_text(second) == [
        f"k = 1, SFT of the planner: validation {text}",
        f"k = 1, GRPO: train {text}, validation {text}",
    ]
    assert key_number(of, records[Ref("planner", 1)]) == "GRPO +7.1 on train"


def test_boards_have_tables_of_their_own_by_their_own_protocol(tmp_path: Path) -> None:
    board = {"path": "x", "protocol": "screenspot_pro/items"}
    of = experiment(tmp_path).model_copy(update={"evaluation": Evaluation.model_validate({"boards": {"pro": board}})})
    value = {"macro": 30.0, "micro": 40.0, "ci95": None, "ci95_micro": [35.0, 45.0], "n": 1581}
    alone = {"protocol": "screenspot_pro/items", "rows": 1581, "metrics": {"acc": value}, "notes": {}, "source": "s"}
    agent = score_of(50.0, [45.0, 55.0])
    records = {
        Ref("evaluation", 0): record("evaluation", 0, {"validation": agent, "test_seed": agent, BOARDS: {"pro": alone}})
    }
    [table] = board_tables(of, 1, records)
    assert table.rows == (("0", "40.0 [35.0, 45.0]", "30.0"),) and "screenspot_pro/items" in table.protocols
    assert "pro" not in overview(of, 1, records)[0].header and not overview(of, 1, records)[1]
    assert board_notes(records[Ref("evaluation", 0)]) == [
        "Alone on pro: 40.0 [35.0, 45.0] per cent of 1,581 items, by screenspot_pro/items."
    ]
    moved = of.model_copy(
        update={"evaluation": Evaluation.model_validate({"boards": {"pro": board | {"protocol": "osworld_g/items"}}})}
    )
    assert board_tables(moved, 1, records) == [] and "screenspot_pro/items" in overview(moved, 1, records)[1][0]


def test_other_pairs_are_rows_beside_the_agent(tmp_path: Path) -> None:
    of = experiment(tmp_path)
    agent, judge = score_of(45.0, [40.0, 51.0]), score_of(38.0, [33.0, 44.0])
    figures = {"validation": agent, "test_seed": agent, PAIRS: {"judge": {"validation": judge, "test_seed": judge}}}
    records = {Ref("evaluation", 0): record("evaluation", 0, figures)}
    [iteration] = results(of, 1, records, {})["iterations"]
    of_judge = {"macro": 38.0, "ci95": [33.0, 44.0]}
    assert iteration["pairs"] == {"judge": {"validation": of_judge, "test_seed": of_judge}}
    assert iteration["validation"]["step_sr"]["macro"] == 45.0
    assert pairs_text(iteration) == ["k = 0, π'_k with the judge: validation 38.0, test_seed 38.0"]
    values = {(row.split, row.metric): row.value for row in rows_of(of, 1, records)}
    assert values["test_seed", "step_sr_judge"] == 38.0 and values["test_seed", "step_sr"] == 45.0


def test_results_have_the_documented_shape(tmp_path: Path) -> None:
    iterations = evolution(experiment(tmp_path)).table["iterations"]
    value = {"macro": 45.0, "micro": 41.0, "ci95": [40.0, 51.0]}
    split = {"steps": 10, "protocol": "miniwob/point"} | dict.fromkeys(("ele_acc", "op_f1", "step_sr"), value)
    assert iterations[1] == {
        "iteration": 1,
        "splits": {"test_seed": split},
        "validation": split,
        "purity_frozen": 69.0,
        "purity": 71.0,
        "diversity": 3.0,
        "coverage": 80.0,
        "sft_planner": None,
        "sft_grounder": None,
        "grpo": None,
        "pairs": {},
        "seconds": {"data_quality": 60.0, "evaluation": 60.0},
        "stale": {},
    }
    assert json.loads(json.dumps(iterations)) == iterations


def test_what_another_protocol_or_rule_counted_is_left_out_and_named(tmp_path: Path) -> None:
    of = evolution(experiment(tmp_path))
    records = dict(of.loops[0].records)
    scored, chosen = records[Ref("evaluation", 1)], records[Ref("data_quality", 0)]
    old = {split: score | {"protocol": "mind2web/seeact"} for split, score in scored.figures.items()}
    records[Ref("evaluation", 1)] = scored.model_copy(update={"figures": old})
    records[Ref("data_quality", 0)] = chosen.model_copy(update={"config": {"rule": "k_of_n", "k": 2}})
    table, left_out = overview(of.experiment, 1, records)
    assert [row[1:6] for row in table.rows] == [
        ("40.0 [35.0, 46.0]", "–", "–", "–", "–"),
        ("–", "69.0", "71.0", "3.0", "80.0"),
        ("50.0 [45.0, 56.0]", "69.0", "72.0", "4.0", "80.0"),
    ]
    measures = "purity_frozen, purity, diversity, coverage"
    assert table.protocols == f"Protocol of step_sr: miniwob/point, macro; of {measures}: rule any."
    assert left_out == [
        "left out: light, k = 0: by rule k_of_n with k = 2, not by rule any, until it is made again",
        "left out: light, k = 1: by mind2web/seeact, not by miniwob/point, until it is made again",
    ]
    page = tmp_path / "evolution.html"
    write_report(replace(of, loops=[ShownLoop(of.experiment, records)]), page)
    assert all(line in page.read_text() for line in left_out)


def test_a_share_of_the_labels_differs_in_nothing_else(tmp_path: Path) -> None:
    of = experiment(tmp_path)

    def loop(name: str, steps: int | None, **changes: Any) -> Experiment:
        benchmark = of.benchmark.model_copy(update={"max_train_steps": steps})
        return of.model_copy(update={"name": name, "benchmark": benchmark, "seeds": [1], "parent": "light"} | changes)

    whole = of.model_copy(update={"benchmark": loop("whole", 8).benchmark})
    shares = [loop("half", 4, grpo=of.grpo.model_copy(update={"max_prompts": 64}), take=["open_models"])]
    others = [
        loop("all", None),
        loop("more", 16),
        loop("variant", 2, variant="other"),
        loop("takes", 2, take=["dataset"]),
        loop("init", 2, init="previous"),
        *(
            loop(section, 2, **{section: getattr(of, section).model_copy(update=change)})
            for section, change in {
                "models": {"verifiers": of.models.planners},
                "sft": {"max_steps": 4},
                "grounder_rl": {"learning_rate": 1.0},
                "grpo": {"group_size": 2},
                "regeneration": {"plans_per_planner": 3},
                "evaluation": {"attempts": 5},
            }.items()
        ),
        loop("level", 2).model_copy(update={"benchmark": loop("", 2).benchmark.model_copy(update={"level": "low"})}),
    ]
    loops = [ShownLoop(one, {}) for one in (whole, *shares, *others)]
    assert Evolution(whole, 1, {}, loops).labels == {100: whole.name, 50: "half"}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("evolution")
    file = folder / "evolution.html"
    return file, write_report(evolution(experiment(folder)), file)


def test_what_is_missing_says_which_command_makes_it(page: tuple[Path, str]) -> None:
    text = page[0].read_text()
    for variant in ("no_grpo", "no_cdrem", "uniform", "prior_only", "end_to_end"):
        assert f"<code>coepg evolve light_{variant} --through 2</code>" in text
    assert (
        "50.0 [45.0, 56.0]" in text and "50.00 [45.00, 56.00]" in text
    )  # Table 1; Table 4 has the paper's two decimals
    assert "58.41" in text and "56.50" in text and "miniwob/point" in text


def test_a_short_denominator_is_noted_once(page: tuple[Path, str], tmp_path: Path) -> None:
    short = evolution(experiment(tmp_path))
    assert short_splits(short.table["iterations"]) == [] and "could not be read" not in page[0].read_text()
    for row in short.table["iterations"]:
        row["splits"]["test_seed"]["lost"] = "2 steps could not be read (2 bad_image)"
    write_report(short, tmp_path / "evolution.html")
    assert (tmp_path / "evolution.html").read_text().count("test_seed: 2 steps could not be read (2 bad_image)") == 1


def test_results_carry_the_note_of_a_short_denominator(tmp_path: Path) -> None:
    score = score_of(1.0, None, {"lost": "2 steps"})
    figures = {"validation": score, "test_seed": score}
    result = results(experiment(tmp_path), 1, {Ref("evaluation", 0): record("evaluation", 0, figures)}, {})
    assert short_splits(result["iterations"]) == ["test_seed: 2 steps"]


def test_the_web_ui_gets_two_figures(page: tuple[Path, str]) -> None:
    assert page[1].count("](data:image/png;base64,") == 2 and "Figure 6" in page[1]


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_the_report_opens_and_foreign_text_is_text(page: tuple[Path, str], tab: Any) -> None:
    tab.goto(f"file://{page[0]}")
    for number in (2, 4, 5, 6, 7):
        figure = tab.locator(f"img[alt^='Figure {number}']")
        assert figure.evaluate("image => image.naturalWidth") > 300
    case = tab.locator(".attempts")
    assert case.count() == 1 and case.locator(".attempt").count() == 2 and case.locator("svg rect.box").count() == 2
    assert tab.locator("h3", has_text=BAD).count() == 1 and tab.locator("script").count() == 0
