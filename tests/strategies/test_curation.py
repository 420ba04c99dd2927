"""Data strategies on numbers worked out by hand; measures are given."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.geometry import Box, Point, Size, Space
from coepg_dagster.plugins import find
from coepg_dagster.strategies import curation, inference
from coepg_dagster.strategies.curation import Choice, Nothing, Prompts, Rows, attention_map, curate, over_box


class Given:
    """Measures written down, by name."""

    def __init__(self, **values: Sequence[Any]) -> None:
        self._values = values

    def _of(self, name: str, places: Sequence[int]) -> list[Any]:
        return [self._values[name][place] for place in places]

    def pass_rates(self, places: Sequence[int], samples: int) -> list[float]:
        return self._of("pass_rates", places)

    def perplexities(self, places: Sequence[int]) -> list[float]:
        return self._of("perplexities", places)

    def boxes(self, places: Sequence[int], by: str) -> list[Any]:
        return self._of(by, places)

    def attention(self, places: Sequence[int], layers: int) -> list[Any]:
        return self._of("attention", places)


def a_step(i: int, **change: Any) -> dict[str, Any]:
    about = {"step_id": f"s{i}", "step_index": 0, "action_type": "CLICK", "value": "", "width": 100, "height": 100}
    return about | change


def prompts(rates: Sequence[float], **steps: Sequence[Any]) -> Prompts:
    about = [a_step(i, **{name: values[i] for name, values in steps.items()}) for i in range(len(rates))]
    return Prompts(about, range(len(rates)), Given(pass_rates=rates))


def rows(
    *plans: str,
    boxes: Sequence[Any] | None = None,
    hits: Sequence[int] = (),
    value: str = "",
    **measures: Sequence[Any],
) -> Rows:
    about = [
        {
            "row_id": f"r{i}",
            "plan": plan,
            "value": value,
            "box": boxes[i] if boxes else [10.0, 10.0, 20.0, 20.0],
            "hits": hits[i] if hits else 2,
            "answered": 2,
        }
        for i, plan in enumerate(plans)
    ]
    return Rows([a_step(i) for i in range(len(plans))], range(len(plans)), Given(**measures), about)


def apply(name: str, items: Any, **settings: Any) -> Choice:
    chosen: Choice = find("data", name).function(items, **settings)
    return chosen


def test_examples() -> None:
    for module in (curation, inference):
        assert doctest.testmod(module).failed == 0


def test_pass_rates_are_bounded_on_both_sides_borders_included() -> None:
    assert apply("pass_rate", prompts([0, 0.3, 0.5, 1]), at_least=0.3, at_most=0.9).left_out == {
        0: "too_hard",
        3: "too_easy",
    }
    assert apply("pass_rate", rows("a", "b", hits=[1, 2]), at_least=0.6).left_out == {0: "too_hard"}
    with pytest.raises(ValueError, match="nothing would stay"):
        apply("pass_rate", prompts([0.5]), at_least=0.6, at_most=0.4)


def test_all_right_and_all_wrong_prompts_are_left_out() -> None:
    chosen = apply("mixed_results", prompts([0, 1 / 8, 1]))
    assert chosen.left_out == {0: "all_wrong", 2: "all_right"} and chosen.figures["pass_rate"] == pytest.approx(3 / 8)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("click the button", "generic_plan"),
        ("Click here.", "generic_plan"),
        ("tap on this icon!", "generic_plan"),
        ("press submit_btn", "raw_name"),
        ("click loginButton", "raw_name"),
        ("click <div id=3>", "raw_name"),
        ("click //div/a", "raw_name"),
        ("click the OK button", None),
        ("type red into the Name field", None),
        ("open the link to GitHub", None),
        ("click a > b", None),
        ("tap on the iPhone icon", None),
        ("type red_one into the Name field", None),
    ],
)
def test_seed_rules_on_plans(plan: str, why: str | None) -> None:
    """The value that is typed may look like anything."""
    assert apply("seed_rules", rows(plan, value="red_one")).left_out.get(0) == why


def test_seed_rules_on_boxes() -> None:
    boxes = [[0, 0, 100, 26], [5, 5, 5.5, 9], [0, 0, 100, 25], None]
    assert apply("seed_rules", rows(*["press OK"] * 4, boxes=boxes)).left_out == {0: "large_box", 1: "small_box"}


def test_a_label_is_kept_if_its_point_is_in_the_predicted_box() -> None:
    places = [
        Box(15, 15, 30, 30, Space.ORIGINAL),  # the centre (15, 15) is on its border
        Box(16, 16, 30, 30, Space.ORIGINAL),
        Point(20, 20, Space.ORIGINAL),  # 12 px around it
        Point(22, 20, Space.ORIGINAL),
        None,
        None,
    ]
    items = rows(*"abcdef", boxes=[[10, 10, 20, 20]] * 5 + [None], judge=places)
    assert apply("label_check", items, by="judge", side=12).left_out == {
        1: "outside_the_box",
        3: "outside_the_box",
        4: "no_box",
    }


def test_an_attention_map_by_hand() -> None:
    """Two layers, one generated token, five keys: the sink and four visual tokens."""
    attention = [[[0.6, 0.1, 0.1, 0.2, 0.0]], [[0.0, 0.25, 0.25, 0.25, 0.25]]]
    # without the sink: (.25 .25 .5 0) and (.25 .25 .25 .25); their mean is (.25 .25 .375 .125)
    looks = attention_map(attention, [1, 2, 3, 4], (2, 2))
    assert looks == pytest.approx(np.array([[2 / 3, 2 / 3], [1, 1 / 3]]))
    with pytest.raises(ValueError, match="do not make a map"):
        attention_map(attention, [1, 2, 3], (2, 2))
    with pytest.raises(ValueError, match="no attention to the image"), np.errstate(invalid="ignore"):
        attention_map([[[0, 0, 0, 0, 1.0]]], [1, 2], (1, 2))


def test_values_over_a_box_are_those_of_its_pixels() -> None:
    looks = np.array([[1.0, 0.0], [0.5, 0.25]])
    whole, screen = Box(0, 0, 100, 100, Space.ORIGINAL), Size(100, 100)
    assert over_box(looks, whole, screen) == (1.0, pytest.approx(looks.mean()))
    assert over_box(looks, Box(25, 0, 75, 50, Space.ORIGINAL), screen) == (1.0, 0.5)
    assert over_box(looks, Box(60, 60, 60, 60, Space.ORIGINAL), screen) == (0.25, 0.25)
    assert over_box(looks, Box(100, 0, 100, 0, Space.ORIGINAL), screen) == (0.0, 0.0)


@given(st.integers(1, 6), st.integers(1, 6), st.tuples(*[st.integers(0, 59)] * 4))
def test_values_over_a_box_are_those_of_a_nearest_upsampled_map(rows: int, columns: int, corners: Any) -> None:
    x1, x2 = sorted(corners[:2])
    y1, y2 = sorted(corners[2:])
    looks = np.random.default_rng(rows * 7 + columns).random((rows, columns))
    pixels = looks[np.arange(60) * rows // 60][:, np.arange(60) * columns // 60]
    inside = pixels[y1 : y2 + 1, x1 : x2 + 1]
    box = Box(x1, y1, x2 + 1, y2 + 1, Space.ORIGINAL)
    assert over_box(looks, box, Size(60, 60)) == (inside.max(), pytest.approx(inside.mean()))


def test_rows_that_look_at_their_target_stay() -> None:
    there, elsewhere, weak = np.array([[1.0, 0.1]]), np.array([[0.1, 1.0]]), np.array([[0.2, 0.1]])
    box = [0, 0, 50, 100]
    items = rows(*"abcde", boxes=[box] * 4 + [None], attention=[there, elsewhere, weak, None, elsewhere])
    expected = {1: "looks_elsewhere", 2: "looks_elsewhere", 3: "no_answer"}
    assert apply("attention_filter", items).left_out == expected


def test_the_frontier_is_drawn_from_the_profile() -> None:
    """Bins: clicks, all right, p = (16 + 1) / (16 + 2); types, half right, p = 9 / 18."""
    kinds = ["CLICK", "CLICK", "TYPE", "TYPE"]
    items = prompts([1, 1, 0.5, 0.5], action_type=kinds, value=["", "", "x", "x"])
    chosen = apply("frontier", items, uniform=0.0, width=0.01)
    assert chosen.left_out == {0: "not_drawn", 1: "not_drawn"}
    assert chosen.figures["profile"] == {
        "0 CLICK": {"prompts": 2, "p": pytest.approx(17 / 18)},
        "0 TYPE value": {"prompts": 2, "p": 0.5},
    }
    assert len(apply("frontier", items, share=0.75).left_out) == 1


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.125, 0.5, 1.0]), st.integers(0, 3)), min_size=1, max_size=16),
    st.floats(0, 1),
    st.floats(0.001, 0.5),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.floats(0.05, 1),
    st.randoms(use_true_random=False),
)
def test_the_frontier_has_weights_at_any_width(
    given_: list[tuple[float, int]], target: float, width: float, uniform: float, share: float, random: Any
) -> None:
    """The order of the file decides nothing, and a narrow width takes the nearest bins first."""
    settings = {"target": target, "width": width, "uniform": uniform, "share": share}
    shuffled = random.sample(range(len(given_)), len(given_))

    def drawn(order: Sequence[int]) -> set[int]:
        rates, at = zip(*(given_[i] for i in order), strict=True)
        items = prompts(rates, step_index=at, step_id=[f"s{i}" for i in order])
        with np.errstate(invalid="raise"):
            left = apply("frontier", items, **settings).left_out
        return {order[i] for i in range(len(order)) if i not in left}

    chosen = drawn(range(len(given_)))
    assert chosen == drawn(shuffled) and len(chosen) == max(1, round(share * len(given_)))


def test_a_narrow_frontier_takes_the_nearest_bins_first() -> None:
    """Its weights are below the smallest float: exp(−0.3² / (2 · 0.01²)) and less."""
    items = prompts([0.0] * 6 + [0.5] * 6, action_type=["CLICK"] * 6 + ["TYPE"] * 6)
    chosen = apply("frontier", items, target=0.9, width=0.01, uniform=0.0, share=0.5)
    assert set(chosen.left_out) == set(range(6))


def test_draws_follow_the_weights() -> None:
    """With all weights equal each prompt is as likely; a bin of four times the weight is drawn more often."""
    drawn = np.zeros(2)
    for trial in range(400):
        kinds = {"action_type": ["CLICK", "TYPE"], "step_id": [f"a{trial}", f"b{trial}"]}
        left = apply("frontier", prompts([0.5, 0.5], **kinds)).left_out
        drawn[next(iter(set(range(2)) - set(left)))] += 1
    assert 150 < drawn[0] < 250


def test_training_goes_from_easy_to_hard() -> None:
    items = prompts([0.5, 1, 0, 0.5], step_index=[1, 0, 0, 0])
    curated = curate(items, {"curriculum": {}})
    assert (curated.kept, curated.ordered, curated.weights) == ([1, 3, 0, 2], True, None)


def test_unlikely_answers_weigh_more() -> None:
    """ppl / mean ppl = 0.1, 0.9, 3 → clipped 0.5, 0.9, 2 → divided by their mean 17/15."""
    weights = apply("perplexity_weighted", rows(*"abcd", perplexities=[1, 9, 30, 0.0])).weights
    assert weights is not None and np.mean(weights) == pytest.approx(1)
    three = apply("perplexity_weighted", rows(*"abc", perplexities=[1, 9, 20])).weights
    assert three == pytest.approx(np.array([0.5, 0.9, 2.0]) / (3.4 / 3))


def test_strategies_work_on_what_those_before_have_kept() -> None:
    items = rows("click here", "press OK", "press No", hits=[2, 1, 2], perplexities=[9.0, 1.0, 1.0])
    curated = curate(items, {"seed_rules": {}, "curriculum": {}, "perplexity_weighted": {}})
    assert curated.kept == [2, 1] and curated.weights == [1, 1]
    assert curated.left_out == {0: ("seed_rules", "generic_plan")}
    assert curated.figures["seed_rules"] == {"of": 3, "left_out": 1, "generic_plan": 1}
    assert curated.figures["curriculum"]["of"] == 2
    with pytest.raises(Nothing, match=r"pass_rate leaves none of 2 items .*'too_hard': 2.*: change its settings"):
        curate(prompts([0, 0]), {"pass_rate": {"at_least": 0.5}})


@given(st.lists(st.sampled_from([0, 0.25, 0.5, 1]), min_size=1, max_size=8), st.data())
def test_whatever_is_left_out_is_counted(rates: list[float], data: st.DataObject) -> None:
    names = data.draw(st.permutations(["mixed_results", "frontier", "curriculum"]))
    try:
        curated = curate(prompts(rates), {name: {} for name in names})
    except Nothing:
        return
    assert sorted([*curated.kept, *curated.left_out]) == list(range(len(rates)))
    assert sum(one["left_out"] for one in curated.figures.values()) == len(curated.left_out)


def test_pairs_lie_k_steps_apart_in_one_episode() -> None:
    """Positions are those before any strategy, whatever an earlier one has left out."""
    places = {"episode_id": list("aabba"), "step_index": [1, 0, 0, 2, 2]}
    items = prompts([0.5, 0.5, 0.5, 0.5, 1.0], **places)
    assert curate(items, {"transition_pairs": {"k": 1, "most": 9}}).pairs == [(0, 4), (1, 0)]
    assert curate(items, {"transition_pairs": {"k": 2, "most": 9}}).pairs == [(1, 4), (2, 3)]
    assert len(curate(items, {"transition_pairs": {"k": 2, "most": 1}}).pairs) == 1
    after = curate(items, {"pass_rate": {"at_most": 0.9}, "curriculum": {}, "transition_pairs": {"k": 1, "most": 9}})
    assert after.pairs == [(1, 0)] and after.figures["transition_pairs"]["pairs"] == 1
    with pytest.raises(Nothing, match="no episode has two that lie 3 steps apart"):
        curate(items, {"transition_pairs": {"k": 3, "most": 9}})
