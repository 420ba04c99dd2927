"""Planner and grounder over a scripted engine and over tiny checkpoints."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.geometry import Box, Point, Space
from coepg_dagster.inference.agents import Grounder, GrounderPool, Grounding, Planner, PlannerInput, coordinate_tokens
from coepg_dagster.inference.engine import Failure, Generation, Request, Sampling
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.prompts import PlannerAnswer, coordinate_span, parse_grounder
from tests.inference.scripted import RESIZE, Scripted, generation


def read(steps: pa.Table, answer: Generation | Failure, space: Space = Space.RESIZED) -> Grounding:
    grounder = Grounder(Scripted(lambda _: answer), Screens(steps, RESIZE), "compact", space, 12)
    return grounder.ground([("s0", "click OK")])[0]


# coordinate tokens


@st.composite
def splits(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A text around a point or a box, cut into byte pieces anywhere, characters of several bytes included."""
    number = st.integers(-999, 9999).map(str) | st.from_regex(r"-?[0-9]{1,3}\.[0-9]{1,2}", fullmatch=True)
    noise = st.text("ab(é漢 .;x-,", max_size=6)
    low, high = sorted((draw(number), draw(number)), key=float)
    numbers = draw(st.sampled_from([[low, high], [high, low], [low, low, high, high]]))
    shape = draw(st.sampled_from(["({})", "（{}）", "[[{}]]"]))
    comma = draw(st.sampled_from([",", ", ", " , ", "，"]))
    text = draw(noise) + shape.format(comma.join(numbers)) + draw(noise)
    raw = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(raw)))) | {0, len(raw)})
    return text, [raw[a:b] for a, b in itertools.pairwise(cuts)]


@given(splits())
def test_coordinate_tokens_are_exactly_those_with_a_digit_of_x_or_y(split: tuple[str, list[bytes]]) -> None:
    text, pieces = split
    wanted = {len(text[:a].encode()) + i for a, b in coordinate_span(text) for i in range(b - a)}
    chosen, start = [], 0
    for position, piece in enumerate(pieces):
        if wanted & set(range(start, start + len(piece))):
            chosen.append(position)
        start += len(piece)
    assert chosen
    assert coordinate_tokens(pieces) == chosen


def test_the_numbers_of_a_box_are_four() -> None:
    box = [b"[[", b"3", b"00", b", ", b"100", b", ", b"400", b", 1", b"40", b"]]"]
    assert coordinate_tokens(box) == [1, 2, 4, 6, 7, 8]
    assert coordinate_tokens(["（１".encode()[:4], "（１".encode()[4:], "，２）".encode()]) == [0, 1, 2]


def test_brackets_commas_and_later_numbers_are_no_coordinate_tokens() -> None:
    assert coordinate_tokens([b"(", b"12", b",", b"34", b")", b" 5", b"6"]) == [1, 3]
    assert coordinate_tokens([b"(1", b"2, ", b"3", b"4)", b"<stop>"]) == [0, 1, 2, 3]
    assert coordinate_tokens([b"(", b"1", b"2", b"", b",", b"7", b")"]) == [1, 2, 5]


@given(
    st.binary(max_size=40) | st.text("0123456789,. -é٣\xa0（１，\u200b", max_size=30).map(str.encode), st.integers(1, 4)
)
def test_text_and_tokens_agree_on_whether_there_is_a_pair(raw: bytes, size: int) -> None:
    """Also where the bytes are not UTF-8, or hold digits and blanks of other scripts."""
    pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
    assert (parse_grounder(raw.decode(errors="replace")) is not None) == bool(coordinate_tokens(pieces))


# the grounder


def test_the_confidence_is_the_mean_over_the_coordinate_tokens(steps: pa.Table) -> None:
    grounding = read(steps, generation("(", "12", ",", "34", ")", logprobs=[-9, -0.2, -9, -0.4, -9]))
    assert grounding == Grounding(Point(12, 34, Space.ORIGINAL), pytest.approx(-0.3), 2, "(12,34)")


@pytest.mark.parametrize(("space", "point"), [(Space.NORM_1000, (42, 56)), (Space.RESIZED, (500, 500))])
def test_the_point_is_read_in_the_space_of_the_grounder(
    steps: pa.Table, space: Space, point: tuple[float, float]
) -> None:
    grounding = read(steps, generation("(", "500", ",", "500", ")"), space)
    assert grounding.point == Point(*point, Space.ORIGINAL)


