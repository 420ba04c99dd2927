"""Environments on recorded steps: the label's action succeeds, others do not, and a browser that dies costs its episode only."""

from __future__ import annotations

import base64
import io
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from PIL import Image

from coepg_dagster.experiment.training import Environment as Settings
from coepg_dagster.progress import Ended
from coepg_dagster.training.environments import Environments
from tests.miniwob import labelled_steps

pytest.importorskip("selenium")
pytest.importorskip("miniwob")

from coepg_dagster.sandbox.miniwob.environment import (
    Action,
    Actions,
    Answer,
    Environment,
    OtherPage,
    Question,
    Shown,
)

if TYPE_CHECKING:
    from coepg_dagster.sandbox.miniwob.browser import Browser

FAMILIES = ("click-checkboxes", "click-tab-2", "click-test-2", "enter-text", "login-user", "choose-list")


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[dict[str, Any]]]:
    """Family → the steps of its first episode in the shipped training split that has most of three."""
    table = labelled_steps().drop_columns(["screenshot"])
    episodes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in table.to_pylist():
        if row["split"] == "train" and row["family"] in FAMILIES:
            episodes[row["episode_id"]].append(row)
    of_families: dict[str, list[dict[str, Any]]] = {}
    for rows in episodes.values():
        if len(rows) <= 3 and len(rows) > len(of_families.get(rows[0]["family"], ())):
            of_families[rows[0]["family"]] = rows
    assert set(of_families) == set(FAMILIES)
    return of_families


def question(row: dict[str, Any], **action: Any) -> Question:
    """The label's own action at the centre of its first box, unless `action` says otherwise."""
    x1, y1, x2, y2 = row["boxes"][0]
    about = {name: row[name] for name in ("family", "seed", "step_index", "goal", "action_type", "value")}
    label = {"label_type": row["action_type"], "label_value": row["value"], "label_boxes": row["boxes"]}
    return Question.model_validate(about | label | {"x": (x1 + x2) / 2, "y": (y1 + y2) / 2} | action)


@pytest.mark.browser
def test_the_labels_action_succeeds_at_each_step_and_nothing_does_not(
    browser: Browser, recorded: dict[str, list[dict[str, Any]]]
) -> None:
    """Also with other right answers: either of two fields may be filled first, and any of the boxes checked."""
    environment = Environment(browser)
    for rows in recorded.values():
        for row in rows:
            assert environment.judge(question(row)) == Answer(True), row["step_id"]
            assert not environment.judge(question(row, action_type="CLICK", x=1.0, y=222.0)).success, row["step_id"]
    fields = recorded["login-user"]
    user, password = fields[0], fields[1]
    second_first = question(user, **{name: getattr(question(password), name) for name in ("value", "x", "y")})
    assert environment.judge(second_first) == Answer(True), "the label fills the user's name first"
    wrong = environment.judge(question(user, value="somebody else"))
    assert wrong == Answer(False, "more moves are needed than without the action")
    other = recorded["click-test-2"][0]
    elsewhere = [element for element in _buttons(browser, other) if element != tuple(other["boxes"][0])]
    x1, y1, x2, y2 = elsewhere[0]
    assert environment.judge(question(other, x=(x1 + x2) / 2, y=(y1 + y2) / 2)) == Answer(False, "reward -1")


def _buttons(browser: Browser, row: dict[str, Any]) -> list[tuple[float, ...]]:
    browser.reset(row["family"], row["seed"])
    return [element.box for element in browser.elements() if element.kind == "button"]


@pytest.mark.browser
def test_a_page_that_is_not_the_recorded_one_is_refused(
    browser: Browser, recorded: dict[str, list[dict[str, Any]]]
) -> None:
    environment, row = Environment(browser), recorded["enter-text"][0]
    moved = [[side + 20 for side in row["boxes"][0]]]
    for other in ({"goal": "another"}, {"label_value": "another"}, {"step_index": 9}, {"label_boxes": moved}):
        with pytest.raises(OtherPage, match=r"this page is not the recorded one .*collect miniwob"):
            environment.judge(question(row, **other))
    with pytest.raises(OtherPage, match="no oracle for the family 'bisect-angle'"):
        environment.judge(question(row, family="bisect-angle"))


@pytest.mark.browser
def test_the_labels_actions_end_an_episode_with_its_reward_whatever_was_played_before(
    browser: Browser, recorded: dict[str, list[dict[str, Any]]]
) -> None:
    """A page that is used again shows what a page shows that was loaded anew."""
    environment = Environment(browser)
    for family, rows in recorded.items():
        moves = [question(row).model_dump(include={"action_type", "value", "x", "y"}) for row in rows]
        asked = Actions.model_validate({"family": family, "seed": rows[0]["seed"], "actions": moves})
        begun = asked.model_copy(update={"actions": asked.actions[:-1]})
        goal = browser.reset(family, rows[0]["seed"])
        anew = environment.perform(begun)
        ended = environment.perform(asked)
        assert ended == Shown(goal, anew.history + ended.history[-1:], True, ended.reward, "") and ended.reward > 0
        assert (goal, anew.history) == (rows[-1]["goal"], rows[-1]["history"]) and not anew.done
        seen = Image.open(io.BytesIO(base64.b64decode(anew.screenshot))).convert("RGB")
        assert seen.tobytes() == browser_after(browser, rows).tobytes()
        environment.perform(
            asked.model_copy(update={"actions": [Action(action_type="TYPE", value="x", x=80.0, y=100.0)] * 2})
        )
        assert environment.perform(begun) == anew
    with pytest.raises(OtherPage, match="this is no training episode"):
        environment.perform(Actions(family="click-link", seed=100_000, actions=[]))


def browser_after(browser: Browser, rows: list[dict[str, Any]]) -> Image.Image:
    """The screen after all labels but the last, on a page that was loaded anew."""
    browser.reset(rows[0]["family"], rows[0]["seed"])
    for row in rows[:-1]:
        asked = question(row)
        browser.act(asked.action_type, (asked.x, asked.y), asked.value)
    return browser.screenshot()


def environments() -> list[psutil.Process]:
    """The environments that this process runs."""
    name = "coepg_dagster.sandbox.miniwob.environment"
    return [child for child in psutil.Process().children() if name in child.cmdline()]


@pytest.mark.browser
@pytest.mark.slow
def test_a_browser_that_dies_costs_its_episode_only(
    browser: Browser, recorded: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Two processes with a browser each. One browser is killed: its question is asked again, and all answers are right."""
    rows = [rows[0] for rows in recorded.values()]
    asked = [question(row).model_dump() for row in rows]
    with Environments(Settings(processes=2)) as pages:
        assert all(answer["success"] for answer in pages.ask(asked))
        first, second = environments()
        assert pages.restarted == 0
        os.kill(next(each.pid for each in first.children(recursive=True) if each.name() == "chromium"), signal.SIGKILL)
        assert all(answer["success"] for answer in pages.ask(asked))
        assert pages.restarted == 1 and pages.lost == 0
        with pytest.raises(Ended, match=r"grpo\.environment: .*this page is not the recorded one"):
            pages.ask([asked[0] | {"goal": "another"}])
        everything = [each for one in environments() for each in (one, *one.children(recursive=True))]
        assert second in everything and len(everything) > 4
    until = time.monotonic() + 20
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in everything):
        assert time.monotonic() < until, "a browser outlives its pool"
        time.sleep(0.1)
