"""Live play: what the agent gets to see, how an episode ends, what is kept, and that the shipped pair solves some."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.models import Models
from coepg_dagster.inference.engine import Failure, Generation, Request, Sampling
from coepg_dagster.inference.predict import (
    NO_POINT,
    NOT_REWARDED,
    OFF_SCREEN,
    STEP_LIMIT,
    UNKNOWN_ACTION,
    UNPARSED,
)
from coepg_dagster.progress import Report
from coepg_dagster.prompts import planner_answer
from coepg_dagster.provenance import NotUsable
from coepg_dagster.steps import STEP_SCHEMA
from tests.conftest import step
from tests.inference.scripted import Scripted, generation
from tests.project import REPOSITORY

pytest.importorskip("selenium")
pytest.importorskip("miniwob")

from coepg_dagster.sandbox.miniwob import episodes as offline
from coepg_dagster.sandbox.miniwob.oracles import ORACLES, Move, look
from coepg_dagster.sandbox.miniwob.play import (
    EPISODE_SCHEMA,
    EPISODES_FILE,
    PAGE_FILE,
    SUMMARY_FILE,
    Agent,
    fresh_games,
    games_of,
    play,
    play_episode,
    summarize,
    write_play,
)

if TYPE_CHECKING:
    from coepg_dagster.sandbox.miniwob.browser import Browser

EASY = ("click-collapsible-nodelay", "click-color", "click-dialog", "click-link", "click-shape", "click-test-2")
"""Families in which the shipped pair solves most episodes."""


@pytest.fixture(scope="module")
def models() -> Models:
    return load_experiment(REPOSITORY / "experiments" / "sandbox.yaml").models


def scripted(models: Models, plan: Callable[[str], str], point: str = "(80,120)") -> Agent:
    """An agent that says the same whatever it sees."""
    return Agent(Scripted(lambda text: generation(plan(text))), Scripted(lambda _: generation(point)), models, 48, 12)


class OracleAgent:
    """Both engines in one: the answers of a family's oracle, who looks at the page that the browser shows."""

    resize = Scripted.resize
    remote = False

    def __init__(self, browser: Browser, family: str, goal: str) -> None:
        self.moves: list[Move] = []
        self.requests: list[tuple[str, Image.Image]] = []
        self._browser, self._family, self._goal = browser, family, goal

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, report: Report | None = None
    ) -> list[list[Generation | Failure]]:
        (request,) = requests
        text = request.messages[0]["content"][1]["text"]
        if text == "as the oracle does":
            x, y = self.moves[-1].targets[0].centre
            return [[generation(f"({x},{y})")]]
        self.requests.append((text, request.image))
        move = ORACLES[self._family](look(self._browser, self._goal, self.moves))
        assert move is not None
        self.moves.append(move)
        return [[generation(planner_answer("as the oracle does", move.action_type, move.value))]]


@pytest.mark.browser
@pytest.mark.parametrize(
    "family",
    ["choose-list", "click-checkboxes", "click-collapsible-nodelay", "click-link", "email-inbox-noscroll", "login-user",
     "multi-orderings", "navigate-tree", "search-engine", "use-autocomplete-nodelay"],
)  # fmt: skip
def test_an_agent_that_does_what_the_oracle_does_lives_the_offline_episode(
    browser: Browser, models: Models, family: str
) -> None:
    expected = next(e for seed in range(200_000, 200_040) if not (e := offline.play(browser, family, seed)).reason)
    oracle = OracleAgent(browser, family, expected.goal)
    rows = play_episode(browser, Agent(oracle, oracle, models, 48, 12), family, expected.seed)
    assert [row["history"] for row in rows] == [list(step.history) for step in expected.steps]
    assert rows[-1]["entry"] == expected.steps[-1].move.history
    for row, move, (text, image), was in zip(rows, oracle.moves, oracle.requests, expected.steps, strict=True):
        assert row["step_id"] == f"{expected.episode_id}/{row['step_index']}"
        assert row["screenshot"] == offline.encode_png(was.image)  # recorded is what the environment showed,
        assert image.tobytes() == was.image.tobytes()  # and the same that the model saw
        assert text == f"Task: {expected.goal}\nDone: {' ; '.join(was.history) or 'none'}"
        assert (row["x"], row["y"]) == move.targets[0].centre
        assert (row["action_type"], row["value"]) == (was.move.action_type, was.move.value)
    assert [row["done"] for row in rows] == [False] * (len(rows) - 1) + [True]
    assert rows[-1]["reward"] > 0 and all(row["failure"] is None for row in rows)


@pytest.mark.browser
@pytest.mark.parametrize(
    ("plan", "point", "failure"),
    [
        ("press ok", "(80,120)", UNPARSED),
        ('{"plan": "scroll down", "action_type": "SCROLL", "value": "down"}', "(80,120)", UNKNOWN_ACTION),
        (planner_answer("ok", "CLICK", ""), "nowhere", NO_POINT),
        (planner_answer("ok", "CLICK", ""), "(168,50)", OFF_SCREEN),
        (planner_answer("ok", "CLICK", ""), "(-1,50)", OFF_SCREEN),
    ],
)
def test_an_answer_that_cannot_be_carried_out_ends_the_episode_with_its_reason(
    browser: Browser, models: Models, plan: str, point: str, failure: str
) -> None:
    (row,) = play_episode(browser, scripted(models, lambda _: plan, point), "click-dialog", 200_000)
    assert (row["failure"], row["done"], row["reward"], row["entry"]) == (failure, False, 0.0, None)
    assert (row["planner_text"], row["plan"] is None) == (plan, failure == UNPARSED)
    assert browser.outcome() == (False, 0.0)  # nothing was done


