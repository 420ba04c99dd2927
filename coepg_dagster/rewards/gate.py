"""The gate of Eq. 7 to 9, which the pools, the reward of GRPO and their measurements share."""

from __future__ import annotations

from typing import Protocol

from coepg_dagster.rewards.cdrem import ValueMode, type_reward, value_reward
from coepg_dagster.steps import GATE_PASSED, GATE_UNPARSED, GATE_WRONG_TYPE, GATE_WRONG_VALUE


class PlannedAction(Protocol):
    """What a planner or an end-to-end agent wants to do."""

    @property
    def action_type(self) -> str: ...
    @property
    def value(self) -> str: ...


def gate_of(answer: PlannedAction | None, action_type: str, value: str, value_mode: ValueMode = "f1") -> str:
    """The gate that stops an answer, or GATE_PASSED, given the label's type and value; `answer` None: it was not parsed."""
    if answer is None:
        return GATE_UNPARSED
    if not type_reward(answer.action_type, action_type):
        return GATE_WRONG_TYPE
    if not value_reward(answer.value, value, value_mode):
        return GATE_WRONG_VALUE
    return GATE_PASSED
