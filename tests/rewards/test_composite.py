"""Parts of a reward become one number; combinations that cannot work are refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster import plugins
from coepg_dagster.plugins import NoPlugin, find, plugin
from coepg_dagster.rewards import combiners, terms
from coepg_dagster.rewards.answers import Floats
from coepg_dagster.rewards.composite import Composite
from coepg_dagster.rewards.estimators import estimated, rloo

BITS = np.array(list(product([0.0, 1.0], repeat=3)))


def combined(combiner: str, parts: Any, scored: Any = None, **settings: Any) -> Floats:
    given_terms = {name: {"name": name, "weight": weight} for name, (weight, _) in (scored or {}).items()}
    composite = Composite(terms=given_terms, combiner={"name": combiner, **settings})
    values = [np.array([float(part)]) for part in parts]
    return float(
        composite.combine(*values, {name: np.array([score]) for name, (_, score) in (scored or {}).items()})[0]
    )


@pytest.mark.parametrize(
    ("combiner", "parts", "terms", "reward"),
    [
        ("gate", (1, 1, 1, 0.7), {}, 0.7),
        ("gate", (1, 1, 0, 0.7), {}, 0),
        ("gate", (1, 1, 1, 0.7), {"format": (0.1, 1.0), "length": (0.2, 0.5)}, 0.7 + 0.1 + 0.1),
        ("gate", (1, 1, 1, 0.7), {"format": (0.0, 1.0)}, 0.7),
        ("weighted_sum", (1, 0, 1, 0.5), {}, 0.25 + 0.25),
        ("ui_s1", (1, 0, 1, 1), {}, 0.1),
        ("ui_s1", (1, 1, 0, 1), {}, 0.5),
        ("ui_s1", (1, 1, 1, 1), {}, 1),
        ("ui_s1", (0, 0, 0, 0), {}, 0),
        ("gui_libra", (1, 1, 1, 0.5), {}, 0.1 + 0.45),
        ("gui_libra", (1, 0, 1, 0.5), {}, 0.1),
        ("gui_r1", (1, 1, 1, 0.5), {"format": (0.0, 1.0)}, 0.4 + 0.2),
        ("infigui_r1", (1, 1, 1, 1), {"sub_goal": (0.0, 0.5)}, 1.0),
        ("infigui_r1", (1, 1, 1, 0), {"sub_goal": (0.0, 0.5)}, 0.1 + 0.9 * (0.2 + 0.2 * 0.5)),
        ("infigui_r1", (1, 0, 0, 0), {"sub_goal": (0.0, 0.5)}, 0.1 + 0.9 * 0.1),
    ],
)
def test_by_hand(combiner: str, parts: Any, terms: Any, reward: float) -> None:
    assert combined(combiner, parts, terms) == pytest.approx(reward)


def test_a_grounder_is_queried_only_where_its_point_decides() -> None:
    parsed, types, values = BITS.T
    by_gate = Composite().needs_point(parsed, types, values)
    assert by_gate.tolist() == [bool(p and t and v) for p, t, v in BITS]
    by_sum = Composite(combiner={"name": "weighted_sum"}).needs_point(parsed, types, values)
    assert by_sum.tolist() == [bool(p) for p in parsed]


@pytest.fixture(scope="module", autouse=True)
def of_a_user() -> Iterator[None]:
    """Plug-ins of a user's own: a score from -1 to 1, and combiners that multiply by a term."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_known", dict(plugins._known))
        plugin("reward", "a test", lowest=-1.0)(signed)
        plugin("combiner", "a test")(times_format)
        plugin("combiner", "a test")(times_what_is_missing)
        yield


def signed(points: Floats, boxes: Floats) -> Floats:
    return 2 * terms.hit(points, boxes) - 1


def times_format(parsed: Floats, type: Floats, point: Floats, format: Floats) -> Floats:
    return parsed * type * point * format


def times_what_is_missing(parsed: Floats, value: Floats, point: Floats, format: Floats, sub_goal: Floats) -> Floats:
    return parsed * value * point * (1 - format) * sub_goal


@st.composite
def composites(draw: st.DrawFn) -> Composite:
    """Any combiner, with the terms that it reads and others, of a score from 0 or one from -1."""
    names = [
        "gate",
        "weighted_sum",
        "ui_s1",
        "gui_libra",
        "gui_r1",
        "infigui_r1",
        "times_format",
        "times_what_is_missing",
    ]
    combiner = find("combiner", draw(st.sampled_from(names)))
    used = [name for name in combiner.inputs if name not in combiners.PARTS]
    used += [name for name in draw(st.sets(st.sampled_from(["length", "signed"]))) if name not in used]
    return Composite(
        point_score={"name": draw(st.sampled_from(["hit", "signed"]))},
        terms={name: {"name": name, "weight": draw(st.sampled_from([0.0, 0.25, 1.0]))} for name in used},
        combiner={"name": combiner.name},
    )


def draw_scores(data: st.DataObject, composite: Composite) -> dict[str, Floats]:
    """A score of each term for one answer."""
    lows = {name: find("reward", name).lowest for name in composite.terms}
    return {name: np.array([data.draw(st.floats(low, 1))]) for name, low in lows.items()}


@given(composites(), st.sampled_from(BITS.tolist()), st.data())
def test_a_point_that_nobody_asks_for_decides_nothing(made: Composite, bits: list[float], data: st.DataObject) -> None:
    parts = [np.array([bit]) for bit in bits]
    if bits[0] and not made.needs_point(*parts)[0]:
        points, scores = st.floats(made.lowest_point, 1), draw_scores(data, made)
        one, other = (made.combine(*parts, np.array([data.draw(points)]), scores)[0] for _ in range(2))
        assert one == pytest.approx(other)