@pytest.mark.browser
def test_the_page_and_the_step_limit_end_episodes(browser: Browser, models: Models) -> None:
    idle = scripted(models, lambda _: planner_answer("the margin", "CLICK", ""), "(165,215)")
    rows = play_episode(browser, idle, "click-dialog-2", 200_000, max_steps=3)
    assert [row["failure"] for row in rows] == [None, None, STEP_LIMIT]
    assert rows[-1]["history"] == ["[page] -> CLICK"] * 2
    goal = browser.reset("click-dialog-2", 200_000)
    wrong = next(e for e in browser.elements() if e.kind == "button" and f'"{e.name}"' not in goal)
    hasty = scripted(models, lambda _: planner_answer("that one", "CLICK", ""), str(wrong.centre))
    (row,) = play_episode(browser, hasty, "click-dialog-2", 200_000)
    assert (row["failure"], row["done"], row["reward"]) == (NOT_REWARDED, True, -1.0)
    assert row["entry"] == f"[button] {wrong.name} -> CLICK"


@pytest.mark.browser
def test_the_shipped_pair_solves_episodes(browser: Browser, models: Models, tmp_path: Path) -> None:
    from coepg_dagster.inference.transformers_engine import TransformersEngine

    planner, grounder = (
        TransformersEngine(REPOSITORY / path, dtype="float32", device="cpu", batch_size=1)
        for path in (models.base_planner, models.base_grounder)
    )
    progress: list[tuple[int, int]] = []
    table = play(
        browser,
        Agent(planner, grounder, models, 48, 12),
        fresh_games(EASY, 200_000, 1),
        lambda done, of, figures: progress.append((done, of)),
        max_steps=3,
    )
    assert progress == [(n + 1, 6) for n in range(6)]
    about = write_play(table, {"planner": "base"}, "base pair", 1, tmp_path)
    assert about["solved"] >= 1
    low, high = about["success"]["ci95"]
    assert about["success"]["rate"] == pytest.approx(100 * about["solved"] / 6)
    assert 0 <= low <= about["success"]["rate"] <= high <= 100
    assert pq.read_table(tmp_path / EPISODES_FILE).cast(EPISODE_SCHEMA).equals(table)
    assert json.loads((tmp_path / SUMMARY_FILE).read_text()) == about
    page = (tmp_path / PAGE_FILE).read_text()
    rows = table.to_pylist()
    assert page.count("data:image/png;base64,") == len(rows)
    assert page.count("<path") == 2 * sum(row["x"] is not None for row in rows)


def episode(name: str, family: str, failure: str | None, **change: object) -> dict[str, object]:
    """The only step of an episode."""
    image = io.BytesIO()
    Image.new("RGB", (84, 112)).save(image, "PNG")
    seen = {k: v for k, v in step(f"{name}/0", episode_id=name, family=family, screenshot=image.getvalue()).items()}
    answers = {
        "plan": "press ok",
        "x": 5.0,
        "y": 6.0,
        "planner_text": "",
        "grounder_text": "",
        "entry": "[page] -> CLICK",
    }
    return seen | answers | {"reward": 0.0 if failure else 1.0, "done": True, "failure": failure} | change


def test_rates_over_episodes_and_over_families() -> None:
    rows = [episode("a/1", "a", None), episode("a/2", "a", None), episode("a/3", "a", STEP_LIMIT)]
    table = pa.Table.from_pylist([*rows, episode("b/1", "b", NOT_REWARDED)], EPISODE_SCHEMA)
    about = summarize(table)
    assert (about["episodes"], about["solved"], about["steps"]) == (4, 2, 4)
    assert about["success"]["rate"] == 50
    assert about["macro"]["rate"] == pytest.approx(100 * (2 / 3 + 0) / 2)
    assert about["failures"] == {NOT_REWARDED: 1, STEP_LIMIT: 1}
    assert about["families"]["a"] == {
        "episodes": 3,
        "solved": 2,
        "success": pytest.approx(200 / 3),
        "steps": 3,
        "failures": {STEP_LIMIT: 1},
    }
    assert summarize(table.slice(3))["success"] == {"rate": 0, "ci95": None}


def test_what_models_and_pages_say_is_text_on_the_page(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    rows = [
        episode("a/1", "a", None, goal=bad, plan=bad, value=bad, entry=bad),
        episode("a/2", "a", UNPARSED, plan=None, planner_text=bad, x=None, y=None, entry=None),
        episode("a/3", "a", NO_POINT, grounder_text=bad, x=None, y=None, entry=None),
    ]
    write_play(pa.Table.from_pylist(rows, EPISODE_SCHEMA), {bad: bad}, bad, 3, tmp_path)
    page = (tmp_path / PAGE_FILE).read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 10
    assert page.count("<svg") == 3


def test_the_episodes_of_a_split() -> None:
    rows = [step(f"{f}/{s}/{i}", family=f, seed=s, split=split, step_index=i)
            for f, s, split in [("b", 2, "test_seed"), ("b", 1, "test_seed"), ("a", 9, "test_seed"), ("a", 3, "train")]
            for i in range(2)]  # fmt: skip
    steps = pa.Table.from_pylist(rows, STEP_SCHEMA)
    assert games_of(steps, "test_seed", 5) == [("a", 9), ("b", 1), ("b", 2)]
    assert games_of(steps, "test_seed", 1, ["b"]) == [("b", 1)]
    assert fresh_games(["b", "a", "b"], 7, 2) == [("a", 7), ("a", 8), ("b", 7), ("b", 8)]
    with pytest.raises(NotUsable, match=r"no steps in split 'test' \(there are: test_seed, train\)"):
        games_of(steps, "test", 1)
    with pytest.raises(NotUsable, match=r"split 'train' has no family b \(it has: a\)"):
        games_of(steps, "train", 1, ["b"])
