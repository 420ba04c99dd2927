"""Rows, intervals and findings of a study, on runs whose numbers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.evaluation.statistics import ByEpisode
from coepg_dagster.reports.results_page import write_page
from coepg_dagster.reports.study import (
    Draws,
    Run,
    Study,
    estimate,
    findings,
    missing_runs,
    success_by_episode,
)
from coepg_dagster.results import FULL, Row

SPLITS = ("test_a", "test_b")
EPISODES = tuple(f"e{i}" for i in range(40))


def measured(rate: float, seed: int = 0) -> ByEpisode:
    """Forty episodes that succeed at about this rate; the same seed and a higher rate: the same successes and more."""
    luck = np.random.default_rng(seed).random(len(EPISODES))
    return ByEpisode(EPISODES, (luck < rate).astype(float), np.ones(len(EPISODES)))


def measured_row(of: Run, k: int, split: str, metric: str, value: float, **more: Any) -> Row:
    place = {"experiment": of.experiment, "variant": of.variant, "seed": of.seed, "k": k, "split": split}
    return Row(**place, metric=metric, value=value, **{"protocol": "miniwob/point, macro"} | more)


def run(variant: str, seed: int, rates: dict[int, float], experiment: str = "box") -> Run:
    """A run with these success rates by iteration, on both splits."""
    name = experiment if variant == FULL else f"{experiment}_{variant}"
    made = Run(experiment, variant, seed, f"{name}/s{seed}")
    for k, rate in rates.items():
        for split in SPLITS:
            made.success[k, split] = measured(rate, seed)
            value = 100 * float(made.success[k, split].above.mean())
            made.rows.append(measured_row(made, k, split, "step_sr", value, low=0.0, high=100.0))
    return made


def study(*runs: Run) -> Study:
    return Study(runs, "box", SPLITS, 3)


def by_claim(of: Study) -> dict[str, Any]:
    return {one.claim: one for one in findings(of)}


def test_success_by_episode_is_the_mean_of_its_steps() -> None:
    judged = pa.table({"episode_id": ["a", "a", "b", "b"], "step_sr": [1.0, 0.0, 1.0, None]})
    one = success_by_episode(judged, "step_sr")
    assert one.episodes == ("a", "b") and one.above.tolist() == [0.5, 1.0]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=5))
def test_a_difference_to_itself_is_exactly_nothing(rates: list[float]) -> None:
    draws = Draws(50)
    values = draws.means([measured(rate, i) for i, rate in enumerate(rates)])
    assert estimate(draws.over_seeds(values - values)) == (0.0, (0.0, 0.0))


def test_the_interval_is_that_of_episodes_and_seeds() -> None:
    draws = Draws()
    value, (low, high) = estimate(draws.over_seeds(draws.means([measured(0.5, seed) for seed in range(3)])))
    plain = np.mean([measured(0.5, seed).above.mean() for seed in range(3)])
    assert value == pytest.approx(plain)
    within = 1.96 * np.sqrt(0.25 / 40 / 3)  # were episodes drawn anew for each seed, and the seeds fixed
    assert value - low > within and high - value > within
    assert estimate(draws.over_seeds(draws.means([measured(1.0)] * 2))) == (1.0, (1.0, 1.0))


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
    def played(rates: dict[str, float]) -> dict[str, Any]:
        families = {name: {"success": rate} for name, rate in rates.items()}
        return {"families": families, "made_from": {"episodes": "of benchmark_steps x", "step limit": 16}}

    one = run(FULL, 1, {0: 0.2, 1: 0.4, 3: 0.6})
    one.live = {
        (0, "test_a"): played({"menus": 0.0, "tabs": 50.0, "trees": 0.0}),
        (1, "test_a"): played({"menus": 100.0, "tabs": 75.0}),
    }
    claims = by_claim(study(one, run(FULL, 2, {0: 0.2, 1: 0.4, 3: 0.6})))
    gain = claims["live play M_1 - M_0"]
    assert gain.value == pytest.approx((100 + 25) / 2) and gain.verdict == "confirmed"
    assert 25 <= gain.ci95[0] < gain.ci95[1] <= 100 and "1 seed;" in gain.text
    assert claims["live play M_3 - M_1"].verdict == "not testable"
    assert "`coepg play box@3`" in claims["live play M_3 - M_1"].text
    one.live[1, "test_a"]["made_from"]["episodes"] = "from seed 7"  # other episodes are another measure
    assert by_claim(study(one))["live play M_1 - M_0"].verdict == "not testable"


def test_rows_are_one_for_each_run_split_and_metric_and_no_average() -> None:
    both = study(run(FULL, 1, {0: 0.2, 1: 0.5}), run("uniform", 1, {1: 0.5}))
    rows = both.rows()
    assert len(rows) == 6 and {row.split for row in rows} == set(SPLITS)
    assert {(row.experiment, row.variant) for row in rows} == {("box", "full"), ("box", "uniform")}
    joint = both.joint_rows()
    assert {row.seed for row in joint} == {None} and "average" in {row.split for row in joint}
    written = rows[0].to_json()
    assert (written["iteration"], written["ci95"], written["protocol"]) == (0, [0.0, 100.0], "miniwob/point, macro")


def test_measures_of_the_data_have_intervals_over_episodes() -> None:
    one = run(FULL, 1, {0: 0.2, 1: 0.5})
    for k in (0, 1):
        one.data[k] = {"purity": measured(0.5 + k / 4)}
        one.rows.append(measured_row(one, k, "train", "purity", one.data[k]["purity"].value or 0, protocol="rule any"))
    purity = [row for row in study(one).rows() if row.metric == "purity"]
    assert [row.value for row in purity] == [one.data[k]["purity"].value for k in (0, 1)]
    assert all(row.low is not None and row.high is not None and row.low < (row.value or 0) < row.high for row in purity)
    joint = [row for row in study(one).joint_rows() if row.metric == "purity"]
    assert [row.protocol for row in joint] == ["rule any"] * 2


def test_a_study_of_two_protocols_is_refused() -> None:
    other = run("uniform", 1, {1: 0.5})
    other.rows = [row.model_copy(update={"protocol": "mind2web/seeact, macro"}) for row in other.rows]
    with pytest.raises(ScoringError, match=r"box_uniform/s1 by mind2web/seeact, macro, box/s1 by miniwob/point, macro"):
        study(run(FULL, 1, {0: 0.2, 1: 0.5}), other)


def test_the_page_names_what_is_missing_and_the_command_of_every_row(tmp_path: Path) -> None:
    one = study(run(FULL, 1, {0: 0.2, 1: 0.5}))
    one.runs[0].stale = ["code or configuration changed (1 → 2)"]
    wanted = {"box/s1": ("box", FULL, 1, 0), "box_uniform/s1": ("box", "uniform", 1, 3)}
    missing = missing_runs(one, wanted, 3)
    assert missing == ["coepg evolve box/s1 --through 3", "coepg evolve box_uniform/s1 --from 3 --through 3"]
    assert missing_runs(one, {"box/s1": ("box", FULL, 1, 1)}, 1) == []
    page = write_page(one, findings(one), missing, {"box_large": "models/large is not there"}, tmp_path)
    text = page.read_text()
    for line in (
        "- `coepg evolve box/sSEED --through 3`, SEED being 1",
        "- `coepg evolve box_uniform/sSEED --from 3 --through 3`, SEED being 1",
        "box_large: models/large is not there",
        "made on purpose",
        "`coepg evolve box/sSEED --through K`",
    ):
        assert line in text
    assert "1 of 1 loops" in text and "- code or configuration changed (1 → 2)" in text
    assert (tmp_path / "images" / "results" / "figure-7.png").stat().st_size > 1000


def test_the_page_says_where_grpo_was_hardly_trained(tmp_path: Path) -> None:
    small, large = run(FULL, 1, {0: 0.2, 1: 0.5}), run(FULL, 2, {0: 0.2, 1: 0.5})

    def page_text(rollouts: int) -> str:
        for one, seen in ((small, rollouts), (large, 20_000)):
            one.rows = [row for row in one.rows if row.split != "train"]
            values = {"rollouts": seen, "grpo_before": 50.0, "grpo_after": 56.0}
            one.rows += [measured_row(one, 1, "train", name, value) for name, value in values.items()]
        both = study(small, large)
        return write_page(both, findings(both), [], {}, tmp_path).read_text()

    few = page_text(1024)
    assert "**GRPO was hardly trained.** 1 of 2 runs saw fewer than 10,000 rollouts (the smallest 1,024)" in few
    assert "| 50.0 | 56.0 |" in few and "before GRPO" in few
    assert "hardly trained" not in page_text(10_000)


def test_the_page_has_rows_of_both_sizes_and_a_table_of_live_play_for_each_split(tmp_path: Path) -> None:
    one, large = run(FULL, 1, {0: 0.2, 1: 0.5}), run(FULL, 1, {0: 0.3, 1: 0.6}, "box_large")
    solved = {"solved": 1, "episodes": 4, "success": 25.0}
    for k, split in ((0, "test_a"), (1, "test_a"), (1, "test_b")):
        played = {"success": {"rate": 25.0, "ci95": [0.0, 50.0]}, "families": {f"menus_{split}": solved}}
        one.live[k, split] = played | {"made_from": {"episodes": "of benchmark_steps x", "step limit": 16}}
    both = study(one, large)
    text = write_page(both, findings(both), [], {}, tmp_path).read_text()
    assert "| box M_1 |" in text and "| box_large M_1 |" in text and "| box_large M_2 |" not in text
    by_split = text.split("**test_b: success")
    assert "menus_test_a | 1/4 | 1/4 |" in by_split[0] and "menus_test_a" not in by_split[1]
    assert "`coepg play box/s1@1 --split test_b --episodes 4`" in by_split[1]


def test_what_was_not_reached_is_compared_at_the_last_common_iteration_and_says_so(tmp_path: Path) -> None:
    early = [run(FULL, seed, {0: 0.2, 1: 0.6}) for seed in (1, 2)]
    no_grpo = [run("no_grpo", seed, {0: 0.2, 1: 0.3, 2: 0.4}) for seed in (1, 2)]
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
