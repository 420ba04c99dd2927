"""The block protocol: a planner goes down a page block by block, and only the block that it stops at counts."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from coepg_dagster import running
from coepg_dagster.artifacts import PAIRS, PREDICTIONS, write_steps
from coepg_dagster.evaluation.score import score_steps
from coepg_dagster.experiment.models import Models
from coepg_dagster.inference.engine import Request, Sampling
from coepg_dagster.inference.predict import predict
from coepg_dagster.inference.scrolling import SCROLLED_SCHEMA, is_scrolled, predict_scrolling
from coepg_dagster.jobs import EvaluationJob
from coepg_dagster.prompts import PlannerAnswer, planner_answer, planner_messages, scrolls_down
from coepg_dagster.readers.views import blocks
from coepg_dagster.steps import STEP_SCHEMA
from tests.conftest import step
from tests.inference.scripted import Scripted, generation
from tests.jobs import quiet

PAGE = 400, 2700
"""Four blocks: from 0, 800, 1600 and 2400 px on, the last of 300 px."""


class Reader:
    """A planner that scrolls until the colour of its screen is in `stops`, and remembers the prompts and sizes it saw."""

    remote = False
    resize = Scripted.resize

    def __init__(self, stops: Sequence[int], answer: str = planner_answer("the link", "CLICK", "")) -> None:
        self.seen: list[tuple[int, tuple[int, int], str]] = []
        self._stops, self._answer = stops, answer

    def generate(self, requests: Sequence[Request], sampling: Sampling, report: Any = None) -> Any:
        said = []
        for request in requests:
            shade = request.image.getpixel((request.image.width // 2, request.image.height // 2))[0]
            self.seen.append((shade, request.image.size, request.messages[0]["content"][1]["text"]))
            scroll = planner_answer("it is further down", "SCROLL", "down")
            said.append([generation(self._answer if shade in self._stops else scroll)])
        return said


def page(*boxes: tuple[float, float, float, float], size: tuple[int, int] = PAGE) -> dict[str, Any]:
    """A step on a page whose middle of block i has the shade 10 i + 10 (equal in what blocks share: that of the upper)."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    for i, (_, top, _, bottom) in reversed(list(enumerate(blocks(*size)))):
        pixels[top:bottom] = 10 * i + 10
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    made = step(
        "p",
        goal="Open it",
        screenshot=out.getvalue(),
        boxes=[list(box) for box in boxes],
        action_type="CLICK",
        value="",
    )
    return made | {"width": size[0], "height": size[1], "view_rule": "scroll"}


def table(*rows: dict[str, Any]) -> pa.Table:
    schema = pa.schema([*STEP_SCHEMA, pa.field("view_rule", pa.string())])
    return pa.Table.from_pylist(
        [row | {"step_id": f"p{i}", "episode_id": f"e{i}"} for i, row in enumerate(rows)], schema
    )


WEB = Models(
    base_planner="p", base_grounder="g", planners={"o": "p"}, verifiers={"o": "g"}, prompts="web", dtype="float32"
)


def scrolled(planner: Reader, steps: pa.Table, point: str = "(20,30)") -> list[dict[str, Any]]:
    grounder = Scripted(lambda _: generation(point))
    [[made]] = predict_scrolling(planner, [grounder], steps, WEB, Sampling(48), 12)
    assert made.schema == SCROLLED_SCHEMA
    rows: list[dict[str, Any]] = made.to_pylist()
    return rows


def test_a_target_further_down_is_found_by_scrolling_and_scored_on_its_block() -> None:
    """The second block holds the target at (10, 1820) .. (40, 1840) of the page, (10, 220) of the third block."""
    steps = table(page((10, 1820, 40, 1840)))
    planner = Reader([30])
    [row] = scrolled(planner, steps, "(20,230)")
    assert [shade for shade, _, _ in planner.seen] == [10, 20, 30]
    assert all("SCROLL: go on to the next part of the page" in text for *_, text in planner.seen)
    scale = planner.seen[0][1][1] / 1000  # of the planner's own resize
    assert row["block"] == 2 and row["y"] == pytest.approx(1600 + 230 / scale, abs=2) and row["action_type"] == "CLICK"
    hit = pa.Table.from_pylist([row | {"x": 20.0, "y": 1830.0}], SCROLLED_SCHEMA)
    result = score_steps("mind2web/uground", steps, hit)
    assert [result.metrics[name].micro for name in ("ele_acc", "op_f1", "step_sr")] == [100, 100, 100]
    assert "stopped at block 2.00" in str(result.notes["view"])
    other = pa.Table.from_pylist([row | {"x": 20.0, "y": 1830.0, "block": 1}], SCROLLED_SCHEMA)
    assert score_steps("mind2web/uground", steps, other).metrics["ele_acc"].micro == 0, "block 1 ends at 1800"


def test_it_stops_at_the_last_block_with_a_target_and_a_plan_that_scrolls_is_not_grounded() -> None:
    steps = table(
        page((10, 900, 40, 940)), page(), page((10, 20, 40, 60), (10, 2500, 40, 2600)), page((10, 700, 40, 1900))
    )
    planner = Reader([])
    rows = scrolled(planner, steps)
    assert [row["block"] for row in rows] == [1, 0, 3, 0], (
        "without a target that a block holds there is the first one only"
    )
    assert all((row["x"], row["action_type"]) == (None, "SCROLL") for row in rows)
    result = score_steps("mind2web/uground", steps, pa.Table.from_pylist(rows, SCROLLED_SCHEMA))
    assert result.metrics["op_f1"].micro == 0 and result.metrics["ele_acc"].micro == 0


