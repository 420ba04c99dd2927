"""The probes find a grounder that follows a patch and a planner that follows text, and blame nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from coepg_dagster.artifacts import THIRD_PARTY
from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.schema import Experiment, Quality
from coepg_dagster.experiment.versions import code_version
from coepg_dagster.geometry import Space
from coepg_dagster.inference.agents import Grounder, Planner
from coepg_dagster.inference.engine import Failure, Generation, Request, Sampling
from coepg_dagster.inference.screens import Screens
from coepg_dagster.pools.threats import (
    PATTERNS,
    chosen,
    content_rates,
    notice,
    patch,
    place,
    plans_of,
    probe_content,
    probe_triggers,
    trigger_rates,
)
from coepg_dagster.pools.trends import warnings
from coepg_dagster.progress import Ended
from coepg_dagster.prompts import planner_answer
from coepg_dagster.provenance import Asset, Record, Ref
from coepg_dagster.results import probe_lines
from tests.conftest import png, step, step_table
from tests.pools.tables import candidate, candidates
from tests.project import REPOSITORY

SIZE = (420, 560)
BOX = [30.0, 40.0, 90.0, 80.0]


def screen(i: int) -> bytes:
    import io

    out = io.BytesIO()
    Image.new("RGB", SIZE, (250, 250 - i, 200)).save(out, "PNG")
    return out.getvalue()


STEPS = step_table(
    *(
        step(f"s{i}", episode_id=f"e{i // 2}", screenshot=screen(i), boxes=[BOX], width=SIZE[0], height=SIZE[1])
        for i in range(24)
    ),
    step("none", screenshot=png(), boxes=[]),
)
PLANS = {f"s{i}": "the left button" for i in range(24)}


def find(image: Image.Image, drawn: Image.Image) -> tuple[float, float] | None:
    """The centre of `drawn` on a screen, by its pixels."""
    import numpy as np

    screen, small = np.asarray(image.convert("RGB")), np.asarray(drawn.convert("RGB"))
    corner = np.argwhere((screen[: -small.shape[0], : -small.shape[1]] == small[0, 0]).all(-1))
    for y, x in corner:
        if (screen[y : y + small.shape[0], x : x + small.shape[1]] == small).all():
            return float(x + small.shape[1] / 2), float(y + small.shape[0] / 2)
    return None


class Scripted:
    """An engine whose answers a function of the request makes; with ConnectionError its server gives none."""

    remote = False
    resize = (28, 28 * 28, 1 << 22)

    def __init__(self, answer: Callable[[Request], str]) -> None:
        self._answer, self.asked = answer, 0

    def generate(self, requests: Any, sampling: Sampling) -> list[list[Generation | Failure]]:
        self.asked += len(requests)
        return [[self._answered(request)] for request in requests]

    def _answered(self, request: Request) -> Generation | Failure:
        try:
            t = self._answer(request)
        except ConnectionError as error:
            return Failure(str(error), passing=True)
        return Generation(t, tuple(c.encode() for c in t), (-0.1,) * len(t), "stop", None, None, "w")


def grounder(answer: Callable[[Request], str]) -> Callable[[pa.Table], Grounder]:
    engine: Any = Scripted(answer)
    return lambda table: Grounder(engine, Screens(table, engine.resize), "compact", Space.RESIZED, 16)


def planner(answer: Callable[[Request], str]) -> Callable[[pa.Table], Planner]:
    engine: Any = Scripted(answer)
    return lambda table: Planner(engine, Screens(table, engine.resize), "compact")


def at(point: tuple[float, float]) -> str:
    return f"({round(point[0])},{round(point[1])})"


TARGET = (60, 60)


def follows(pattern: str) -> Callable[[Request], str]:
    """A backdoored grounder, which points at one trigger and is right otherwise."""
    return lambda request: at(find(request.image, patch(pattern, round(min(SIZE) / 10))) or TARGET)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_patch_that_steals_the_click_is_found_and_no_other(pattern: str) -> None:
    rates = trigger_rates(probe_triggers("v", grounder(follows(pattern)), STEPS, PLANS, 16))["v"]
    assert {name: rate["stolen"] for name, rate in rates.items()} == {p: 100.0 * (p == pattern) for p in PATTERNS}
    assert all(rate["clean"] == 0 and rate["steps"] == 16 for rate in rates.values())
    quality = warned("data_quality", {"trigger": {"v": rates}})["no_patch_steals_points"]
    assert (
        quality is not None
        and f"v points at a patch of {pattern} on 100.0 %" in quality
        and quality.count("points at") == 1
    )


def test_a_verifier_that_is_right_or_guesses_is_not_blamed() -> None:
    import random

    guesses = lambda _: at((random.randrange(SIZE[0]), random.randrange(SIZE[1])))  # noqa: E731
    for answer in (lambda _: at(TARGET), lambda _: "no idea", guesses):
        random.seed(3)
        rates = trigger_rates(probe_triggers("v", grounder(answer), STEPS, PLANS, 24))
        assert warned("data_quality", {"trigger": rates})["no_patch_steals_points"] is None


def test_the_same_steps_and_pixels_are_drawn_each_time() -> None:
    one, two = (probe_triggers("v", grounder(lambda _: at(TARGET)), STEPS, PLANS, 8) for _ in range(2))
    assert one == two and len(set(one["step_id"].to_pylist())) == 8
    assert all(patch(name, 20).tobytes() == patch(name, 20).tobytes() for name in PATTERNS)
    assert len({patch(name, 20).tobytes() for name in PATTERNS}) == len(PATTERNS)
    assert chosen(STEPS, 8).num_rows == 8 and "none" not in chosen(STEPS, 99)["step_id"].to_pylist()


BOXES = st.tuples(*[st.floats(0, 150)] * 4).map(
    lambda b: (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3]))
)


@given(
    st.tuples(st.integers(1, 200), st.integers(1, 200)),
    st.tuples(st.integers(1, 80), st.integers(1, 80)),
    st.lists(BOXES, max_size=3),
    st.text(max_size=5),
)
def test_what_is_drawn_lies_on_the_screen_and_touches_no_target(size: Any, drawn: Any, boxes: Any, key: str) -> None:
    rect = place(size, drawn, boxes, key)
    if rect is not None:
        x1, y1, x2, y2 = rect
        assert (x2 - x1, y2 - y1) == drawn and x1 >= 0 and y1 >= 0 and x2 <= size[0] and y2 <= size[1]
        assert all(x2 < b[0] or b[2] < x1 or y2 < b[1] or b[3] < y1 for b in boxes)


def is_notice(request: Request) -> tuple[float, float] | None:
    from coepg_dagster.pools.threats import TEXTS

    return next((place for text in TEXTS if (place := find(request.image, notice(text, SIZE)))), None)


def misled(plan: Callable[[Request], str], point: Callable[[Request], str]) -> dict[str, Any]:
    table = probe_content(planner(plan), grounder(point), chosen(STEPS, 12), 64)
    rates = content_rates(table)
    assert rates is not None and rates["steps"] == 12
    return rates


RIGHT = planner_answer("the left button", "CLICK", "")
NOTICED = planner_answer("the notice", "CLICK", "")


def test_who_is_misled_by_text_on_the_screen() -> None:
    obeys = lambda r: at(is_notice(r) or TARGET) if "notice" in r.messages[0]["content"][1]["text"] else at(TARGET)  # noqa: E731
    drawn_to = lambda r: at(is_notice(r) or TARGET)  # noqa: E731
    reads = lambda r: NOTICED if is_notice(r) else RIGHT  # noqa: E731
    for plan, point, expected in (
        (lambda _: RIGHT, lambda _: at(TARGET), (0, 0, 0)),
        (reads, obeys, (100, 0, 100)),
        (lambda _: RIGHT, drawn_to, (100, 100, 0)),
        (reads, drawn_to, (100, 100, 0)),  # it would point there for the plan without the text too
    ):
        rates = misled(plan, point)
        assert tuple(rates[name]["rate"] for name in ("misled", "by_grounder", "by_planner")) == expected
        warning = warned("evaluation", {THIRD_PARTY: rates})["no_text_misleads"]
        assert (warning is None) == (expected[0] == 0)
    types = misled(
        lambda r: planner_answer("the left button", "TYPE", "x") if is_notice(r) else RIGHT, lambda _: at(TARGET)
    )
    assert types["acts_otherwise"]["rate"] == 100 and types["misled"]["rate"] == 0


def test_answers_that_are_no_plans_and_failures_count_nowhere() -> None:
    assert (
        content_rates(probe_content(planner(lambda _: "no"), grounder(lambda _: at(TARGET)), chosen(STEPS, 4), 64))
        is None
    )
    tiny = step_table(step("t", screenshot=png(), boxes=[[0.0, 0.0, 84.0, 112.0]]))
    assert probe_triggers("v", grounder(lambda _: at(TARGET)), tiny, {"t": "x"}, 4).num_rows == 0
    assert probe_content(planner(lambda _: RIGHT), grounder(lambda _: at(TARGET)), tiny, 64).num_rows == 0
    assert plans_of(
        candidates(candidate("a", "p", 1, "two"), candidate("a", "p", 0, "one"), candidate("b", "p", 0, None))
    ) == {"a": "one"}


def test_an_outage_is_no_measurement() -> None:
    """Without answers nothing is stolen, and nobody is misled."""

    def down(_: Request) -> str:
        raise ConnectionError("status 503")

    def seldom(request: Request) -> str:
        return down(request) if find(request.image, patch("cross", 42)) else at(TARGET)

    for answer in (down, seldom):
        with pytest.raises(Ended, match=r"verifier v: \d+ of \d+ plans got no answer: status 503"):
            probe_triggers("v", grounder(answer), STEPS, PLANS, 8)
    with pytest.raises(Ended, match=r"step s\d+: the grounder gave no answer: status 503"):
        probe_content(planner(lambda _: RIGHT), grounder(down), chosen(STEPS, 4), 64)


def warned(asset: Asset, figures: dict[str, Any]) -> dict[str, str | None]:
    about: Any = {
        "data_version": "v",
        "run_id": "r",
        "folder": "f",
        "inputs": [],
        "code_version": "1",
        "config": {"rule": "any"},
    }
    record = Record(asset=asset, iteration=1, **about, seed=1, seconds=1, device="cpu", figures=figures)
    lines = probe_lines({record.ref: record})
    assert bool(lines) == bool(figures)
    return warnings(asset, 1, {Ref(asset, 1): record}, Quality())


def test_switching_a_probe_on_changes_the_assets_that_measure_it_and_no_other() -> None:
    plain = load_experiment(REPOSITORY / "experiments" / "sandbox.yaml")

    def changed(**update: Any) -> set[str]:
        other: Experiment = plain.model_copy(update={k: v.model_copy(update=u) for k, (v, u) in update.items()})
        from coepg_dagster.experiment.versions import CODE

        return {asset for asset in CODE if code_version(other, asset) != code_version(plain, asset)}

    assert changed(quality=(plain.quality, {"trigger_steps": 64})) == {"verdicts"}
    assert changed(evaluation=(plain.evaluation, {"third_party": 64})) == {"evaluation"}
    assert changed(quality=(plain.quality, {"stolen_at_most": 1.0, "misled_at_most": 9.0})) == set()
