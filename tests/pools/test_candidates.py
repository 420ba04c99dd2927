"""Tasks, duplicates, and the members of a pool."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.inference.agents import Planner, planner_inputs
from coepg_dagster.inference.engine import Failure
from coepg_dagster.inference.screens import Screens
from coepg_dagster.pools.candidates import jaccard, mark_duplicates, plan_tokens, pool_members, write_candidates
from coepg_dagster.progress import Ended
from coepg_dagster.prompts import action_hint, planner_answer
from coepg_dagster.steps import GATE_NO_ANSWER, GATE_PASSED
from tests.conftest import png, step, step_table
from tests.inference.scripted import Scripted, generation
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


@pytest.mark.parametrize(
    "failure", [Failure("no answer within 120 s", passing=True), Failure("status 400: the prompt is too long")]
)
@pytest.mark.parametrize(("unanswered", "of"), [(1, 4), (2, 4), (3, 4), (4, 4), (3, 300), (4, 300)])
def test_steps_without_an_answer_cost_their_own_rows_until_they_are_more_than_chance(
    failure: Failure, unanswered: int, of: int
) -> None:
    table = step_table(*(step(f"s{i}", screenshot=png(), goal=f"goal {i}") for i in range(of)))
    silent = {f"Task: goal {i}\nDone: none" for i in range(unanswered)}
    answer = generation(planner_answer("click OK", "CLICK", ""))
    engine = Scripted(lambda text: failure if text in silent else answer)
    planner = Planner(engine, Screens(table, engine.resize), "compact")
    if unanswered > max(2, of // 100):
        with pytest.raises(Ended, match=f"planner far: {unanswered} of {of} steps got no answer: {failure.reason}"):
            write_candidates(planner, "far", table, Regeneration(), 0)
        return
    rows = write_candidates(planner, "far", table, Regeneration(plans_per_planner=2), 0).to_pylist()
    assert len(rows) == 2 * of
    for row in rows:
        failed = int(row["step_id"][1:]) < unanswered
        assert row["gate"] == (GATE_NO_ANSWER if failed else GATE_PASSED)
        assert (row["plan"], row["text"]) == ((None, "") if failed else ("click OK", answer.text))


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


def test_a_hint_is_for_pool_planners_and_only_where_it_is_switched_on(models: Models) -> None:
    """They are told the label's action; what is trained on the plan asks without it."""
    table = step_table(step("a", goal="Buy", action_type="TYPE", value="dark red shoes", screenshot=png()))
    answer = planner_answer("type into Search", "TYPE", "red shoes")
    for hint in (False, True):
        engine = Scripted(lambda _: generation(answer))
        planner = Planner(engine, Screens(table, engine.resize), "compact")
        config = Regeneration(hindsight_hint=hint, plans_per_planner=1, value_mode="exact" if hint else "f1")
        [row] = write_candidates(planner, "open", table, config, 0).to_pylist()
        asked = engine.requests[0].messages[0]["content"][1]["text"]
        assert ("TYPE dark red shoes" in asked) is hint
        assert row["gate"] == ("wrong_value" if hint else "passed")
    [task] = planner_inputs(table)
    for style in ("web", "compact"):
        assert "red" not in json.dumps(task.messages(style))
        hinted = replace(task, hint=action_hint("CLICK", "")).messages(style)
        assert "CLICK" in hinted[0]["content"][1]["text"].split("Buy")[1]


def test_pool_members_keep_their_order_and_names() -> None:
    assert list(pool_members({"a": "1", "b": "2"}, {"planner_2": "3", "planner_1": "4"})) == [
        "a",
        "b",
        "planner_2",
        "planner_1",
    ]
    with pytest.raises(ValueError, match="different names: a"):
        pool_members({"a": "1"}, {"a": "2"})
    assert list(pool_members({}, {"grounder_1": "1"})) == ["grounder_1"]
    with pytest.raises(ValueError, match=r"no member.*`verifiers` must name at least one"):
        pool_members({}, {})
