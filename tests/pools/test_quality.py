"""Purity, diversity and coverage on an example counted by hand."""

from __future__ import annotations

import pytest

from coepg_dagster.experiment import Regeneration
from coepg_dagster.pools.quality import data_quality
from coepg_dagster.pools.selection import select
from tests.conftest import step, step_table
from tests.pools.tables import candidate, candidates, row, rows, verdict, verdicts

STEPS = step_table(step("s"), step("t"), step("u"), step("back", boxes=[]))
CANDIDATES = candidates(
    candidate("s", "p", 0, "one"),  # both hit
    candidate("s", "p", 1, "one.", duplicate_of="s#p#0"),
    candidate("s", "q", 0, "two"),  # only the trained verifier hits
    candidate("s", "q", 1, None),
    candidate("t", "p", 0, "three"),  # open verifier failed, the trained one hits
    candidate("t", "p", 1, "four"),  # nobody hits
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


def test_by_hand() -> None:
    config = Regeneration()
    dataset, decisions = select(STEPS, CANDIDATES, VERDICTS, config, 1, PREVIOUS)
    measured = data_quality(STEPS, CANDIDATES, VERDICTS, decisions, dataset, PREVIOUS, config, frozenset({"open"}))
    assert measured == {
        "rows": 5,  # one, two, three, go back, and u's from before
        "generated": 9,
        "purity": 50.0,  # 4 of 8: one, its duplicate, two, three
        "purity_open": 25.0,  # one and its duplicate
        "purity_by_planner": {"p": 75.0, "q": 25.0},
        "hit_rate_by_verifier": {"grounder_1": 75.0, "open": pytest.approx(100 / 3)},
        "failed_by_verifier": {"open": 1},
        "diversity": 1.5,  # one, two for s; three for t
        "diversity_kept": 1.25,  # 5 rows over 4 steps
        "coverage": 100.0,
        "decisions": {
            "duplicate": 1,
            "kept": 4,
            "not_verified": 1,
            "unparsed": 1,
            "wrong_type": 1,
            "wrong_value": 1,
        },
        "carried_over": 1,
        "drift": 60.0,  # two, three, go back are new; one and u's are not
    }


def test_an_open_planner_has_the_same_candidate_ids_in_every_iteration() -> None:
    """A carried row is told from a new one by the iteration that made it, not by its candidate's id alone."""
    steps = step_table(step("s"))
    plans = candidates(candidate("s", "open", 0, "bad"))
    votes = verdicts(verdict("s#open#0", "v", False))
    old = rows(row("s", "good"))
    dataset, decisions = select(steps, plans, votes, Regeneration(), 1, old)
    measured = data_quality(steps, plans, votes, decisions, dataset, old, Regeneration(), frozenset())
    assert (measured["carried_over"], measured["drift"], measured["coverage"]) == (1, 0.0, 100.0)


def test_the_rule_decides_what_is_verified() -> None:
    strict = Regeneration(rule="all")
    dataset, decisions = select(STEPS, CANDIDATES, VERDICTS, strict, 1, None)
    measured = data_quality(STEPS, CANDIDATES, VERDICTS, decisions, dataset, None, strict, frozenset({"open"}))
    # one and its duplicate; three, whose only answer is a hit
    assert (measured["purity"], measured["drift"]) == (37.5, None)


def test_nothing_generated_has_no_rates() -> None:
    nothing, config = candidates(), Regeneration()
    dataset, decisions = select(STEPS, nothing, verdicts(), config, 0, None)
    measured = data_quality(STEPS, nothing, verdicts(), decisions, dataset, None, config, frozenset())
    assert (measured["purity"], measured["diversity"], measured["coverage"]) == (None, None, 0.0)