@given(composites(), st.sampled_from(BITS.tolist()), st.data())
def test_an_answer_that_cannot_be_read_never_earns_more_than_one_that_can(
    made: Composite, bits: list[float], data: st.DataObject
) -> None:
    """Nor does any answer earn less than the lowest reward. What terms say about the text is the same for both."""
    place, scores = np.array([data.draw(st.floats(made.lowest_point, 1))]), draw_scores(data, made)
    readable = made.combine(np.ones(1), *(np.array([bit]) for bit in bits[1:]), place, scores)[0]
    without_place = {name: np.array([-1.0]) if name == "signed" else score for name, score in scores.items()}
    unreadable = made.combine(*np.zeros((3, 1)), np.array([made.lowest_point]), without_place)[0]
    assert made.lowest - 1e-9 <= unreadable <= readable + 1e-9


def test_a_confidence_may_stand_beside_a_point_that_a_term_multiplies() -> None:
    weights = {"hyperclick": 1.0, "format": 0.0}
    named = {name: {"name": name, "weight": weight} for name, weight in weights.items()}
    Composite(terms=named, combiner={"name": "times_format"}).refuse("planner")


def test_a_negative_weight_is_for_what_every_answer_has() -> None:
    Composite(terms={"length": {"name": "length", "weight": -0.1}}).refuse("grounder")
    for name, role in (("gui_rcpo", "grounder"), ("infigui_g1", "grounder"), ("sub_goal", "planner")):
        with pytest.raises(NoPlugin, match=f"terms: {name} .* give a weight of 0 or more"):
            Composite(terms={name: {"name": name, "weight": -0.1}}).refuse(role)  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1), min_size=8, max_size=8))
def test_by_default_it_is_eq_9(point: list[float]) -> None:
    parsed, types, values = BITS.T
    reward = Composite().combine(parsed, types, values, np.array(point), {})
    assert reward.tolist() == [p if t and v else 0 for p, (_, t, v) in zip(point, BITS, strict=True)]


@pytest.mark.parametrize(
    ("made", "role", "message"),
    [
        (
            {"point_score": {"name": "gui_g1"}},
            "planner",
            "'gui_g1' asks for areas; here it can have boxes, points, size",
        ),
        ({"point_score": {"name": "format"}}, "planner", "'format' asks for texts"),
        ({"point_score": {"name": "infigui_g1"}}, "planner", "asks for candidates"),
        ({"terms": {"sub_goal": {"name": "sub_goal", "weight": 1.0}}}, "grounder", "asks for plans, references"),
        ({"combiner": {"name": "infigui_r1"}}, "planner", "'infigui_r1' asks for sub_goal"),
        ({"combiner": {"name": "gui_r1"}}, "grounder", "'gui_r1' asks for format"),
        (
            {
                "terms": {"hyperclick": {"name": "hyperclick", "weight": 1.0}},
                "combiner": {"name": "weighted_sum", "action": 1.0, "text": 0.0, "place": 0.0},
            },
            "grounder",
            "alone is hacked by a low confidence",
        ),
        ({"point_score": {"name": "hits"}}, "planner", "no reward 'hits'; known: format, "),
    ],
)
def test_what_cannot_work_is_refused(made: dict[str, Any], role: Any, message: str) -> None:
    with pytest.raises(NoPlugin, match=message):
        Composite(**made).refuse(role)


def test_boxes_and_several_places_are_a_grounders() -> None:
    for name in ("gui_g1", "infigui_g1", "gui_g2_coverage"):
        Composite(point_score={"name": name}).refuse("grounder")
    confident = {"hyperclick": {"name": "hyperclick", "weight": 1.0}}
    Composite(terms=confident).refuse("grounder")


GROUPS = st.integers(2, 5).flatmap(
    lambda g: st.lists(st.lists(st.floats(0, 1), min_size=g, max_size=g), min_size=1, max_size=4)
)


@given(GROUPS)
def test_leave_one_out_is_the_mean_without_oneself(groups: list[list[float]]) -> None:
    rewards = np.array(groups)
    for group, advantages in zip(groups, rloo(rewards), strict=True):
        expected = [r - (sum(group) - r) / (len(group) - 1) for r in group]
        assert advantages == pytest.approx(expected if max(group) > min(group) else [0] * len(group))


@given(GROUPS)
def test_plugins_run_in_order_and_keep_signs(groups: list[list[float]]) -> None:
    rewards = np.array(groups)
    start, areas = rewards - rewards.mean(axis=1, keepdims=True), np.full(len(rewards), 0.02)
    scaled = estimated(
        [{"name": "sngs", "lambda_0": 0.5, "kappa": 1.5, "success": 0.5}], rewards, start, {"areas": areas}
    )
    rate = (rewards >= 0.5).mean(axis=1, keepdims=True)
    assert scaled == pytest.approx(np.where(start < 0, start * np.minimum(0.5 + 1.5 * rate, 1), start))
    then = [{"name": "rloo"}, {"name": "gui_g1_difficulty", "reference": 0.01, "gamma": 0.5}]
    assert estimated(then, rewards, start, {"areas": areas}) == pytest.approx(rloo(rewards)), (
        "one size of target: weight 1"
    )
    dropped = estimated([{"name": "drop_spreadless"}], rewards, start, {"areas": areas})
    spread = [len(set(group)) > 1 for group in groups]
    assert dropped == pytest.approx(start * len(groups) / max(1, sum(spread)))


def test_the_combiners_have_the_parts_that_they_name() -> None:
    assert set(combiners.PARTS) == {"parsed", "type", "value", "point"}