def test_other_steps_are_predicted_as_ever() -> None:
    whole = page((10, 20, 40, 60), size=(84, 84)) | {"view_rule": "block 0"}
    steps = table(whole, page((10, 20, 40, 60)))
    planner = Reader([10])
    rows = scrolled(planner, steps)
    assert [row["block"] for row in rows] == [None, 0] and "SCROLL" not in planner.seen[0][2]
    assert (
        is_scrolled(steps) and not is_scrolled(steps.slice(0, 1)) and not is_scrolled(steps.drop_columns(["view_rule"]))
    )
    grounder = Scripted(lambda _: generation("(20,30)"))
    alone = predict(Reader([10]), grounder, steps.slice(0, 1), WEB, 48, 12).to_pylist()
    assert alone == [{name: value for name, value in rows[0].items() if name != "block"}]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3500), st.lists(st.tuples(st.integers(0, 3400), st.integers(1, 300)), max_size=3), st.integers(0, 5)
)
def test_a_point_is_right_only_on_a_block_that_holds_the_whole_target(
    height: int, spans: list[tuple[int, int]], stop: int
) -> None:
    """Against the rule written out: the planner stops at `stop`, or where the protocol ends the page."""
    boxes = [(5.0, float(top), 30.0, float(min(top + tall, height))) for top, tall in spans if top < height]
    row = page(*boxes, size=(64, height))
    tiles = blocks(64, height)
    inside = [[b for b in boxes if top <= b[1] and b[3] <= bottom] for _, top, _, bottom in tiles]
    last = max((i for i, of_tile in enumerate(inside) if of_tile), default=0)
    rows = scrolled(Reader([10 * stop + 10]), table(row))
    seen = rows[0]["block"]
    assert seen <= last and (seen == last or rows[0]["action_type"] == "CLICK")
    for box in boxes:
        aimed = rows[0] | {"x": 15.0, "y": (box[1] + box[3]) / 2, "action_type": "CLICK"}
        made = score_steps("mind2web/uground", table(row), pa.Table.from_pylist([aimed], SCROLLED_SCHEMA))
        right = any(b[1] <= aimed["y"] <= b[3] for b in inside[seen])
        assert made.metrics["ele_acc"].micro == 100 * right


@pytest.mark.parametrize(
    ("action", "value", "down"),
    [("SCROLL", "", True), ("SCROLL", "down", True), ("SCROLL DOWN", "", True), ("SCROLL UP", "", False),
     ("SCROLL", "up", False), ("CLICK", "down", False), ("SCROLLBAR", "", False)],
)  # fmt: skip
def test_what_scrolls_down(action: str, value: str, down: bool) -> None:
    assert scrolls_down(PlannerAnswer("x", action, value)) is down and not scrolls_down(None)


def test_only_a_page_that_is_scrolled_names_the_action() -> None:
    assert "SCROLL" not in str(planner_messages("g", [], "web"))
    assert planner_messages("g", [], "compact", scroll=True) == planner_messages("g", [], "compact")


def test_an_evaluation_scrolls_the_pages_of_its_test_split(
    trained: Callable[[str, int], Path], models: Models, steps: pa.Table, tmp_path: Path
) -> None:
    """Its files say on which block each prediction was made; the validation split is predicted as ever."""
    ready = [row | {"split": "validation", "view_rule": "block 0"} for row in steps.to_pylist()[:2]]
    pages = [page((10, 1820, 40, 1840)) | {"step_id": f"p{i}", "split": "test_task"} for i in range(2)]
    schema = pa.schema([*STEP_SCHEMA, pa.field("view_rule", pa.string())])
    write_steps(pa.Table.from_pylist([*ready, *pages], schema), tmp_path / "steps.arrow", ["validation", "test_task"])
    places = {"out": tmp_path / "out", "scratch": tmp_path / "scratch", "steps": tmp_path / "steps.arrow"}
    for name in ("out", "scratch"):
        places[name].mkdir()
    agent = {
        "planner": str(trained("planner", 0)),
        "grounder": str(trained("grounder", 0)),
        "base_planner": str(trained("planner", 0)),
    }
    asked = {"splits": ["validation", "test_task"], "max_steps": None, "protocol": "mind2web/uground", "processes": 1}
    common = {
        "device": "cpu",
        "batch_size": 4,
        "seed": 0,
        "max_plan_tokens": 24,
        "max_point_tokens": 8,
        "models": models,
    }
    scores = running.run(EvaluationJob.model_validate(places | agent | asked | common), quiet)
    rows = pq.read_table(tmp_path / "out" / PREDICTIONS).to_pylist()
    assert [row["block"] is None for row in rows] == [True, True, False, False]
    assert "stopped at block" in scores["test_task"]["notes"]["view"] and "view" not in scores["validation"]["notes"]
    assert scores[PAIRS]["base_planner"]["validation"]["metrics"] == scores["validation"]["metrics"]
