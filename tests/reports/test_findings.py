"""Findings of a study, on runs whose numbers are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from coepg_dagster.provenance import Asset, Record, Ref
from coepg_dagster.reports.findings import NON_INFERIORITY, findings
from coepg_dagster.reports.results_page import write_page
from coepg_dagster.reports.study import BY_JUDGE, DOMAIN, STEP_SR, MadeFrom, Run, Study, made_from
from coepg_dagster.results import FULL
from tests.reports.runs import SPLITS, by_claim, judge, made_with, measured, measured_row, played, run, study


def test_claims_are_confirmed_where_the_interval_excludes_nothing() -> None:
    grows = [run(FULL, seed, {0: 0.2, 1: 0.5, 2: 0.6, 3: 0.8}) for seed in (1, 2, 3)]
    same = [run("no_grpo", seed, {0: 0.2, 1: 0.5, 2: 0.6, 3: 0.8}) for seed in (1, 2, 3)]
    better = [run("literal", seed, {3: 1.0}) for seed in (1, 2, 3)]
    worse_by_a_bit = [run("no_cdrem", seed, {3: 0.82}) for seed in (1, 2)]
    claims = by_claim(study(*grows, *same, *better, *worse_by_a_bit))
    first = claims["M_3 - M_1"]
    assert first.verdict == "confirmed" and first.value == pytest.approx(30, abs=8) and first.ci95[0] > 0
    assert (claims["full - no GRPO"].verdict, claims["full - no GRPO"].value) == ("not confirmed", 0)
    assert (
        claims["probability - literal"].verdict == "not confirmed"
        and "the opposite" in claims["probability - literal"].text
    )
    assert "2 seeds" in claims["full - single grounder"].text
    assert claims["full - uniform"].verdict == "not testable" and claims["full - uniform"].value is None
    assert "`coepg evolve box_uniform --through 3`" in claims["full - uniform"].text
    assert claims["steadier over seeds"].verdict == "not testable"


def test_not_worse_has_a_margin_of_two_points() -> None:
    near = [run(FULL, seed, {3: 0.5}) for seed in (1, 2)] + [run("no_cdrem", seed, {3: 0.5}) for seed in (1, 2)]
    assert by_claim(study(*near))["full - single grounder"].verdict == "confirmed"
    far = [run(FULL, seed, {3: 0.5}) for seed in (1, 2)] + [run("no_cdrem", seed, {3: 0.7}) for seed in (1, 2)]
    assert by_claim(study(*far))["full - single grounder"].verdict == "not confirmed"


def test_live_play_is_compared_over_the_families_that_both_iterations_played() -> None:
    one = run(FULL, 1, {0: 0.2, 1: 0.4, 3: 0.6})
    one.live = {
        (0, "test_a"): played({"menus": 0.0, "tabs": 50.0, "trees": 0.0, "lists": 0.0, "links": 20.0}),
        (1, "test_a"): played({"menus": 100.0, "tabs": 75.0, "lists": 50.0, "links": 90.0}),
    }
    claims = by_claim(study(one, run(FULL, 2, {0: 0.2, 1: 0.4, 3: 0.6})))
    gain = claims["live play M_1 - M_0"]
    assert gain.value == pytest.approx((100 + 25 + 50 + 70) / 4) and gain.verdict == "holds for one seed"
    assert gain.ci95 is not None and 0 < gain.ci95[0] < gain.ci95[1] and "1 seed: over families only" in gain.text
    assert claims["live play M_3 - M_1"].verdict == "not testable"
    assert "`coepg play box@3`" in claims["live play M_3 - M_1"].text
    one.live[1, "test_a"]["made_from"]["episodes"] = "from seed 7"  # other episodes are another measure
    assert by_claim(study(one))["live play M_1 - M_0"].verdict == "not testable"


def test_what_was_not_reached_is_compared_at_the_last_common_iteration_and_says_so(tmp_path: Path) -> None:
    early = [run(FULL, seed, {0: 0.2, 1: 0.6}) for seed in (1, 2, 3)]
    no_grpo = [run("no_grpo", seed, {0: 0.2, 1: 0.3, 2: 0.4}) for seed in (1, 2, 3)]
    one = study(*early, *no_grpo)
    assert (one.reached(("box", FULL)), one.reached(("box", "no_grpo")), one.reached(("box", "uniform"))) == (
        1,
        2,
        None,
    )
    claims = by_claim(one)
    assert (
        "at k = 1, planned at k = 3" in claims["full - no GRPO"].text
        and claims["full - no GRPO"].verdict == "confirmed"
    )
    assert claims["M_3 - M_1"].verdict == "not testable"
    assert "Departure from the plan" in write_page(one, findings(one), [], {}, tmp_path).read_text()


def seeds(variant: str, rates: dict[int, float]) -> list[Run]:
    return [run(variant, seed, rates) for seed in (1, 2, 3)]


def test_the_judge_decides_where_all_have_one_and_phi_stands_beside() -> None:
    """A planner that ϕ_k rewarded wins by ϕ_k, and not by a judge that took no part."""
    full = [judge(one, {1: 0.4, 3: 0.4}) for one in seeds(FULL, {1: 0.3, 3: 0.8})]
    by_judge = by_claim(study(*full))["M_3 - M_1"]
    assert by_judge.measure == "step_sr_judge" and by_judge.verdict == "not confirmed" and by_judge.value == 0
    assert by_judge.beside is not None and by_judge.beside["step_sr"].value > 30
    assert "Step SR by the judge" in by_judge.text and "Step SR by ϕ_k: +" in by_judge.text
    written = by_judge.to_json()
    assert written["beside"]["step_sr"]["ci95"][0] > 0 and written["over"] == "seeds and episodes"
    del full[0].success[1, "test_b", BY_JUDGE]
    by_phi = by_claim(study(*full))["M_3 - M_1"]
    assert by_phi.measure == "step_sr" and by_phi.verdict == "confirmed" and "by ϕ_k, 3 seeds" in by_phi.text


def test_a_test_of_non_inferiority_is_called_so() -> None:
    both = study(*seeds(FULL, {3: 0.5}), *seeds("no_cdrem", {3: 0.5}))
    finding = by_claim(both)["full - single grounder"]
    assert finding.verdict == "confirmed" and finding.to_json()["test"] == NON_INFERIORITY
    assert "non-inferiority: not worse by 2 points" in finding.text
    assert by_claim(both)["full - uniform"].to_json()["test"] == "superiority: above 0"
    assert (
        by_claim(study(run(FULL, 1, {3: 0.5})))["full - single grounder"].test == NON_INFERIORITY
    )  # nothing to compare


def test_one_seed_is_over_episodes_only() -> None:
    finding = by_claim(study(run(FULL, 1, {1: 0.2, 3: 0.8})))["M_3 - M_1"]
    assert "1 seed: over episodes only" in finding.text and finding.over == "episodes"
    assert finding.ci95 is not None and finding.ci95[0] > 0 and finding.verdict == "holds for one seed"


def test_a_finding_names_its_stale_inputs_and_no_others() -> None:
    full = seeds(FULL, {0: 0.1, 1: 0.3, 3: 0.8})
    full[1].stale = {Ref("evaluation", 3): "planner[3]: code or configuration changed (1 → 2)"}
    both = study(*full)
    claims = by_claim(both)
    assert claims["M_3 - M_1"].stale == ("box/s2 evaluation[3]: planner[3]: code or configuration changed (1 → 2)",)
    assert "Stale: box/s2 evaluation[3]" in claims["M_3 - M_1"].text
    assert claims["M_1 - M_0"].stale == () and "tale" not in claims["M_1 - M_0"].text


def test_runs_of_other_settings_are_not_compared() -> None:
    full = [made_with(one, 3, grpo_own_prior=1.0, grpo_learning_rate=1e-3) for one in seeds(FULL, {3: 0.5})]
    uniform = [made_with(one, 3, grpo_own_prior=0, grpo_learning_rate=1e-3) for one in seeds("uniform", {3: 0.5})]
    assert by_claim(study(*full, *uniform))["full - uniform"].verdict == "not confirmed"
    other = [made_with(one, 3, grpo_own_prior=0, grpo_learning_rate=1e-5) for one in seeds("uniform", {3: 0.5})]
    refused = by_claim(study(*full, *other))["full - uniform"]
    assert refused.verdict == "not testable" and refused.value is None
    assert "grpo.learning_rate is 0.001 in box at k = 3, but 1e-05 in box uniform at k = 3" in refused.text
    assert "own_prior" not in refused.text
    uniform[2] = made_with(run("uniform", 3, {3: 0.5}), 3, grpo_own_prior=0.5, grpo_learning_rate=1e-3)
    refused = by_claim(study(*full, *uniform))["full - uniform"]  # the seeds of one side
    assert refused.verdict == "not testable" and "grpo.own_prior" in refused.text


@pytest.mark.parametrize("claim", ["M_3 - M_1", "full - no GRPO", "all labels - half", "larger - smaller"])
def test_a_setting_that_changed_between_iterations_or_experiments_is_named(claim: str) -> None:
    rates = {1: 0.3, 3: 0.5}
    made = [*seeds(FULL, rates), *seeds("no_grpo", rates)]
    made += [run(FULL, seed, rates, f"box_{name}") for seed in (1, 2, 3) for name in ("labels_50", "large")]
    for one in made:
        for k in rates:
            same = k == 3 and (one.experiment, one.variant) == ("box", FULL)
            made_with(one, k, sft_epochs=1 if same else 2)
    finding = by_claim(study(*made))[claim]
    assert finding.verdict == "not testable" and "sft.epochs is " in finding.text
    assert "1 in box at k = 3" in finding.text and "2 in box" in finding.text


def test_what_the_sides_should_have_in_common_is_compared_by_version() -> None:
    both = [*seeds(FULL, {3: 0.5}), *seeds("uniform", {3: 0.5})]
    for one in both:
        version = "new" if one.variant == FULL and one.seed == 2 else "old"
        one.made_from[Ref("evaluation", 3)] = MadeFrom(
            {}, {Ref("grounder", 3): version, Ref("grounder", 2): one.variant}
        )
    refused = by_claim(study(*both))["full - uniform"]
    assert refused.verdict == "not testable" and "grounder of seed 2 is not the same in box at k = 3" in refused.text
    del both[0].made_from[Ref("evaluation", 3)]
    assert "box/s1 evaluation[3] are not known" in by_claim(study(*both))["full - uniform"].text


def test_data_of_other_rules_are_not_compared_and_frozen_purity_comes_first() -> None:
    one = run(FULL, 1, {0: 0.2, 3: 0.5})
    for k in (0, 3):
        one.data[k] = {"purity": measured(0.5 + k / 9), "purity_open": measured(0.5 + k / 9)}
        one.rows += [measured_row(one, k, "train", name, 50) for name in ("purity", "purity_frozen")]
    names = [finding.claim for finding in findings(study(one))]
    assert names.index("frozen purity D_3 - D_0") < names.index("purity D_3 - D_0")
    assert by_claim(study(one))["frozen purity D_3 - D_0"].measure == "purity_frozen"
    for k, rule in ((0, '"any"'), (3, '"all"')):
        one.made_from[Ref("dataset", k)] = MadeFrom({"regeneration.rule": frozenset({rule})}, {})
    finding = by_claim(study(one))["frozen purity D_3 - D_0"]
    assert finding.verdict == "not testable" and 'regeneration.rule is "all" in box at k = 3, but "any"' in finding.text


def test_live_play_is_combined_over_seeds_and_names_other_models() -> None:
    runs = seeds(FULL, {0: 0.2, 1: 0.4})
    for one, more in zip(runs, (30.0, 32.0, 34.0), strict=True):
        one.live[0, "test_a"] = played({"menus": 10.0, "tabs": 20.0, "trees": 30.0})
        one.live[1, "test_a"] = played({"menus": 10 + more, "tabs": 21 + more, "trees": 31 + more})
    gain = by_claim(study(*runs))["live play M_1 - M_0"]
    assert gain.verdict == "confirmed" and gain.over == "seeds and families" and "3 seeds" in gain.text
    runs[0].live_stale[1, "test_a"] = "planner[1] is now b, a played"
    assert by_claim(study(*runs))["live play M_1 - M_0"].stale == ("box/s1 M_1: planner[1] is now b, a played",)


def record(asset: Asset, k: int | None, version: str, config: dict[str, object]) -> Record:
    facts = {"run_id": "r", "folder": f"{asset}/{k}", "inputs": [], "code_version": "1", "seed": 1, "seconds": 1.0}
    facts |= {"device": "cpu", "figures": {}}
    return Record(asset=asset, iteration=k, data_version=version, config=config, **facts)


def test_the_settings_are_those_that_were_used_and_defaults_where_a_record_has_none() -> None:
    made = made_from(
        [
            record("evaluation", 1, "e", {"protocol": "miniwob/point", "max_train_steps": 300}),
            record("planner", 1, "p", {"learning_rate": 0.5, "probe_steps": 8}),
            record("planner", 0, "base", {"checkpoint": "models/x"}),
            record("open_models", None, "m", {"base_planner": "models/x"}),
            record("benchmark_steps", None, "s", {"max_train_steps": 1200}),
        ]
    )
    assert made.settings["grpo.learning_rate"] == {"0.5"} and made.settings["grpo.ensemble"] == {"true"}
    assert made.settings["benchmark.max_train_steps"] == {"300"} and "grpo.probe_steps" not in made.settings
    assert made.settings["models"] == {"m"} and made.settings["benchmark_steps"] == {"s"}
    assert "grpo.checkpoint" not in made.settings and made.versions[Ref("planner", 1)] == "p"


def test_a_study_of_one_iteration_does_not_compare_it_with_itself(tmp_path: Path) -> None:
    runs = [run(FULL, seed, {0: 0.2, 1: 0.6}) for seed in (1, 2)]
    for one in runs:
        one.success |= {(k, "test_a" + DOMAIN, STEP_SR): measured(rate, one.seed) for k, rate in ((0, 0.1), (1, 0.7))}
    short = Study(runs, "box", SPLITS, 1)
    claims = [one.claim for one in findings(short)]
    assert claims[0] == "M_1 - M_0" and claims[-1] == "live play M_1 - M_0" and len(claims) == len(set(claims))
    page = write_page(short, findings(short), [], {}, tmp_path).read_text()
    assert "M_1 - M_0" in page and "M_1 - M_1" not in page
