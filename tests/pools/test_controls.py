"""The plan shuffle, and what must not be in D_k."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.experiment.schema import Quality
from coepg_dagster.pools.candidates import jaccard, plan_tokens
from coepg_dagster.pools.controls import BLOCKING, dataset_checks, shuffled, smallest_targets
from coepg_dagster.steps import short_hash
from tests.conftest import png, step, step_table
from tests.pools.tables import candidate, candidates, row, rows

PLANS = ("press OK", "press Cancel", "press OK now", "open the list", "type red", "tick the box")


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(PLANS), st.booleans()), max_size=12), st.integers(1, 9))
def test_a_shuffled_plan_is_on_a_foreign_screen_of_its_size(drawn: list[tuple[int, str, bool]], pairs: int) -> None:
    steps = step_table(
        *(
            step(f"s{i}", episode_id=f"e{i // 2}", width=84 + 28 * (i % 2), boxes=[] if i == 4 else [[1, 1, 9, 9]])
            for i in range(6)
        )
    )
    plans = candidates(*(candidate(f"s{i}", "p", n, plan) for n, (i, plan, _) in enumerate(drawn)))
    moved = shuffled(plans, steps, 0.9, pairs).to_pylist()
    about = {one["step_id"]: one for one in steps.to_pylist()}
    written_for = {one["candidate_id"]: one["step_id"] for one in plans.to_pylist()}
    assert len(moved) <= pairs and len({one["candidate_id"] for one in moved}) == len(moved)
    for one in moved:
        here, there = about[written_for[one["candidate_id"]]], about[one["step_id"]]
        assert here["episode_id"] != there["episode_id"] and here["width"] == there["width"] and there["boxes"]
        tokens = plan_tokens(one["plan"])
        theirs = [plan_tokens(p["plan"]) for p in plans.to_pylist() if p["step_id"] == there["step_id"]]
        assert theirs and all(tokens != other and jaccard(tokens, other) <= 0.9 for other in theirs)
    assert moved == shuffled(plans.sort_by([("candidate_id", "descending")]), steps, 0.9, pairs).to_pylist()


SCREEN, OTHER = png(box=(10, 10, 20, 20)), png((9, 200, 9), (10, 10, 20, 20))


def checked(*changes: dict[str, Any], config: Quality | None = None, **row_change: Any) -> dict[str, str]:
    """The checks that fail on one row for step s, where the benchmark is s (train), t (test) and what changes of them."""
    first, second = (dict(change) for change in (*changes, {}, {})[:2])
    steps = step_table(
        step("s", **({"screenshot": SCREEN} | first)),
        step("t", **({"split": "test", "screenshot": OTHER} | second)),
    )
    seen = short_hash((first | {"screenshot": first.get("screenshot", SCREEN)})["screenshot"])
    table = rows(row("s", "one") | {"screenshot_hash": seen} | row_change)
    checks = dataset_checks(table, steps, "train", config or Quality())
    assert tuple(checks) == tuple(BLOCKING)
    return {name: why for name, why in checks.items() if why is not None}


def test_a_sound_dataset_passes() -> None:
    assert checked() == {}
    assert checked({}, {"screenshot": SCREEN, "goal": "Another task on the same page"}) == {}


@pytest.mark.parametrize(
    ("failing", "check", "words"),
    [
        (lambda: checked(step_id="t"), "train_split_only", "1 steps are not in the train split, e.g. t"),
        (lambda: checked(step_id="nowhere"), "train_split_only", "e.g. nowhere"),
        (lambda: checked({}, {"episode_id": "s"}), "no_test_steps", "episodes of a validation or test split, e.g. s"),
        (
            lambda: checked({}, {"screenshot": SCREEN}),
            "no_test_steps",
            "have the goal and the screenshot of a validation or test",
        ),
        (
            lambda: checked(box=[10.0, 10.0, 85.0, 20.0]),
            "boxes_inside_screens",
            "box that is not inside the screenshot",
        ),
        (lambda: checked(box=[30.0, 10.0, 20.0, 20.0]), "boxes_inside_screens", "e.g. s"),
        (lambda: checked({"screenshot": png()}), "screens_not_blank", "have a screenshot of one colour, or none"),
        (lambda: checked({"screenshot": b"no image"}), "screens_not_blank", "e.g. s"),
    ],
)
def test_what_makes_training_wrong_is_named(failing: Any, check: str, words: str) -> None:
    failed = failing()
    assert check in failed and words in failed[check]
    assert set(failed) <= {check, "no_test_steps"}  # a test step's screenshot is one of a test step, too


def test_no_rows_fail() -> None:
    checks = dataset_checks(rows(), step_table(step("s", screenshot=SCREEN)), "train", Quality())
    assert [name for name, why in checks.items() if why] == ["has_rows"]


def test_a_limit_lets_some_pass() -> None:
    assert checked({"screenshot": png()}, config=Quality(blank_screens_at_most=99))  # 1 of 1
    assert checked({"screenshot": png()}, config=Quality(blank_screens_at_most=100)) == {}


def test_targets_are_measured_as_the_coarsest_verifier_sees_them() -> None:
    steps = step_table(step("s", width=560, height=280, boxes=[[0, 0, 40, 20]]))
    table = rows(row("s", "one", box=[0.0, 0.0, 40.0, 20.0]), row("s", "two", box=None))
    [side] = smallest_targets(table, steps, [(28, 3136, 1_000_000), (28, 3136, 280 * 140)]).values()
    assert side == 10.0
