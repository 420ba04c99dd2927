"""Properties of the reward functions of other systems; numbers by hand are in their docstrings (`test_examples`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.geometry import Box, Point, Size, Space, Viewport
from coepg_dagster.notations import FARTHEST
from coepg_dagster.plugins import Plugin, find, plugins
from coepg_dagster.rewards import terms
from coepg_dagster.rewards.answers import OF_PLACE, Answers
from coepg_dagster.rewards.cdrem import Floats
from coepg_dagster.rewards.composite import Composite

SIZE = (300.0, 200.0)
PLACE_SCORES = [
    one for one in plugins() if one.kind == "reward" and set(one.inputs) <= OF_PLACE and "boxes" in one.inputs
]
DENSE = ["se_gui", "gui_g2", "gui_g2_coverage", "lpo", "step_gui", "step_gui_box"]


@st.composite
def boxes(draw: st.DrawFn, most: int = 3) -> Floats:
    corners = st.tuples(st.integers(0, 280), st.integers(0, 180), st.integers(1, 20), st.integers(1, 20))
    return np.array([(x, y, x + w, y + h) for x, y, w, h in draw(st.lists(corners, min_size=1, max_size=most))], float)


def points() -> st.SearchStrategy[Floats]:
    place = st.tuples(st.floats(-500, 800), st.floats(-500, 700))
    return st.lists(place, min_size=1, max_size=5).map(lambda found: np.array(found, float))


def scored(reward: Plugin, areas: Floats, targets: Floats) -> Floats:
    return Answers(areas, targets, SIZE).scores(reward)


def at(places: Floats) -> Floats:
    """Points as boxes without size."""
    return np.concatenate([places, places], axis=1)


@pytest.mark.parametrize("reward", PLACE_SCORES, ids=lambda one: one.name)
@given(places=points(), targets=boxes())
def test_a_score_of_places_is_from_0_to_1_and_best_on_the_box_itself(
    reward: Plugin, places: Floats, targets: Floats
) -> None:
    scores = scored(reward, at(places), targets)
    assert ((scores >= 0) & (scores <= 1)).all()
    perfect = targets[:1] if "areas" in reward.inputs else at((targets[:1, :2] + targets[:1, 2:]) / 2)
    assert scored(reward, perfect, targets)[0] == pytest.approx(1)


@pytest.mark.parametrize("reward", PLACE_SCORES, ids=lambda one: one.name)
@given(
    corners=st.lists(st.floats(-FARTHEST, FARTHEST), min_size=4, max_size=4),
    size=st.tuples(*[st.integers(1, 50_000)] * 2),
    targets=boxes(),
)
def test_every_place_that_an_answer_can_name_has_a_score(
    reward: Plugin, corners: list[float], size: tuple[int, int], targets: Floats
) -> None:
    """An answer of thousands of digits must not end a training."""
    (x1, x2), (y1, y2) = sorted(corners[::2]), sorted(corners[1::2])
    seen = Viewport(Size(*size), Size(28, 28)).box(Box(x1, y1, x2, y2, Space.RESIZED), Space.ORIGINAL)
    assert 0 <= scored(reward, np.array([[seen.x1, seen.y1, seen.x2, seen.y2]]), targets)[0] <= 1


@pytest.mark.parametrize("name", DENSE)
@given(targets=boxes(most=1), direction=st.floats(0, 6.28), near=st.floats(0, 60), farther=st.floats(0.1, 60))
def test_a_dense_score_never_rises_with_the_distance(
    name: str, targets: Floats, direction: float, near: float, farther: float
) -> None:
    centre = (targets[:, :2] + targets[:, 2:]) / 2
    away = np.array([[np.cos(direction), np.sin(direction)]])
    both = np.concatenate([centre + near * away, centre + (near + farther) * away])
    first, second = scored(find("reward", name), at(both), targets)
    assert first >= second - 1e-12


@given(places=points(), targets=boxes())
def test_hit_is_eq_3(places: Floats, targets: Floats) -> None:
    as_boxes = [Box(*box, Space.ORIGINAL) for box in targets.tolist()]
    expected = [any(box.contains(Point(*place, Space.ORIGINAL)) for box in as_boxes) for place in places.tolist()]
    assert terms.hit(places, targets).tolist() == [float(one) for one in expected]


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 9), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5
    )
)
def test_region_consistency_is_the_sum_over_pixels(regions: list[tuple[int, int, int, int]]) -> None:
    """Regions with whole corners, where a pixel is a unit square, counted one by one."""
    areas = np.array([(x, y, x + w, y + h + (w == h == 0)) for x, y, w, h in regions], float)  # none is a point
    votes = np.zeros((20, 20))
    for x1, y1, x2, y2 in areas.astype(int):
        votes[x1:x2, y1:y2] += 1
    expected = []
    for x1, y1, x2, y2 in areas.astype(int):
        inside = votes[x1:x2, y1:y2]
        expected.append(inside.sum() / (inside.size * votes.max()) if inside.size else 0.0)
    assert terms.gui_rcpo(areas, (20.0, 20.0)) == pytest.approx(expected)


def test_the_more_a_region_agrees_with_the_group_the_higher_its_reward() -> None:
    areas = at(np.array([[100.0, 100], [102, 100], [98, 101], [250, 30]]))
    scores = Answers(areas, np.zeros((0, 4)), SIZE).scores(find("reward", "gui_rcpo"))
    assert scores[:3].min() > 0.8 > scores[3] == pytest.approx(1 / 3)


def test_answers_without_a_place_have_no_score_and_do_not_disturb_the_others() -> None:
    areas = np.concatenate([at(np.array([[50.0, 50.0]])), np.full((1, 4), np.nan)])
    targets = np.array([[40.0, 40, 60, 60]])
    texts = ["(50,50)<confidence>1.0</confidence>", "<confidence>1.0</confidence>"]
    for one in PLACE_SCORES:
        assert scored(one, areas, targets)[1] == 0
    assert Answers(areas, targets, SIZE, texts).scores(find("reward", "hyperclick")).tolist() == [1, 0]
    assert Answers(areas, np.zeros((0, 4)), SIZE, texts).scores(find("reward", "hit")).tolist() == [0, 0]


def test_a_function_that_gives_no_number_for_each_answer_is_named() -> None:
    one = Plugin("reward", "half", "here", lambda texts: [0.5])
    two = Answers(np.zeros((2, 4)), np.zeros((0, 4)), SIZE, ["a", "b"])
    with pytest.raises(ValueError, match=r"the reward 'half' gave \[0\.5\] for 2 answers"):
        two.scores(one)
    below = Plugin("reward", "below", "here", lambda texts: [0.5, -0.5])
    with pytest.raises(ValueError, match=r"'below' gave -0\.5, below its lowest score 0: .*lowest=-1"):
        two.scores(below)
    assert two.scores(replace(below, lowest=-1.0)).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("spoken", ["1.5", "-0.1", "high", "1e9", ""])
def test_a_confidence_that_is_none_earns_nothing(spoken: str) -> None:
    texts = [f"(50,50)<confidence>{spoken}</confidence>"]
    assert terms.hyperclick(texts, np.array([[50.0, 50]]), np.array([[40.0, 40, 60, 60]])).tolist() == [0]


def test_places_on_one_line_are_no_search() -> None:
    line, corner = np.array([[0.0, 0], [1, 1], [5, 5]]), np.array([[0.0, 0], [1, 1], [5, 6]])
    target = np.array([[0.0, 0, 0.5, 0.5]])
    assert terms.infigui_g1([line, corner, np.zeros((0, 2))], target) == pytest.approx([-1, 1 / np.sqrt(3), -1])


@given(st.text(max_size=40))
def test_terms_about_text_never_raise(text: str) -> None:
    for term in (terms.exact_format, terms.guirlvg_format, terms.length, terms.no_thinking):
        assert 0 <= term([text])[0] <= 1


def test_a_term_is_scored_for_the_group_as_a_whole() -> None:
    areas = at(np.array([[100.0, 100], [100, 100]]))
    made = Composite(terms={"gui_rcpo": {"name": "gui_rcpo", "weight": 1.0, "side": 50.0}})
    assert made.term_scores(Answers(areas, np.zeros((0, 4)), SIZE))["gui_rcpo"].tolist() == [1, 1]
