"""The gate of Eq. 7 to 9."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.prompts import PlannerAnswer
from coepg_dagster.rewards.cdrem import ValueMode, gated, type_reward, value_reward
from coepg_dagster.rewards.gate import gate_of
from coepg_dagster.steps import GATE_PASSED, GATE_WRONG_VALUE

TYPES = st.sampled_from(["CLICK", "TYPE", "SELECT", "FLY"])
VALUES = st.sampled_from(["", "red", "red green", "green blue"])


@pytest.mark.parametrize(
    ("answer", "gate"),
    [
        (None, "unparsed"),
        (PlannerAnswer("x", "CLICK", "red"), "wrong_type"),
        (PlannerAnswer("x", "TYPE", ""), "wrong_value"),
        (PlannerAnswer("x", "TYPE", "blue"), "wrong_value"),
        (PlannerAnswer("x", "TYPE", "Red"), "passed"),
    ],
)
def test_where_an_answer_stops(answer: PlannerAnswer | None, gate: str) -> None:
    assert gate_of(answer, "TYPE", "red") == gate


@given(TYPES, VALUES, TYPES, VALUES)
def test_the_gate_is_that_of_the_reward(kind: str, value: str, label: str, label_value: str) -> None:
    """Eq. 9 and the verification of plans agree on which rollouts are right."""
    gate = gate_of(PlannerAnswer("x", kind, value), label, label_value)
    reward = gated(type_reward(kind, label), value_reward(value, label_value), 1.0)
    assert (gate == "passed") == bool(reward)


def test_an_exact_value_has_all_words_of_the_label() -> None:
    modes: tuple[tuple[ValueMode, str], ...] = (("f1", GATE_PASSED), ("exact", GATE_WRONG_VALUE))
    for mode, gate in modes:
        answer = PlannerAnswer("p", "TYPE", "red running shoes")
        assert gate_of(answer, "TYPE", "running shoes", mode) == gate
        assert gate_of(PlannerAnswer("p", "TYPE", "Running  Shoes"), "TYPE", "running shoes", mode) == GATE_PASSED
        assert gate_of(PlannerAnswer("p", "CLICK", ""), "CLICK", "", mode) == GATE_PASSED
