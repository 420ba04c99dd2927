"""Purity, diversity and coverage on an example counted by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.experiment.schema import Quality, Regeneration
from coepg_dagster.pools.quality import Regenerated, by_episode, data_quality, jensen_shannon, unreadable_by_verifier
from coepg_dagster.pools.selection import select
from tests.conftest import step, step_table
from tests.pools.tables import candidate, candidates, row, rows, verdict, verdicts

STEPS = step_table(
    step("s", episode_id="task"),
    step("t", episode_id="task", action_type="TYPE", value="red"),
    step("u"),
    step("back", boxes=[]),
)
CANDIDATES = candidates(
    candidate("s", "p", 0, "one"),  # both hit
    candidate("s", "p", 1, "one.", duplicate_of="s#p#0"),
    candidate("s", "q", 0, "two"),  # only the trained verifier hits
    candidate("s", "q", 1, None),
    candidate("t", "p", 0, "three"),  # open verifier failed, the trained one hits
    candidate("t", "p", 1, "four"),  # no verifier hits
    candidate("t", "q", 0, "five", gate="wrong_value"),
    candidate("t", "q", 1, "six", gate="wrong_type"),
    candidate("back", "p", 0, "go back"),  # no target: outside purity
)
VERDICTS = verdicts(
    verdict("s#p#0", "open", True),
    verdict("s#p#0", "grounder_1", True),
    verdict("s#q#0", "open", False),
    verdict("s#q#0", "grounder_1", True),
    verdict("t#p#0", "open", None),
    verdict("t#p#0", "grounder_1", True),
    verdict("t#p#1", "open", False),
    verdict("t#p#1", "grounder_1", False),
)
PREVIOUS = rows(row("s", "one"), row("u", "kept from before", candidate_id="u#p#0", planner="p"), row("t", "gone"))


MOVED = verdicts(
    verdict("s#p#0", "open", True, step_id="t"),
    verdict("t#p#1", "open", False, step_id="s"),
    verdict("s#q#0", "open", None, step_id="t"),  # it failed on the other screen
    verdict("t#p#0", "open", True, step_id="s"),  # it had failed on its own screen
)
RESIZES = [(28, 3136, 50176), (28, 3136, 12544)]
"""The first leaves screens as they are; the second shows 84 x 112 px as they are, too."""


def measure(
    steps: pa.Table,
    plans: pa.Table,
    votes: pa.Table,
    previous: pa.Table | None,
    config: Regeneration,
    frozen: frozenset[str],
    moved: pa.Table | None = None,
    iteration: int = 1,
) -> dict[str, Any]:
    """Selection, then its quality."""
    dataset, decisions = select(steps, plans, votes, config, iteration, previous)
    moved = verdicts() if moved is None else moved
    quality = Quality(legible_px=10.5)
    made = Regenerated(steps, plans, votes, dataset, config, frozen)
    return data_quality(made, moved, decisions, previous, quality, RESIZES)


def test_by_hand() -> None:
    config = Regeneration()
    measured = measure(STEPS, CANDIDATES, VERDICTS, PREVIOUS, config, frozenset({"open"}), MOVED)
    assert measured == {
        "rows": 5,  # one, two, three, go back, and u's from before
        "generated": 9,
        "purity": 50.0,  # 4 of 8: one, its duplicate, two, three
        "purity_open": 25.0,  # one and its duplicate
        "purity_by_planner": {"p": 75.0, "q": 25.0},
        "type_accuracy": 87.5,  # 7 of 8 that could be read
        "value_accuracy": pytest.approx(200 / 3),  # three and four, not five
        "hit_rate_by_verifier": {"grounder_1": 75.0, "open": pytest.approx(100 / 3)},
        "unreadable_by_verifier": {"grounder_1": 0.0, "open": 0.0},
        "failed_by_verifier": {"open": 1},
        "diversity": 1.5,  # one, two for s; three for t
        "diversity_kept": 1.25,  # 5 rows over 4 steps
        "plans": {
            "per_step": {"raw": 2.25, "distinct": 2.0, "verified": 0.75},  # "one" and "one." differ by a token
            "per_task": {"raw": 3.0, "distinct": pytest.approx(8 / 3), "verified": 1.0},  # three tasks
        },
        "coverage": 100.0,
        "verifier_agreement": pytest.approx(200 / 3),  # one, four; not two
        "verifier_kappa": pytest.approx((2 / 3 - 1 / 2) / (1 / 2)),  # 3 hits of 6 answers
        "plan_words": 8 / 5,
        "specificity": 100.0,
        "share_by_planner": {"p": 80.0, "q": 20.0},
        "decisions": {
            "duplicate": 1,
            "kept": 4,
            "not_verified": 1,
            "unparsed": 1,
            "wrong_type": 1,
            "wrong_value": 1,
        },
        "carried_over": 1,
        "repeated": 25.0,  # one, of one, two, three, go back
        "duplicates": 0,
        "drift": 60.0,  # two, three, go back are new; one and u's are not
        "drift_words": pytest.approx(
            jensen_shannon(
                Counter(["one", "two", "three", "go", "back", "kept", "from", "before"]),
                Counter(["one", "gone", "kept", "from", "before"]),
            )
        ),
        "plan_shuffle": {"open": {"pairs": 2, "own": 50.0, "shuffled": 50.0, "chance": 50.0}},
        "illegible": 100.0,  # all have 10 px
        "smallest_target_px": 10.0,
    }


def test_measures_by_episode_are_those_of_the_whole() -> None:
    config = Regeneration()
    dataset, _ = select(STEPS, CANDIDATES, VERDICTS, config, 1, PREVIOUS)
    parts = by_episode(Regenerated(STEPS, CANDIDATES, VERDICTS, dataset, config, frozenset({"open"})))
    assert parts["purity"].episodes == tuple(sorted(set(STEPS["episode_id"].to_pylist())))
    assert [(name, part.above.sum(), part.below.sum()) for name, part in parts.items()] == [
        ("purity", 400, 8),
        ("purity_open", 200, 8),
        ("diversity", 3, 2),
        ("coverage", 400, 4),
    ]
    others = Regenerated(STEPS, CANDIDATES, VERDICTS, dataset, config, frozenset({"open", "silent"}))
    assert set(parts) - set(by_episode(others)) == {"purity_open"}


def test_answers_that_name_no_point_are_counted_for_each_verifier() -> None:
    """A failure is no answer, so it is not unreadable."""
    votes = verdicts(
        verdict("s#p#0", "chatty", False, x=None, y=None, text="I cannot see it"),
        verdict("s#q#0", "chatty", True),
        verdict("t#p#0", "chatty", None),
        verdict("s#p#0", "broken", None),
        verdict("s#p#0", "sound", True),
    )
    assert unreadable_by_verifier(votes) == {"chatty": 50.0, "sound": 0.0}
    assert unreadable_by_verifier(verdicts()) == {}


def test_an_open_planner_has_the_same_candidate_ids_in_every_iteration() -> None:
    """A carried row differs from a new one by the iteration that made it, not by its candidate's id alone."""
    steps = step_table(step("s"))
    plans = candidates(candidate("s", "open", 0, "bad"))
    votes = verdicts(verdict("s#open#0", "v", False))
    old = rows(row("s", "good"))
    measured = measure(steps, plans, votes, old, Regeneration(), frozenset())
    assert (measured["carried_over"], measured["drift"], measured["coverage"]) == (1, 0.0, 100.0)