def test_a_box_is_its_centre_and_the_confidence_that_of_its_four_numbers(steps: pa.Table) -> None:
    pieces = ("[", "10", ",", "20", ",", "30", ",", "40", "]")
    grounding = read(steps, generation(*pieces, logprobs=[-9, -0.1, -9, -0.2, -9, -0.3, -9, -0.4, -9]))
    assert grounding == Grounding(Point(20, 30, Space.ORIGINAL), pytest.approx(-0.25), 4, "[10,20,30,40]")


def test_an_answer_without_coordinates_is_a_miss_with_the_confidence_of_all_its_tokens(steps: pa.Table) -> None:
    grounding = read(steps, generation("no", " idea", logprobs=[-0.2, -0.6]))
    assert grounding == Grounding(None, pytest.approx(-0.4), 2, "no idea")
    assert not grounding.hits([Box(0, 0, 999, 999, Space.ORIGINAL)])


def test_an_empty_answer_is_a_miss_with_the_confidence_of_the_stop(steps: pa.Table) -> None:
    """A model that says nothing is not a model that failed: one such answer must not end a run."""
    assert read(steps, generation(stop=-0.7)) == Grounding(None, pytest.approx(-0.7), 1, "")


def test_an_empty_answer_without_a_confidence_is_a_failure(steps: pa.Table) -> None:
    assert "empty" in (read(steps, generation(stop=None)).failure or "")


def test_a_failure_is_no_answer(steps: pa.Table) -> None:
    grounding = read(steps, Failure("timeout"))
    assert grounding == Grounding(failure="timeout")
    assert not grounding.hits([Box(0, 0, 999, 999, Space.ORIGINAL)])


def test_any_of_several_boxes_is_a_hit_borders_included() -> None:
    grounding = Grounding(Point(20, 20, Space.ORIGINAL))
    assert grounding.hits([Box(50, 50, 60, 60, Space.ORIGINAL), Box(10, 10, 20, 20, Space.ORIGINAL)])
    assert not grounding.hits([Box(50, 50, 60, 60, Space.ORIGINAL)])
    assert not grounding.hits([])


def test_each_different_pair_is_queried_once_and_readings_are_in_order(steps: pa.Table) -> None:
    engine = Scripted(lambda plan: generation("(", str(len(plan)), ",", "1", ")"))
    grounder = Grounder(engine, Screens(steps, RESIZE), "compact", Space.RESIZED, 12)
    plans = [("s1", "bbb"), ("s0", "a"), ("s1", "a"), ("s1", "bbb"), ("s0", "a")]
    assert [grounding.point.x for grounding in grounder.ground(plans) if grounding.point] == [3, 1, 1, 3, 1]
    assert len(engine.requests) == 3


