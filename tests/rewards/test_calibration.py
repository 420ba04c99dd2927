"""Reliability, ECE, Brier and AUROC: by hand, by other definitions, and from the loop's own tables."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.reports.calibration import reliability_figure
from coepg_dagster.rewards.calibration import auroc, calibration, of_rollouts, of_verdicts, wilson
from coepg_dagster.steps import VERDICT_SCHEMA
from tests.rewards.test_variants import grader, logged, rollout

ANSWERS = st.lists(st.tuples(st.floats(0, 1) | st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.booleans()), min_size=1)


def test_by_hand() -> None:
    measured = calibration([0.95, 0.95, 0.95, 0.95, 0.05, 1.0], [1, 1, 1, 0, 1, 1])
    assert (measured.n, measured.hit_rate) == (6, pytest.approx(5 / 6))
    assert [(b.low, b.n) for b in measured.bins if b.n] == [(0.0, 1), (0.9, 5)]
    top = measured.bins[-1]
    assert (top.confidence, top.hit_rate) == (pytest.approx(0.96), pytest.approx(0.8))
    assert measured.ece == pytest.approx(5 / 6 * 0.16 + 1 / 6 * 0.95)
    assert measured.brier == pytest.approx((3 * 0.05**2 + 0.95**2 + 0.95**2) / 6)
    # the miss at 0.95 against the five hits: three ties, one below, one above
    assert measured.auroc == pytest.approx((3 * 0.5 + 0 + 1) / 5)


@given(ANSWERS)
def test_bins_hold_every_answer_once(answers: list[tuple[float, bool]]) -> None:
    c, h = (np.array(column, dtype=float) for column in zip(*answers, strict=True))
    measured = calibration(c, h)
    assert sum(b.n for b in measured.bins) == len(answers)
    assert 0 <= measured.ece <= 1
    for b in measured.bins:
        if b.n:
            assert b.low <= b.confidence + 1e-12 and b.confidence <= b.high + 1e-12
            assert b.ci95[0] <= b.hit_rate <= b.ci95[1]
    assert sum(b.n * b.hit_rate for b in measured.bins if b.n) == pytest.approx(h.sum())


@given(ANSWERS)
def test_auroc_counts_pairs(answers: list[tuple[float, bool]]) -> None:
    c, h = (np.array(column, dtype=float) for column in zip(*answers, strict=True))
    hits, misses = c[h == 1], c[h == 0]
    if not (len(hits) and len(misses)):
        assert auroc(c, h) is None
        return
    pairs = [(a > b) + 0.5 * (a == b) for a in hits for b in misses]
    assert auroc(c, h) == pytest.approx(np.mean(pairs))


def test_a_calibrated_grounder_has_no_ece_and_one_that_knows_separates() -> None:
    rng = np.random.default_rng(3)
    c = rng.uniform(0, 1, 20_000)
    honest = calibration(c, rng.uniform(0, 1, c.size) < c)
    boastful = calibration(np.full(c.size, 0.95), rng.uniform(0, 1, c.size) < 0.5)
    assert honest.ece < 0.02
    assert honest.auroc == pytest.approx(5 / 6, abs=0.01)
    assert (boastful.ece, boastful.auroc) == (pytest.approx(0.45, abs=0.02), pytest.approx(0.5))


def test_wilson_of_a_share() -> None:
    assert wilson(8, 10) == pytest.approx((0.490, 0.943), abs=1e-3)
    assert wilson(0, 3)[0] == 0 and wilson(3, 3)[1] == 1
    for n in range(1, 60):
        for hits in range(n + 1):
            low, high = wilson(hits, n)
            assert 0 <= low <= hits / n <= high <= 1  # to the last bit: a figure's bars must not be negative


@pytest.mark.parametrize(
    ("confidence", "hits", "message"),
    [([], [], "needs a confidence"), ([0.5], [1, 0], "needs"), ([1.1], [1], "within 0..1"), ([0.5], [2], "neither")],
)
def test_what_is_no_answer_is_refused(confidence: list[float], hits: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibration(confidence, hits)


def verdict(verifier: str, logprob: float, hit: bool, failure: str | None = None) -> dict[str, Any]:
    return {
        "candidate_id": "c",
        "step_id": "s",
        "verifier": verifier,
        "hit": hit,
        "mean_logprob": None if failure else logprob,
        "tokens": 4,
        "text": "",
        "failure": failure,
    }


def test_verdicts_by_verifier_without_failures() -> None:
    rows = [verdict("a", 1e-7, True), verdict("b", -1.0, False), verdict("a", -2.0, False), verdict("a", 0, False, "x")]
    by_name = of_verdicts(pa.Table.from_pylist(rows, VERDICT_SCHEMA))
    assert list(by_name) == ["a", "b"]
    assert (by_name["a"].n, by_name["a"].auroc, by_name["b"].auroc) == (2, 1.0, None)
    assert by_name["a"].confidence == pytest.approx((1 + math.exp(-2)) / 2)
    assert of_verdicts(VERDICT_SCHEMA.empty_table()) == {}


def test_rollouts_count_a_plan_once() -> None:
    twice = [grader(0, True, -0.1), grader(1, False, -0.2)]
    rows = [rollout(twice), rollout(twice), rollout([], "wrong_type"), rollout([])]
    rows[1]["step_id"] = "another"
    by_name = of_rollouts(logged(rows))
    assert {name: one.n for name, one in by_name.items()} == {"grounder_1": 2, "a": 2}
    rows[1]["step_id"] = "s"
    assert of_rollouts(logged(rows))["a"].n == 1


def test_the_figure_has_a_curve_for_each_grounder() -> None:
    by_name = {"a": calibration([0.2, 0.8, 0.9], [0, 1, 1]), "b": calibration([1.0], [1])}
    axes = reliability_figure(by_name).axes[0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [label.split(":")[0] for label in labels] == ["a", "b"]
    assert "AUROC 1.00" in labels[0] and "AUROC –" in labels[1]
    assert reliability_figure({}).axes
