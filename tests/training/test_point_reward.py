"""The reward of the place that an answer names: its point score and terms, for groups of answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coepg_dagster.experiment.training import GrounderRl
from coepg_dagster.geometry import Space
from coepg_dagster.inference.screens import Screens
from coepg_dagster.plugins import find, plugins
from coepg_dagster.rewards.composite import CAN_ASK
from coepg_dagster.training.point_reward import PointReward
from tests.conftest import png, step, step_table
from tests.inference.scripted import RESIZE

HIT, NEAR, MISS, UNREADABLE = "(15,15)", "(16,17)", "(80,100)", "no idea"


def of_grounder(texts: list[str], plans: list[str] | None = None, **settings: Any) -> PointReward:
    """The reward of a grounder, after it has scored answers to one step with the target (10, 10, 20, 20)."""
    steps = step_table(step("a", screenshot=png()))
    composite = GrounderRl.model_validate(settings).composite
    reward = PointReward(steps, Screens(steps, RESIZE), Space.ORIGINAL, composite, "grounder")
    reward.score(texts, ["a"] * len(texts), plans or ["p"] * len(texts))
    return reward


def rewards(made: PointReward) -> list[float]:
    return [row["reward"] for row in made.rows]


def place_scores() -> list[str]:
    """The names of all that can be the point score of a grounder."""
    return [one.name for one in plugins() if one.kind == "reward" and set(one.inputs) <= CAN_ASK["grounder"][0]]


@pytest.mark.parametrize("name", place_scores())
def test_a_point_score_sees_a_group_as_a_term_does(name: str) -> None:
    texts, plans = [HIT, NEAR, MISS, HIT, MISS], ["p"] * 3 + ["q"] * 2
    as_term = of_grounder(texts, plans, terms={name: 0.0})
    scores = [part["score"] for row in as_term.rows for part in row["parts"] if part["name"] == name]
    assert rewards(of_grounder(texts, plans, point_score=name)) == pytest.approx(scores)


@pytest.mark.parametrize("name", place_scores())
@pytest.mark.parametrize("combiner", ["gate", "weighted_sum", "ui_s1", "gui_libra"])
def test_an_answer_that_cannot_be_read_earns_least(name: str, combiner: str) -> None:
    hit, near, miss, unreadable = rewards(
        of_grounder([HIT, NEAR, MISS, UNREADABLE], point_score=name, combiner=combiner)
    )
    assert unreadable <= min(hit, near, miss)
    assert unreadable == min(0, find("reward", name).lowest)


def test_agreement_with_the_group_is_no_agreement_with_oneself() -> None:
    agree, too, alone = rewards(of_grounder([HIT, HIT, MISS], point_score="gui_rcpo"))
    assert agree == too > alone > 0
    with_others = rewards(of_grounder([HIT, MISS], ["p", "q"], point_score="gui_rcpo"))
    assert np.allclose(with_others, 1), "another plan is another group"
