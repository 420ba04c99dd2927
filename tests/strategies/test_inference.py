"""Ways to infer, against an agent whose answers are written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.geometry import Box, Point, Size, Space
from coepg_dagster.plugins import find
from coepg_dagster.prompts import PlannerAnswer
from coepg_dagster.strategies.curation import square
from coepg_dagster.strategies.inference import Answered, consensus, judged, majority, refuses


def at(x: float, y: float) -> Point:
    return Point(x, y, Space.ORIGINAL)


def plan(text: str, kind: str = "CLICK", value: str = "") -> Answered:
    return Answered(text, PlannerAnswer(text, kind, value))


NO_PLAN = Answered("?", None)


class Written:
    """Plans by step, greedy first; points by plan; an answer to every question."""

    def __init__(self, plans: list[list[Answered]], points: dict[str, list[Point | None]], answer: str = "") -> None:
        self.sizes, self.seed = [Size(100, 100)] * len(plans), 0
        self._plans, self._points, self._answer = plans, points, answer
        self.asked: list[tuple[int, str]] = []
        self.crops: list[Box] = []

    def plans(self, steps: Sequence[int], samples: int = 1, temperature: float = 0.0) -> list[list[Answered]]:
        return [self._plans[i][:1] if not temperature else self._plans[i][1 : 1 + samples] for i in steps]

    def points(
        self, queries: Sequence[tuple[int, str]], samples: int = 1, *_: Any, crops: Sequence[Box] | None = None
    ) -> list[list[tuple[Point | None, str]]]:
        self.crops += crops or []
        key = "in a crop: " if crops else ""
        return [[(point, str(point)) for point in self._points[key + text][:samples]] for _, text in queries]

    def ask(self, questions: Sequence[tuple[int, str]]) -> list[str]:
        self.asked += questions
        return [self._answer] * len(questions)


def run(name: str, agent: Written, **settings: Any) -> list[Answered]:
    answered: list[Answered] = find("inference", name).function(agent, **settings)
    return answered


def test_a_vote_by_hand() -> None:
    agent = Written(
        [[plan("a")], [NO_PLAN], [plan("b")]], {"a": [at(10, 10), at(14, 10), at(80, 80), None], "b": [None] * 4}
    )
    first, second, third = run("region_vote", agent, samples=4, side=10.0)
    # squares 5..15 and 9..19 overlap in 9..15
    assert (first.point, first.confidence) == (at(12, 10), 0.5)
    assert second == NO_PLAN and (third.point, third.confidence) == (None, 0.0)


def test_of_areas_with_equal_votes_the_largest_counts_by_its_rectangle() -> None:
    pairs = [(0, 0, 4, 4), (2, 0, 6, 4), (20, 0, 30, 4), (21, 0, 29, 4)]
    centre, votes = consensus([Box(*pair, Space.ORIGINAL) for pair in pairs])
    assert (centre, votes) == (at(25, 2), 2)
    assert consensus([]) == (None, 0)


@given(st.lists(st.tuples(st.integers(10, 50), st.integers(10, 50)), min_size=1, max_size=8))
def test_the_vote_is_that_of_counted_pixels(points: list[tuple[int, int]]) -> None:
    from scipy.ndimage import label

    regions = [square(at(x, y), 10) for x, y in points]
    counts = np.zeros((60, 60), dtype=int)
    for box in regions:
        counts[int(box.y1) : int(box.y2), int(box.x1) : int(box.x2)] += 1
    areas, n = label(counts == counts.max())
    sizes = [int((areas == i).sum()) for i in range(1, n + 1)]
    centre, votes = consensus(regions)
    assert votes == counts.max() and centre is not None
    centres = set()
    for i in np.flatnonzero(np.array(sizes) == max(sizes)) + 1:
        ys, xs = np.nonzero(areas == i)
        centres.add(((xs.min() + xs.max() + 1) / 2, (ys.min() + ys.max() + 1) / 2))
    assert (centre.x, centre.y) in centres


def test_zoom_grounds_again_in_a_crop_around_the_first_point() -> None:
    points: dict[str, list[Point | None]] = {"a": [at(10, 90)], "in a crop: a": [at(12, 88)], "b": [None]}
    agent = Written([[plan("a")], [plan("b")], [NO_PLAN]], points)
    assert [one.point for one in run("zoom", agent)] == [at(12, 88), None, None]
    assert agent.crops == [Box(0, 50, 50, 100, Space.ORIGINAL)]
    points["in a crop: a"] = [None]
    assert run("zoom", Written([[plan("a")]], points))[0].point == at(10, 90)


@pytest.mark.parametrize(("answer", "chosen"), [('{"index": 2}', "b"), ("I cannot say", "a"), ('{"index": 7}', "a")])
def test_the_judge_names_a_plan_or_the_majority_decides(answer: str, chosen: str) -> None:
    step = [plan("greedy"), plan("a"), plan("b", "TYPE", "x"), NO_PLAN, plan("c")]
    agent = Written([step, [plan("greedy"), NO_PLAN]], {name: [at(1, 1)] for name in "abc"}, answer)
    first, second = run("best_of_plans", agent, plans=4)
    assert (first.text, first.point, second.answer) == (chosen, at(1, 1), None)
    [(step_index, question)] = agent.asked
    assert step_index == 0 and "1. a (CLICK)\n2. b (TYPE x)\n3. c (CLICK)" in question


def test_the_majority_is_of_types_and_values() -> None:
    answers = [PlannerAnswer("a", "TYPE", "x"), PlannerAnswer("b", "CLICK", ""), PlannerAnswer("c", "CLICK", "")]
    assert majority(answers) == 1


def test_one_plan_needs_no_judge() -> None:
    agent = Written([[plan("greedy"), plan("a"), plan("a")]], {"a": [at(1, 1)]})
    assert run("best_of_plans", agent, plans=2)[0].text == "a" and not agent.asked


def test_a_plan_that_is_refused_is_planned_again() -> None:
    class Picky(Written):
        def ask(self, questions: Sequence[tuple[int, str]]) -> list[str]:
            self.asked += questions
            return ['{"consistent": false}' if "Plan: a" in text else '{"consistent": true}' for _, text in questions]

    steps = [[plan("a"), plan("a"), plan("b")], [plan("a"), plan("a"), plan("a")], [plan("b")], [NO_PLAN]]
    answered = run("consistency_check", Picky(steps, {"a": [at(1, 1)], "b": [at(2, 2)]}))
    assert [one.text for one in answered] == ["b", "a", "b", "?"]
    assert [one.point for one in answered] == [at(2, 2), at(1, 1), at(2, 2), None]


def test_what_a_judge_answers_follows_its_reasoning() -> None:
    thought = '<think>Is it {"index": 1, "consistent": false}? No.</think>'
    assert judged(f'{thought}{{"index": 2}}', 2) == 2 - 1
    assert judged('Of {1, 2} the second: {"index": 2}', 2) == 1
    assert not refuses(f'{thought}{{"consistent": true}}')
    assert refuses('{plan} says another thing.\n{"why": "the\nbutton", "consistent": false}')
    assert judged('<think>{"index": 1}', 2) is None