def test_the_rule_decides_what_is_verified() -> None:
    strict = Regeneration(rule="all")
    measured = measure(STEPS, CANDIDATES, VERDICTS, None, strict, frozenset({"open"}))
    # one and its duplicate; three, whose only answer is a hit
    assert (measured["purity"], measured["drift"]) == (37.5, None)


def test_nothing_generated_has_no_rates() -> None:
    measured = measure(STEPS, candidates(), verdicts(), None, Regeneration(), frozenset(), iteration=0)
    assert (measured["purity"], measured["diversity"], measured["coverage"]) == (None, None, 0.0)
    assert (measured["verifier_agreement"], measured["specificity"], measured["illegible"]) == (None, None, None)


def test_purity_by_a_frozen_pool_needs_all_of_it() -> None:
    """An open verifier that did not vote in one iteration would make its purity another measure."""
    assert (
        measure(STEPS, CANDIDATES, VERDICTS, None, Regeneration(), frozenset({"open", "other"}))["purity_open"] is None
    )


def test_a_plan_that_fits_every_step_says_nothing() -> None:
    steps = step_table(step("s"), step("t"))
    plans = candidates(*(candidate(s, "p", 0, plan) for s, plan in (("s", "click it"), ("t", "Click it"))))
    votes = verdicts(*(verdict(f"{s}#p#0", "v", True) for s in "st"))
    measured = measure(steps, plans, votes, None, Regeneration(), frozenset())
    assert (measured["specificity"], measured["verifier_kappa"], measured["drift_words"]) == (0.0, None, None)


def test_a_cumulative_dataset_says_things_twice() -> None:
    steps = step_table(step("s"))
    plans, votes = candidates(candidate("s", "p", 0, "press OK")), verdicts(verdict("s#p#0", "v", True))
    old = rows(row("s", "Press OK"))
    measured = measure(steps, plans, votes, old, Regeneration(carry_over="cumulative"), frozenset())
    assert (measured["rows"], measured["duplicates"], measured["repeated"]) == (2, 1, 100.0)


COUNTS = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1).map(Counter)


@given(COUNTS, COUNTS)
def test_the_divergence_of_words_is_symmetric_between_0_and_1(a: Counter[str], b: Counter[str]) -> None:
    there, back, same = jensen_shannon(a, b), jensen_shannon(b, a), jensen_shannon(a, a)
    assert there is not None and back is not None and same is not None
    assert there == pytest.approx(back) and -1e-9 <= there <= 1 + 1e-9 and same == pytest.approx(0)
    if not a.keys() & b.keys():
        assert there == pytest.approx(1)