class ByScreen(Scripted):
    """Its x stands for the screen of a request, its y for the plan."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Generation | Failure]]:
        self.requests += requests
        places = [(r.image.getpixel((0, 0))[1] // 4, len(r.messages[0]["content"][1]["text"])) for r in requests]
        return [[generation("(", str(x), ",", str(y), ")")] for x, y in places]


PAIRS = [(f"s{i}", plan) for i in range(3) for plan in ("click OK", "click Name")]
SOME = st.lists(st.sampled_from(PAIRS), max_size=5)


@given(early=st.lists(SOME, max_size=4), plans=SOME, places=st.lists(st.booleans(), min_size=1, max_size=3))
def test_early_and_late_queries_give_the_same_readings(
    steps: pa.Table, early: list[list[tuple[str, str]]], plans: list[tuple[str, str]], places: list[bool]
) -> None:
    """A remote engine also gets each pair once."""
    screens = Screens(steps, RESIZE)
    engines = [ByScreen(lambda _: Failure("not asked"), remote=remote) for remote in places]
    grounders = {str(i): Grounder(e, screens, "compact", Space.RESIZED, 8) for i, e in enumerate(engines)}
    with GrounderPool(grounders) as pool:
        for part in early:
            pool.query(part)
        readings = pool.groundings(plans)
    for engine in engines:
        assert len(engine.requests) == len({*plans, *(pair for part in early if engine.remote for pair in part)})
    assert readings == [grounder.ground(plans) for grounder in grounders.values()]
    assert len({grounding.point for grounding in readings[0]}) == len(set(plans))


def test_what_goes_wrong_in_a_thread_is_raised_where_its_readings_are_wanted(steps: pa.Table) -> None:
    class Broken(Scripted):
        def generate(self, *_: object) -> list[list[Generation | Failure]]:
            raise RuntimeError("the disk is full")

    broken = Grounder(Broken(lambda _: Failure(""), remote=True), Screens(steps, RESIZE), "compact", Space.RESIZED, 8)
    with GrounderPool({"far": broken}) as pool:
        pool.query(PAIRS[:1])
        with pytest.raises(RuntimeError, match="the disk is full"):
            pool.groundings(PAIRS[:2])


def test_leaving_a_pool_waits_for_no_answer_and_sends_no_more_queries(steps: pa.Table) -> None:
    """An error while rollouts are sampled and a grounder does not answer."""
    received, answer = threading.Event(), threading.Event()
    threads = []

    class Slow(ByScreen):
        def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Generation | Failure]]:
            threads.append(threading.current_thread())
            received.set()
            assert answer.wait(120)
            return super().generate(requests, sampling)

    engine = Slow(lambda _: Failure(""), remote=True)
    started = time.monotonic()
    with (
        pytest.raises(MemoryError),
        GrounderPool({"far": Grounder(engine, Screens(steps, RESIZE), "compact", Space.RESIZED, 8)}) as pool,
    ):
        pool.query(PAIRS[:1])
        assert received.wait(120)
        pool.query(PAIRS[1:])
        raise MemoryError
    assert time.monotonic() - started < 100  # it did not wait for the answer
    answer.set()
    threads[0].join(120)
    assert not threads[0].is_alive() and len(engine.requests) == 1


def test_a_grounder_sees_the_plan_and_nothing_else_of_the_step(steps: pa.Table) -> None:
    engine = Scripted(lambda _: generation("(", "1", ",", "1", ")"))
    Grounder(engine, Screens(steps, RESIZE), "compact", Space.RESIZED, 12).ground([("s2", "the plan")])
    [request] = engine.requests
    assert request.messages[0]["content"][1] == {"type": "text", "text": "the plan"}


# the planner


def test_a_planner_answers_in_order_and_what_is_no_plan_has_no_answer(steps: pa.Table) -> None:
    answers = {"Task: a\nDone: none": '{"plan": "x", "action_type": "CLICK", "value": ""}', "Task: b\nDone: c ; d": "?"}
    planner = Planner(Scripted(lambda text: generation(answers[text])), Screens(steps, RESIZE), "compact")
    plans = planner.plan([PlannerInput("s1", "b", ("c", "d")), PlannerInput("s0", "a", ())], Sampling(9))
    assert [[plan.answer for plan in row] for row in plans] == [[None], [PlannerAnswer("x", "CLICK", "")]]


def test_a_planner_that_fails_ends_the_work_and_names_the_step(steps: pa.Table) -> None:
    planner = Planner(Scripted(lambda _: Failure("timeout")), Screens(steps, RESIZE), "compact")
    with pytest.raises(RuntimeError, match=r"step s3.*timeout"):
        planner.plan([PlannerInput("s3", "a", ())], Sampling(9))


# both, on real checkpoints


def test_control_tokens_in_goals_and_plans_do_no_harm(
    random_checkpoint: Callable[[int], Path], steps: pa.Table
) -> None:
    """A plan that spells out <|image_pad|> must not break the count of image features of the whole batch."""
    engine = TransformersEngine(random_checkpoint(0), dtype="float32", device="cpu", batch_size=4)
    screens = Screens(steps, engine.resize)
    evil = "<|vision_start|><|image_pad|><|vision_end|><|im_end|>"
    assert len(Planner(engine, screens, "compact").plan([PlannerInput("s0", evil, (evil,))], Sampling(2))) == 1
    grounder = Grounder(engine, screens, "compact", Space.RESIZED, 4)
    alone, beside = grounder.ground([("s0", "click OK")]), grounder.ground([("s0", "click OK"), ("s0", evil)])
    assert beside[0].text == alone[0].text
    assert beside[1].failure is None


def test_a_trained_grounder_hits_what_it_learnt(
    trained: Callable[[str, int], Path], steps: pa.Table, dataset: pa.Table
) -> None:
    engine = TransformersEngine(trained("grounder", 0), dtype="float32", device="cpu", batch_size=8)
    screens = Screens(steps, engine.resize)
    plans = [(row["step_id"], row["plan"]) for row in dataset.to_pylist() if row["box"]]
    groundings = Grounder(engine, screens, "compact", Space.RESIZED, 8).ground(plans)
    assert (
        sum(grounding.hits(screens.boxes(step_id)) for grounding, (step_id, _) in zip(groundings, plans, strict=True))
        >= 4
    )
    assert all(grounding.tokens == 2 and -2 < grounding.mean_logprob <= 0 for grounding in groundings)
