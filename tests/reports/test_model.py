"""Model pages: the reward breakdown by hand, samples by their rule, and points on the right pixels."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from coepg_dagster.reports.model import (
    ModelOf,
    curves_figure,
    reward_of,
    sample_rollouts,
    sample_verdicts,
    training_notes,
    write_model,
)
from coepg_dagster.steps import ROLLOUT_SCHEMA, STEP_SCHEMA
from tests.chromium import NEEDS_CHROMIUM
from tests.conftest import WIDTH
from tests.pools.tables import verdict, verdicts
from tests.reports.loop import ROWS, site_of, trained
from tests.reports.test_audit import BOX_COLOUR, HIT_COLOUR, near

TABLE = pa.Table.from_pylist(ROWS, ROLLOUT_SCHEMA)


def test_the_reward_breakdown_by_hand() -> None:
    breakdown = reward_of(TABLE)
    assert breakdown.rollouts == 8 and breakdown.reward == pytest.approx(0.5)
    assert breakdown.gates == {"passed": 62.5, "unparsed": 25.0, "wrong_type": 12.5}
    assert (
        breakdown.groups,
        breakdown.without_spread,
        breakdown.all_zero,
        breakdown.all_best,
        breakdown.fractional,
    ) == (4, 50, 25, 25, 0)
    grounder, judge = breakdown.graders
    assert grounder["grounder"] == "grounder_1" and grounder["asked"] == 5 and grounder["hit"] == 80
    assert grounder["adds"] == pytest.approx(0.6 * 4 / 5) and judge["adds"] == pytest.approx(0.4 * 4 / 5)
    passed = [row["reward"] for row in ROWS if row["gate"] == "passed"]
    assert grounder["adds"] + judge["adds"] == pytest.approx(sum(passed) / len(passed))  # Eq. 4


def test_rollouts_that_no_grounder_judged_show_what_their_reward_was_made_of(tmp_path: Path) -> None:
    """Those of a grounder or of an end-to-end agent: no votes, but parts."""
    parts = [{"name": "point", "score": 0.75}, {"name": "format", "score": 0.5}]
    alone = pa.Table.from_pylist([row | {"graders": [], "parts": parts, "reward": 1.0} for row in ROWS], ROLLOUT_SCHEMA)
    breakdown = reward_of(alone)
    assert breakdown.graders == [] and breakdown.parts == {"point": 0.75, "format": 0.5}
    no_steps = pa.Table.from_pylist([], STEP_SCHEMA)  # groups without spread have no samples
    about = ModelOf("exp/s1", "ϕ′₁", "A grounder", [], {}, [])
    page = write_model(tmp_path, "model.html", about, [{"step": 1, "reward": 0.5}], no_steps, alone)
    text = page.read_text("utf-8")
    assert "Parts of the reward" in text and "0.750" in text and "Too few optimizer steps" in text
    assert "Eq. 4, 5" not in text and "no target" not in text and "Nothing was trained" not in text


def test_samples_are_the_best_and_worst_of_groups_that_differ() -> None:
    shown = sample_rollouts(TABLE)
    assert [(row["optimizer_step"], row["group"], row["reward"]) for row in shown] == [
        (0, 0, 1.0),
        (0, 0, 0.6),
        (1, 0, 0.4),
        (1, 0, 0.0),
    ]


def test_sample_verdicts_are_half_hits_and_half_misses_of_one_grounder() -> None:
    table = verdicts(*(verdict(f"s{i}#p#0", name, i % 4 > 0) for i in range(40) for name in ("a", "b")))
    shown = sample_verdicts(table, "b", 8)
    assert {row["verifier"] for row in shown} == {"b"} and [row["hit"] for row in shown] == [True] * 4 + [False] * 4


def test_curves_show_what_was_logged_and_nothing_else() -> None:
    log = [{"step": 1.0, "loss": 2.0}, {"step": 2.0, "loss": 1.0}, {"step": 2.0, "train_runtime": 3.0}]
    drawn = curves_figure(log)
    assert drawn is not None and [axes.get_title() for axes in drawn.axes if axes.get_visible()] == ["loss"]
    assert list(drawn.axes[0].lines[0].get_ydata()) == [2.0, 1.0]
    assert curves_figure([]) is None


def test_the_curve_of_the_validation_reward_begins_before_training() -> None:
    log = [{"step": 0, "validation_reward": 0.5}, {"step": 1, "loss": 0.0}, {"step": 1, "validation_reward": 0.6}]
    drawn = curves_figure(log)
    assert drawn is not None
    assert list(drawn.axes[0].lines[0].get_xdata()) == [0, 1] and list(drawn.axes[0].lines[0].get_ydata()) == [0.5, 0.6]


def test_notes_name_what_training_chose_and_warned_of() -> None:
    assert training_notes({"loss": 1.0}) == []
    figures = {"kept_step": 8, "warnings": ["step 9 of 16: KL runs away"]}
    figures |= {f"validation_reward_{when}": value for when, value in (("first", 0.5), ("best", 0.625), ("last", 0.6))}
    kept, warned = training_notes(figures)
    assert "the weights of step 8" in kept and "(reward 0.625; 0.500 before GRPO, 0.600 at the end)" in kept
    assert warned == "Warned: step 9 of 16: KL runs away"


def test_what_training_changed_is_noted_and_drawn() -> None:
    change = {"before": 58.6, "after": 65.7, "difference": 7.1, "ci95": [3.0, 11.2]}
    probe = {"train": change, "validation": None, "steps": {"train": 128, "validation": 0}, "judge": "grounder_1"}
    [greedy] = training_notes({"probe": probe})
    assert (
        "greedy answers, judged by grounder_1" in greedy and "train 58.6 → 65.7 (+7.1 [+3.0, +11.2]) on 128" in greedy
    )
    assert len(training_notes({"probe": probe | {"sampled": {"train": change, "validation": None}}})) == 2
    drawn = curves_figure([{"step": step, "probe_train_greedy": 50.0 + step} for step in (0, 8, 16)])
    assert drawn is not None and list(drawn.axes[0].lines[0].get_ydata()) == [50, 58, 66]


@pytest.mark.browser
@NEEDS_CHROMIUM
def test_a_rollout_lies_on_its_screenshot(tmp_path: Path, tab: Any) -> None:
    page = site_of(trained(tmp_path), tmp_path / "out").make("planner-1.html")
    tab.goto(f"file://{page}")
    assert tab.get_by_role("img", name="training curves").evaluate("image => image.naturalWidth") > 500
    assert tab.get_by_role("img", name="reliability curve").count() == 1
    screen = tab.locator(".sample .screen").first
    screen.scroll_into_view_if_needed()
    screen.locator("img").evaluate("image => image.decode()")
    area, picture = screen.bounding_box(), Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
    scale = (area["width"] - 2) / WIDTH
    x, y = area["x"] + 1 + 15 * scale, area["y"] + 1 + 15 * scale
    assert near(picture, x + 4, y, HIT_COLOUR) and near(picture, x, y - 4, HIT_COLOUR)
    assert near(picture, area["x"] + 1 + 10 * scale, y, BOX_COLOUR)
    assert "<i>" not in tab.locator(".sample").nth(3).inner_html()
