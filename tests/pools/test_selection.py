"""From verdicts to D_k: rules, cap, carry-over, and a reason for every candidate."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.pools.selection import is_verified, select
from coepg_dagster.rewards.cdrem import NoVerdict
from coepg_dagster.steps import DATASET_SCHEMA, DECISION_SCHEMA, rows_in_batches
from tests.conftest import step, step_table
from tests.pools.tables import candidate, candidates, row, rows, verdict, verdicts

STEPS = step_table(step("s"), step("t"))


def decisions_of(table: pa.Table) -> dict[str, str]:
    return dict(zip(table["candidate_id"].to_pylist(), table["decision"].to_pylist(), strict=True))


@given(vetoed=st.sets(st.tuples(st.sampled_from("st"), st.sampled_from(["a", "b", "old"]))))
def test_what_is_vetoed_is_neither_kept_nor_carried_over(vetoed: set[tuple[str, str]]) -> None:
    made = candidates(*(candidate(step, "p", i, plan) for step in "st" for i, plan in enumerate("ab")))
    given = verdicts(*(verdict(f"{step}#p#{i}", "v", True) for step in "st" for i in range(2)))
    previous = rows(row("s", "old", made_in=0), row("t", "old", made_in=0))
    config = Regeneration(carry_over="cumulative")
    kept, decided = select(STEPS, made, given, config, 1, previous, lambda step, plan: (step, plan) in vetoed)
    in_data = set(zip(kept["step_id"].to_pylist(), kept["plan"].to_pylist(), strict=True))
    assert in_data == {(step, plan) for step in "st" for plan in ("a", "b", "old")} - vetoed
    assert decisions_of(decided) == {
        f"{step}#p#{i}": "vetoed" if (step, plan) in vetoed else "kept" for step in "st" for i, plan in enumerate("ab")
    }


@pytest.mark.parametrize(
    ("rule", "k", "passing"),
    [
        ("any", None, [(1, 1), (1, 2), (1, 3), (2, 3), (3, 3)]),
        ("majority", None, [(1, 1), (2, 3), (3, 3)]),  # half is not a majority
        ("all", None, [(1, 1), (3, 3)]),
        ("k_of_n", 2, [(2, 3), (3, 3)]),
    ],
)
def test_rules(rule: Any, k: int | None, passing: list[tuple[int, int]]) -> None:
    config = Regeneration(rule=rule, k=k)
    cases = [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3), (3, 3)]
    assert [case for case in cases if is_verified(*case, config)] == passing


def test_each_candidate_gets_its_reason_and_each_verified_plan_its_row() -> None:
    rows, decisions = select(
        STEPS,
        candidates(
            candidate("s", "p", 0, None),
            candidate("s", "p", 1, "wrong", gate="wrong_type"),
            candidate("s", "p", 2, "good"),
            candidate("s", "p", 3, "good!", duplicate_of="s#p#2"),
            candidate("t", "p", 0, "bad"),
        ),
        verdicts(
            verdict("s#p#2", "v", True, mean_logprob=-0.2),
            verdict("s#p#2", "w", False),
            verdict("t#p#0", "v", False),
            verdict("t#p#0", "w", False),
        ),
        Regeneration(),
        3,
        None,
    )
    assert decisions_of(decisions) == {
        "s#p#0": "unparsed",
        "s#p#1": "wrong_type",
        "s#p#2": "kept",
        "s#p#3": "duplicate",
        "t#p#0": "not_verified",
    }
    assert rows.schema.equals(DATASET_SCHEMA)
    assert decisions.schema.equals(DECISION_SCHEMA)
    [only] = rows.to_pylist()
    assert only == row(
        "s", "good", candidate_id="s#p#2", planner="p", made_in=3, answered=2, score=pytest.approx(0.5 + 0.8187 / 1000)
    )


def test_the_row_has_the_labels_action_and_not_the_plans() -> None:
    steps = step_table(step("s", action_type="TYPE", value="Red"))
    rows, _ = select(
        steps,
        candidates(candidate("s", "p", 0, "x", action_type="TYPE", value="red")),
        verdicts(verdict("s#p#0", "v", True)),
        Regeneration(),
        0,
        None,
    )
    assert (rows["action_type"][0].as_py(), rows["value"][0].as_py()) == ("TYPE", "Red")


def test_the_box_is_the_one_that_was_hit() -> None:
    steps = step_table(step("s", boxes=[[50, 50, 60, 60], [10, 10, 20, 20]]))
    rows, _ = select(
        steps, candidates(candidate("s", "p", 0, "x")), verdicts(verdict("s#p#0", "v", True)), Regeneration(), 0, None
    )
    assert rows["box"].to_pylist() == [[10, 10, 20, 20]]


LEFT, RIGHT, AROUND = [10.0, 10.0, 20.0, 20.0], [50.0, 50.0, 60.0, 60.0], [0.0, 0.0, 30.0, 30.0]


def box_of(boxes: list[list[float]], *votes: tuple[float, float]) -> list[float]:
    """The box of the row of a plan: each vote is (where its verifier points, on both axes, and its mean log p)."""
    given_votes = [verdict("s#p#0", f"v{i}", True, x=x, y=x, mean_logprob=p) for i, (x, p) in enumerate(votes)]
    steps, plans = step_table(step("s", boxes=boxes)), candidates(candidate("s", "p", 0, "x"))
    rows, _ = select(steps, plans, verdicts(*given_votes), Regeneration(), 0, None)
    [box] = rows["box"].to_pylist()
    return list(box)


def test_of_several_targets_the_one_that_most_verifiers_hit() -> None:
    assert (
        box_of([LEFT, RIGHT], (15, -0.1), (55, -2.0), (55, -2.0)) == RIGHT
    )  # not the first verifier's, nor the surest
    assert box_of([LEFT, RIGHT], (15, -0.5), (55, -0.1)) == RIGHT  # one each: the surer
    assert box_of([LEFT, RIGHT], (15, -0.1), (55, -0.1)) == LEFT  # equally sure: the first of the label
    assert box_of([LEFT, AROUND], (15, -0.1), (5, -3.0)) == AROUND  # a point may lie in several


@given(
    st.permutations([LEFT, RIGHT, AROUND]),
    st.lists(st.sampled_from([5.0, 15.0, 55.0]), min_size=1, max_size=6).flatmap(
        lambda points: st.tuples(st.just(points), st.permutations(range(len(points))))
    ),
)
def test_the_order_of_the_verifiers_decides_nothing(boxes: list[list[float]], voting: Any) -> None:
    points, order = voting
    votes = [(point, -0.1 - i / 10) for i, point in enumerate(points)]
    box = box_of(boxes, *votes)
    assert box == box_of(boxes, *(votes[i] for i in order))
    count = {tuple(b): sum(b[0] <= x <= b[2] for x in points) for b in boxes}
    assert count[tuple(box)] == max(count.values())


def test_a_failed_verifier_has_no_vote() -> None:
    rows, _ = select(
        STEPS,
        candidates(candidate("s", "p", 0, "x")),
        verdicts(verdict("s#p#0", "v", True), verdict("s#p#0", "w", None)),
        Regeneration(rule="all"),
        0,
        None,
    )
    assert [(r["hits"], r["answered"]) for r in rows.to_pylist()] == [(1, 1)]


def test_an_outage_is_not_a_wrong_plan() -> None:
    plans = candidates(*(candidate("s", "p", i, f"plan {'abc'[i]}") for i in range(3)))
    nobody = [verdict(f"s#p#{i}", name, None) for i in range(3) for name in "vw"]
    with pytest.raises(
        NoVerdict, match=r"s#p#0: no verifier answered \(2 failed\).* 3 of 3 plans.*materialize it again"
    ):
        select(STEPS, plans, verdicts(*nobody), Regeneration(), 0, None)
    with pytest.raises(NoVerdict, match=r"s#p#1: no verifier answered \(0 failed\)"):
        select(STEPS, plans, verdicts(verdict("s#p#0", "v", True)), Regeneration(), 0, None)


@pytest.mark.parametrize("rule", ["any", "majority", "all"])
def test_a_plan_that_the_only_verifier_could_not_answer_stops_no_loop(rule: Any) -> None:
    """Nothing can be done about it: verdicts made again would lack the same answer."""
    plans = candidates(candidate("s", "p", 0, "one"), candidate("s", "p", 1, "another"))
    votes = verdicts(verdict("s#p#0", "v", None), verdict("s#p#1", "v", True))
    rows, decisions = select(STEPS, plans, votes, Regeneration(rule=rule), 0, None)
    assert decisions_of(decisions) == {"s#p#0": "not_verified", "s#p#1": "kept"}
    assert rows["candidate_id"].to_pylist() == ["s#p#1"]


def test_a_step_without_a_target_needs_no_verdict() -> None:
    """r_plan = 1 once the gate passes: back, wait and scroll have no box."""
    rows, decisions = select(
        step_table(step("s", boxes=[])),
        candidates(candidate("s", "p", 0, "go back")),
        verdicts(),
        Regeneration(),
        1,
        None,
    )
    assert decisions_of(decisions) == {"s#p#0": "kept"}
    assert [(r["box"], r["hits"], r["answered"]) for r in rows.to_pylist()] == [(None, 0, 0)]


def test_the_cap_keeps_the_plans_with_most_votes_then_the_surest() -> None:
    rows, decisions = select(
        STEPS,
        candidates(*(candidate("s", "p", i, f"plan {i}") for i in range(4))),
        verdicts(
            verdict("s#p#0", "v", True),
            verdict("s#p#0", "w", False),
            verdict("s#p#1", "v", True, mean_logprob=-0.5),
            verdict("s#p#1", "w", True, mean_logprob=-0.5),
            verdict("s#p#2", "v", True, mean_logprob=-0.1),
            verdict("s#p#2", "w", True, mean_logprob=-0.1),
            verdict("s#p#3", "v", False),
            verdict("s#p#3", "w", False),
        ),
        Regeneration(max_plans_per_step=2),
        0,
        None,
    )
    assert rows["plan"].to_pylist() == ["plan 2", "plan 1"]
    assert decisions_of(decisions) == {
        "s#p#0": "over_cap",
        "s#p#1": "kept",
        "s#p#2": "kept",
        "s#p#3": "not_verified",
    }


OLD = rows(row("s", "old best", score=1.0), row("s", "old", score=0.5, candidate_id="s#open#1"), row("t", "old t"))


def carry(mode: Any, cap: int = 8) -> list[tuple[str, str, int]]:
    """What is in D_1 where two plans for `s` are verified, one of them known, and none for `t`."""
    rows, _ = select(
        STEPS,
        candidates(
            candidate("s", "p", 0, "new"), candidate("s", "p", 1, "old best"), candidate("t", "p", 0, "bad for t")
        ),
        verdicts(
            verdict("s#p#0", "v", True, mean_logprob=-0.1),
            verdict("s#p#1", "v", True, mean_logprob=-0.2),
            verdict("t#p#0", "v", False),
        ),
        Regeneration(carry_over=mode, max_plans_per_step=cap),
        1,
        OLD,
    )
    return [(r["step_id"], r["plan"], r["made_in"]) for r in rows.to_pylist()]


def test_carry_over() -> None:
    new = [("s", "new", 1), ("s", "old best", 1)]
    assert carry("none") == new
    assert carry("best_plan_per_step") == [*new, ("t", "old t", 0)]
    assert carry("cumulative") == [*new, ("s", "old", 0), ("t", "old t", 0)]


def test_a_cumulative_dataset_loses_no_plan_to_the_cap() -> None:
    """`old best` is verified again, but over the cap: then the old row stays."""
    assert carry("cumulative", cap=1) == [("s", "new", 1), ("s", "old best", 0), ("s", "old", 0), ("t", "old t", 0)]


@st.composite
def votings(draw: st.DrawFn) -> tuple[pa.Table, pa.Table, pa.Table, pa.Table | None]:
    """Steps, candidates, verdicts and perhaps D_{k-1}, with everything that can happen in them."""
    n_steps, verifiers = draw(st.integers(1, 3)), ["v", "w", "x"]
    steps = [step(f"s{i}", boxes=draw(st.sampled_from([[], [[10, 10, 20, 20]]]))) for i in range(n_steps)]
    plans, votes = [], []
    for one in steps:
        first = None
        for sample in range(draw(st.integers(0, 4))):
            gate = draw(st.sampled_from(["passed", "passed", "wrong_type", "wrong_value", "unparsed"]))
            plan = candidate(one["step_id"], "p", sample, None if gate == "unparsed" else f"plan {sample}", gate=gate)
            if gate == "passed":
                plan["duplicate_of"] = draw(st.sampled_from([None, first]))
                first = first if plan["duplicate_of"] or first else plan["candidate_id"]
                if plan["duplicate_of"] is None and one["boxes"]:
                    hits = draw(st.lists(st.sampled_from([True, False, None]), min_size=3, max_size=3))
                    hits[draw(st.integers(0, 2))] = draw(st.booleans())  # somebody answers
                    votes += [verdict(plan["candidate_id"], v, hit) for v, hit in zip(verifiers, hits, strict=True)]
            plans.append(plan)
    old = [row(f"s{i}", f"old {j}") for i in range(n_steps) for j in range(draw(st.integers(0, 2)))]
    return step_table(*steps), candidates(*plans), verdicts(*votes), draw(st.sampled_from([None, rows(*old)]))


RULES = st.sampled_from([("any", None), ("majority", None), ("all", None), ("k_of_n", 2), ("k_of_n", 3)])


@given(votings(), RULES, st.integers(1, 3))
def test_decisions_cover_every_candidate_once_and_d_k_holds_the_kept(
    voting: tuple[pa.Table, pa.Table, pa.Table, pa.Table | None], rule: Any, cap: int
) -> None:
    steps, plans, votes, previous = voting
    config = Regeneration(rule=rule[0], k=rule[1], max_plans_per_step=cap)
    rows, decisions = select(steps, plans, votes, config, 1, previous)
    assert decisions["candidate_id"].to_pylist() == plans["candidate_id"].to_pylist()
    kept = [name for name, decision in decisions_of(decisions).items() if decision == "kept"]
    new = [r for r in rows.to_pylist() if r["made_in"] == 1]
    assert sorted(r["candidate_id"] for r in new) == sorted(kept)
    per_step = [r["step_id"] for r in new]
    assert all(per_step.count(step_id) <= cap for step_id in per_step)
    if previous is not None:
        assert set(rows["step_id"].to_pylist()) >= set(previous["step_id"].to_pylist()), "coverage never falls"


@given(votings(), st.integers(1, 3))
def test_how_tables_are_cut_into_batches_decides_nothing(
    voting: tuple[pa.Table, pa.Table, pa.Table, pa.Table | None], size: int
) -> None:
    steps, plans, votes, previous = voting
    cut = [pa.Table.from_batches(table.to_batches(max_chunksize=size), table.schema) for table in (plans, votes)]
    config = Regeneration(max_plans_per_step=2)
    for whole, same in zip(
        select(steps, plans, votes, config, 1, previous), select(steps, *cut, config, 1, previous), strict=True
    ):
        assert whole.equals(same) and whole.schema.equals(same.schema)


def test_few_rows_of_a_table_are_python_objects_at_a_time() -> None:
    table = pa.table({"n": range(25_000), "other": ["x" * 20] * 25_000})
    tracemalloc.start()
    try:
        assert sum(row["n"] for row in rows_in_batches(table, ["n", "other"])) == 25_000 * 24_999 // 2
        streamed = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        assert len(table.to_pylist()) == 25_000
        assert streamed < tracemalloc.get_traced_memory()[1] * 0.6
    finally:
        tracemalloc.stop()


@given(votings())
def test_another_rule_is_only_another_reading_of_the_same_verdicts(
    voting: tuple[pa.Table, pa.Table, pa.Table, pa.Table | None],
) -> None:
    """Stricter rules keep a subset, with equal rows; no model runs again."""
    steps, plans, votes, _ = voting

    def read(rule: Any, k: int | None = None) -> dict[str, dict[str, Any]]:
        config = Regeneration(rule=rule, k=k, max_plans_per_step=99)
        return {r["candidate_id"]: r for r in select(steps, plans, votes, config, 1, None)[0].to_pylist()}

    any_, majority, all_ = read("any"), read("majority"), read("all")
    for strict, lax in ((all_, majority), (majority, any_), (read("k_of_n", 3), read("k_of_n", 2))):
        assert set(strict) <= set(lax)
        assert all(lax[name] == line for name, line in strict.items())
    assert read("k_of_n", 1) == any_
