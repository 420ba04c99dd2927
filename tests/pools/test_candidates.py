"""Tasks, duplicates, and the members of a pool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.inference.agents import planner_inputs
from coepg_dagster.pools.candidates import jaccard, mark_duplicates, plan_tokens, pool_members
from tests.conftest import step, step_table
from tests.pools.tables import candidate, candidates


def test_planners_receive_goal_and_history_only() -> None:
    [task] = planner_inputs(step_table(step("a", goal="Buy", history=["clicked"], value="secret")))
    assert (task.step_id, task.goal, task.history) == ("a", "Buy", ("clicked",))
    assert "secret" not in repr(task)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("Click the OK button.", "click the ok  button .", True),
        ("click OK", "click Cancel", False),
        ("click the button the", "the button click", True),  # sets of tokens
        ("a b c d e f g h i j", "a b c d e f g h i j k", True),  # 10 / 11 > 0.9
        ("a b c d e f g h i", "a b c d e f g h i j", False),  # 9 / 10 is not more than 0.9
    ],
)
def test_what_is_one_plan(a: str, b: str, same: bool) -> None:
    table = mark_duplicates(candidates(candidate("s", "p", 0, a), candidate("s", "q", 0, b)), 0.9)
    assert table["duplicate_of"].to_pylist() == [None, "s#p#0" if same else None]


def test_duplicates_are_of_one_step_and_passed_the_gate() -> None:
    table = mark_duplicates(
        candidates(
            candidate("s", "p", 0, "click OK", gate="wrong_value"),
            candidate("s", "p", 1, "click OK"),
            candidate("t", "p", 0, "click OK"),
            candidate("s", "q", 0, "click OK"),
            candidate("s", "q", 1, "click OK", gate="wrong_type"),
        ),
        0.9,
    )
    assert table["duplicate_of"].to_pylist() == [None, None, None, "s#p#1", None]


PLANS = st.lists(st.text("abc ", min_size=1, max_size=6).filter(str.strip), min_size=1, max_size=8)


@given(PLANS, st.sampled_from([0.3, 0.9, 1.0]))
def test_every_duplicate_points_at_a_first_that_says_the_same(plans: list[str], similar: float) -> None:
    table = mark_duplicates(candidates(*(candidate("s", "p", i, plan) for i, plan in enumerate(plans))), similar)
    plan_of = dict(zip(table["candidate_id"].to_pylist(), table["plan"].to_pylist(), strict=True))
    mark_of = dict(zip(table["candidate_id"].to_pylist(), table["duplicate_of"].to_pylist(), strict=True))
    assert mark_of["s#p#0"] is None
    firsts = []
    for name, first in mark_of.items():
        tokens = plan_tokens(plan_of[name])
        if first is None:
            assert all(tokens != other and jaccard(tokens, other) <= similar for other in firsts)
            firsts.append(tokens)
        else:
            assert mark_of[first] is None
            other = plan_tokens(plan_of[first])
            assert tokens == other or jaccard(tokens, other) > similar
    assert mark_duplicates(table, similar).equals(table)


def test_pool_members_keep_their_order_and_names() -> None:
    assert list(pool_members({"a": "1", "b": "2"}, {"planner_2": "3", "planner_1": "4"})) == [
        "a",
        "b",
        "planner_2",
        "planner_1",
    ]
    with pytest.raises(ValueError, match="different names: a"):
        pool_members({"a": "1"}, {"a": "2"})
