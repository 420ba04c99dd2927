"""Oracles in a real Chromium: the episodes are rewarded, repeatable, and their boxes are on their targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from coepg_dagster.sandbox.miniwob.splits import GENERAL_PAGE, KNOWN_FAMILIES, UNSEEN_FAMILIES

pytest.importorskip("selenium")
pytest.importorskip("miniwob")

from coepg_dagster.sandbox.miniwob.episodes import Episode, encode_png, play

if TYPE_CHECKING:
    from coepg_dagster.sandbox.miniwob.browser import Browser

pytestmark = pytest.mark.browser

DECLINES = {"click-menu", "form-sequence-3", "social-media", "click-menu-2", "email-inbox-noscroll"}
"""Families in which some episodes cannot be told or reached by the three actions: their oracles decline these."""


def first_rewarded(browser: Browser, family: str, tries: int = 25) -> Episode:
    for seed in range(tries if family in DECLINES else 1):
        episode = play(browser, family, seed, reload=False)
        if not episode.reason:
            return episode
    raise AssertionError(f"{family}: {episode.reason}")


@pytest.mark.parametrize("family", [*KNOWN_FAMILIES, *UNSEEN_FAMILIES, GENERAL_PAGE])
def test_an_episode_is_rewarded_and_its_boxes_are_on_the_page(browser: Browser, family: str) -> None:
    episode = first_rewarded(browser, family)
    assert episode.steps
    assert episode.episode_id == f"miniwob/{family}/{episode.seed}"
    for index, step in enumerate(episode.steps):
        assert step.image.size == (168, 224)
        assert len(step.history) == index
        assert step.move.targets[0] is step.elements[step.target]
        for x1, y1, x2, y2 in step.boxes:
            assert 0 <= x1 < x2 <= 160
            assert 44 <= y1 < y2 <= 210  # below the instruction bar


def test_general_pages_have_widgets_of_all_kinds_and_are_always_rewarded(browser: Browser) -> None:
    episodes = [play(browser, GENERAL_PAGE, seed, reload=seed == 0) for seed in range(60)]
    assert {episode.reason for episode in episodes} == {""}
    steps = [step for episode in episodes for step in episode.steps]
    assert {step.move.action_type for step in steps} == {"CLICK", "TYPE", "SELECT"}
    kinds = {"button", "link", "text", "field", "area", "checkbox", "radio", "list", "tab", "section", "item"}
    assert {element.kind for step in steps for element in step.elements} == kinds | {"box", "shape"}
    for episode in episodes:
        for step in episode.steps:
            name = step.move.targets[0].name
            assert name in episode.goal or name in ("1st", "2nd", "3rd", "4th"), "the goal names its target"
            assert step.move.value in episode.goal


@pytest.mark.parametrize(
    "family", ["click-link", "search-engine", "click-tab-2", "login-user-popup", "form-sequence-2"]
)
def test_the_same_seed_gives_the_same_steps_and_pixels(browser: Browser, family: str) -> None:
    first = play(browser, family, 11)
    play(browser, family, 12, reload=False)
    for again in (play(browser, family, 11, reload=False), play(browser, family, 11)):
        assert again.goal == first.goal
        assert [s.move for s in again.steps] == [s.move for s in first.steps]
        assert [s.elements for s in again.steps] == [s.elements for s in first.steps]
        assert [s.image.tobytes() for s in again.steps] == [s.image.tobytes() for s in first.steps]


def test_the_margin_is_white_and_pngs_are_without_loss(browser: Browser) -> None:
    import io

    from PIL import Image

    browser.reset("click-color", 3)
    image = browser.screenshot()
    assert image.crop((160, 0, 168, 224)).getextrema() == ((255, 255),) * 3
    assert image.crop((0, 210, 168, 224)).getextrema() == ((255, 255),) * 3
    with Image.open(io.BytesIO(encode_png(image))) as stored:
        assert stored.mode == "P"
        assert stored.convert("RGB").tobytes() == image.tobytes()


def test_type_replaces_what_is_there(browser: Browser) -> None:
    browser.reset("enter-text", 0)
    field = next(e for e in browser.elements() if e.kind == "field")
    browser.act("TYPE", field.centre, "one two")
    browser.act("TYPE", field.centre, "Three-4!")
    assert next(e for e in browser.elements() if e.kind == "field").value == "Three-4!"
    assert browser.outcome() == (False, 0.0)


def test_select_reaches_any_option_and_leaves_other_things_alone(browser: Browser) -> None:
    browser.reset("choose-list", 1)
    options = next(e for e in browser.elements() if e.kind == "list")
    for value in (options.options[-1], options.options[0], options.options[1]):
        browser.act("SELECT", options.centre, value)
        assert next(e for e in browser.elements() if e.kind == "list").value == value
    browser.act("SELECT", options.centre, "no such option")
    browser.act("SELECT", (5, 200), options.options[0])
    assert next(e for e in browser.elements() if e.kind == "list").value == options.options[1]


def test_a_wrong_click_ends_the_episode_without_reward(browser: Browser) -> None:
    goal = browser.reset("click-dialog-2", 0)
    wrong = next(e for e in browser.elements() if e.kind == "button" and f'"{e.name}"' not in goal)
    browser.act("CLICK", wrong.centre)
    assert browser.outcome() == (True, -1.0)


def test_foreign_requests_are_refused(browser: Browser) -> None:
    with pytest.raises(ValueError, match="no task 'no-such-task'"):
        browser.reset("no-such-task", 0)
    with pytest.raises(ValueError, match="outside the 168 × 224 viewport"):
        browser.act("CLICK", (168, 10))
    with pytest.raises(ValueError, match="unknown action 'SCROLL'"):
        browser.act("SCROLL", (10, 10))  # type: ignore[arg-type]
