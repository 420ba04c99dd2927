"""GRPO on whole episodes of live pages: who plays what, what is trained on, what is lost, and that it runs on real pages."""

from __future__ import annotations

import base64
import doctest
import io
import json
import os
import signal
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pydantic import ValidationError
from trl import GRPOTrainer

from coepg_dagster.artifacts import ROLLOUTS
from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Environment, Grpo
from coepg_dagster.geometry import Space
from coepg_dagster.inference.agents import Grounder
from coepg_dagster.inference.predict import NO_POINT, NOT_REWARDED, STEP_LIMIT, UNKNOWN_ACTION, UNPARSED
from coepg_dagster.inference.screens import Screens
from coepg_dagster.progress import Ended
from coepg_dagster.prompts import planner_answer
from coepg_dagster.rewards.estimators import of_whole_episodes
from coepg_dagster.steps import DATASET_SCHEMA, GATE_CUT, ROLLOUT_SCHEMA, STEP_SCHEMA, short_hash
from coepg_dagster.training import grpo, live_episodes
from coepg_dagster.training.environments import LOST as NO_ANSWER
from coepg_dagster.training.environments import Environments
from coepg_dagster.training.grpo import train_grpo
from coepg_dagster.training.grpo_trainer import _chunks
from coepg_dagster.training.live_episodes import LOST, LiveEpisodes, Sampled
from tests.inference.scripted import RESIZE, Scripted, generation
from tests.jobs import grpo_job, quiet
from tests.miniwob import labelled_steps
from tests.project import REPOSITORY

CLICK = planner_answer("press it", "CLICK", "")


class Pages:
    """Pages that end after `length` actions, with a reward if all typed "ok"; what holds "lost" is never answered."""

    def __init__(self, length: int = 2) -> None:
        self.asked: list[list[Mapping[str, Any]]] = []
        self._length = length

    def ask(self, questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        self.asked.append(list(questions))
        return [self._shown(question) for question in questions]

    def _shown(self, question: Mapping[str, Any]) -> dict[str, Any]:
        values = [action["value"] for action in question["actions"]]
        if "lost" in values:
            return {"success": False, "why": NO_ANSWER}
        seen = io.BytesIO()
        Image.new("RGB", (56, 56), (len(values), question["seed"] % 255, 0)).save(seen, "PNG")
        return {
            "goal": f"goal {question['seed']}",
            "history": [f"[field] -> TYPE: {value}" for value in values],
            "done": len(values) == self._length,
            "reward": float(set(values) == {"ok"}),
            "screenshot": base64.b64encode(seen.getvalue()).decode(),
        }


def recorded(seeds: Sequence[int]) -> pa.Table:
    rows = [{"step_id": f"s{seed}", "family": "click-link", "seed": seed, "goal": f"goal {seed}"} for seed in seeds]
    return pa.Table.from_pylist(rows)


def live(pages: Any, seeds: Sequence[int] = (1, 2), max_steps: int = 4, point: str = "(18,28)") -> LiveEpisodes:
    def ground(frames: pa.Table) -> Grounder:
        screens = Screens(frames, RESIZE)
        return Grounder(Scripted(lambda _: generation(point)), screens, "compact", Space.RESIZED, 8)

    return LiveEpisodes(recorded(seeds), RESIZE, "compact", ground, pages, Environment(max_steps=max_steps))


class Policy:
    """Answers each prompt of an episode by the next of its own texts; keeps what it was asked."""

    def __init__(self, *texts: Sequence[str]) -> None:
        self._texts = [list(of) for of in texts]
        self.asked: list[list[str]] = []

    def __call__(self, rows: Sequence[dict[str, Any]]) -> list[Sampled]:
        self.asked.append([row["step_id"] for row in rows])
        waiting = [of for of in self._texts if of]
        assert len(waiting) == len(rows)
        return [Sampled([1], [-1.0], text := of.pop(0), text == GATE_CUT) for of in waiting]


def typed(value: str) -> str:
    return planner_answer("write", "TYPE", value)


def test_a_group_plays_one_page_and_every_step_has_its_episodes_reward() -> None:
    pages = Pages()
    episodes = live(pages)
    # page 1: one right, one wrong, and page 2: both right
    policy = Policy([typed("ok")] * 2, [typed("ok"), typed("no")], [typed("ok")] * 2, [typed("ok")] * 2)
    episodes.play(["s1", "s1", "s2", "s2"], 2, policy)
    assert [len(questions) for questions in pages.asked] == [2, 2, 3], "what is the same is performed once"
    assert all(len(set(names)) == 2 for names in policy.asked), "episodes that did the same see the same"
    assert [(row["group"], row["live"]["episode"], row["live"]["step"]) for row in episodes.rows] == [
        *[(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)],
        *[(1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)],
    ]
    assert [row["reward"] for row in episodes.rows] == [1, 0, 1, 0, 1, 1, 1, 1] == episodes(["x"] * 8)
    assert [row["live"]["failure"] for row in episodes.rows] == [None, None, None, NOT_REWARDED, *[None] * 4]
    assert [row["live"]["entry"] for row in episodes.rows[:4]] == [
        *["[field] -> TYPE: ok"] * 3,
        "[field] -> TYPE: no",
    ]
    rewards, lengths = episodes.outcomes(2)
    assert rewards.tolist() == [[1, 0], [1, 1]] and lengths.tolist() == [[2, 2], [2, 2]]
    first, second = (episode.steps[1].asked["prompt"] for episode in episodes.episodes[:2])
    assert first == second and "TYPE: ok" in str(first), "the prompt has the episode's own history"
    kept = [row | {"optimizer_step": 0, "advantage": 0.0} for row in episodes.rows]
    table = pa.Table.from_pylist(kept, ROLLOUT_SCHEMA)
    assert live_episodes.played(table.to_pylist())["success"] == 75
    assert doctest.testmod(live_episodes) == (0, 2)


@pytest.mark.parametrize(
    ("texts", "point", "failure", "steps"),
    [
        (["press"], "(18,28)", UNPARSED, 1),
        ([typed("ok"), planner_answer("go on", "SCROLL", "down")], "(18,28)", UNKNOWN_ACTION, 2),
        ([CLICK], "nowhere", NO_POINT, 1),
        ([GATE_CUT], "(18,28)", GATE_CUT, 1),
        ([typed("ok")] * 4, "(18,28)", STEP_LIMIT, 4),
    ],
)
def test_how_an_episode_ends_without_a_reward(texts: list[str], point: str, failure: str, steps: int) -> None:
    episodes = live(Pages(length=5), point=point)
    episodes.play(["s1"], 1, Policy(texts))
    [episode] = episodes.episodes
    assert (episode.failure, episode.reward, len(episode.steps)) == (failure, 0.0, steps)


def test_what_is_lost_is_left_out_and_has_no_reward() -> None:
    episodes = live(Pages())
    episodes.play(["s1"] * 3, 3, Policy([typed("ok")] * 2, [typed("lost")], [typed("no")] * 2))
    rewards, _ = episodes.outcomes(3)
    assert rewards[0, 0] == 1 and np.isnan(rewards[0, 1]) and rewards[0, 2] == 0
    assert {row["live"]["episode"] for row in episodes.rows} == {0, 2} and episodes.episodes[1].failure == LOST
    with pytest.raises(Ended, match="all episodes of an optimizer step were lost"):
        live(Pages()).play(["s1"], 1, Policy([typed("lost")]))


def test_a_page_with_another_task_than_the_recorded_one_ends_the_step() -> None:
    episodes = live(Pages(), seeds=(1,))
    episodes._games["s1"]["goal"] = "another"
    with pytest.raises(Ended, match="the page asks 'goal 1', and not 'another' as recorded"):
        episodes.play(["s1"], 1, Policy([]))


def test_prompts_are_computed_as_many_at_once_as_a_step_has() -> None:
    rows = [{"step_id": name} for name in "aabbbcd"]
    assert ["".join(row["step_id"] for row in chunk) for chunk in _chunks(rows, 2)] == ["aabbb", "cd"]
    assert list(_chunks([], 2)) == []


def test_settings_that_do_not_go_with_whole_episodes_are_refused() -> None:
    whole = {"environment": {"episodes": "whole"}}
    for wrong, message in (
        ({"replay": {}}, "set replay: null"),
        ({"max_num_gen_batches": 3}, "set max_num_gen_batches: 1"),
        ({"rollouts": "vllm"}, "set rollouts: transformers"),
        ({"max_tokens": 99}, "set max_tokens: null"),
        ({"advantage": ["gui_g1_difficulty"]}, "asks for a label's target"),
    ):
        with pytest.raises(ValidationError, match=message):
            Grpo.model_validate(whole | wrong)
    config = Grpo.model_validate(
        whole | {"prompts_per_step": 6, "group_size": 4, "micro_batch_size": 24, "advantage": ["ui_s1_levels"]}
    )
    assert config.plays == Environment(episodes="whole") and Grpo.model_validate({"environment": {}}).plays is None
    assert config.pass_size(packs=True) == 3, "3 episodes of 8 steps are 24 rows"
    assert Grpo.model_validate({**whole, "micro_batch_size": 7}).pass_size(packs=True) == 1


# in a trainer


class Lottery:
    """Pages of the tiny models' steps, which end after two actions; a checksum of these says what is rewarded, and lost."""

    steps: pa.Table
    lost = restarted = 0

    def __init__(self, config: Environment) -> None:
        assert config.episodes == "whole"

    def __enter__(self) -> Lottery:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ask(self, questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [self._shown(question) for question in questions]

    def _shown(self, question: Mapping[str, Any]) -> dict[str, Any]:
        row, actions = self.steps.slice(question["seed"], 1).to_pylist()[0], question["actions"]
        drawn = zlib.crc32(json.dumps(question).encode())
        if actions and drawn % 7 == 0:
            return {"success": False, "why": NO_ANSWER}
        history = [f"[button] {action['x']:g} -> {action['action_type']}" for action in actions]
        seen = base64.b64encode(row["screenshot"]).decode()
        done = len(actions) == 2
        return {
            "goal": row["goal"],
            "history": history,
            "done": done,
            "reward": float(done and drawn % 2),
            "screenshot": seen,
        }


@pytest.mark.parametrize(
    "more",
    [
        {"advantage": ["ui_s1_levels"]},
        {"kl_beta": 0.01, "num_iterations": 2, "policy_loss": "guirlvg_kl", "max_steps": 2},
    ],
    ids=["levels", "kl"],
)
def test_each_row_is_trained_with_the_advantage_of_its_episode(
    more: dict[str, Any],
    trained: Callable[[str, int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No row is missing in the passes of a step, none is there twice, and what was lost is in none."""
    table = steps.set_column(steps.schema.get_field_index("seed"), STEP_SCHEMA.field("seed"), [range(6)])
    monkeypatch.setattr(Lottery, "steps", table, raising=False)
    monkeypatch.setattr(grpo, "Environments", Lottery)
    passes: dict[int, list[float]] = defaultdict(list)
    compute = GRPOTrainer._compute_loss

    def computed(self: Any, model: Any, inputs: Any) -> Any:
        assert len(inputs["advantages"]) <= 6, "a pass is as large as micro_batch_size says"
        passes[self.state.global_step] += inputs["advantages"].tolist()
        return compute(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", computed)
    config = Grpo.model_validate(
        {"environment": {"episodes": "whole", "max_steps": 3}, "prompts_per_step": 2, "group_size": 6, "max_steps": 3}
        | {"micro_batch_size": 6, "max_plan_tokens": 24, "temperature": 1.0, "kl_beta": 0.0, "learning_rate": 1e-4}
        | more
    )
    job = grpo_job(tmp_path / "out", (dataset, table, models), trained("planner", 0), trained("grounder", 0), config)
    figures = train_grpo(job, quiet)
    rows = pq.read_table(job.out / ROLLOUTS).to_pylist()
    of_steps: dict[int, dict[int, dict[int, list[dict[str, Any]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for row in rows:
        of_steps[row["optimizer_step"]][row["group"]][row["live"]["episode"]].append(row)
    lost = 0
    for at, groups in of_steps.items():
        rewards, lengths = np.full((2, 6), np.nan), np.zeros((2, 6), np.int64)
        for group, episodes in groups.items():
            for number, played in episodes.items():
                assert [row["live"]["step"] for row in played] == list(range(len(played)))
                rewards[group, number], lengths[group, number] = played[0]["reward"], len(played)
        lost += int(np.isnan(rewards).sum())
        expected = of_whole_episodes(config.advantage, rewards, lengths)
        mine = [row["advantage"] for row in rows if row["optimizer_step"] == at]
        assert mine == pytest.approx(
            [expected[r["group"], r["live"]["step"], r["live"]["episode"]] for r in rows if r["optimizer_step"] == at]
        )
        for update in range(at, at + config.num_iterations):
            kept = [a for a in mine if a or config.kl_beta]
            assert sorted(passes[update]) == pytest.approx(sorted(kept), abs=1e-6)
    assert lost > 0 and figures["episodes_lost"] == pytest.approx(lost / len(of_steps))
    assert {row["reward"] for row in rows} == {0.0, 1.0} and any(row["advantage"] for row in rows)


# on real pages


def chromium() -> None:
    pytest.importorskip("selenium")
    pytest.importorskip("miniwob")
    from coepg_dagster.sandbox.miniwob.browser import BrowserMissing, find_programs

    try:
        find_programs()
    except BrowserMissing as missing:
        pytest.skip(str(missing))


@pytest.mark.browser
@pytest.mark.slow
def test_pages_of_training_are_played_by_any_browser_and_no_others() -> None:
    """The same actions show the same; a killed browser costs no answer; seeds of other splits are refused."""
    chromium()
    click = {"action_type": "CLICK", "value": "", "x": 80.0, "y": 100.0}
    first: dict[str, Any] = {"family": "click-collapsible-nodelay", "seed": 3, "actions": []}
    then = first | {"actions": [click | {"x": 30.0, "y": 60.0}]}
    with Environments(Environment(processes=2)) as pages:
        before = pages.ask([first, then, first, then])
        assert before[0] == before[2] and before[1] == before[3] and not before[0]["done"]
        assert len(before[1]["history"]) == 1 and before[0]["goal"] == before[1]["goal"]
        ours = [
            child
            for child in psutil.Process().children()
            if "coepg_dagster.sandbox.miniwob.environment" in child.cmdline()
        ]
        os.kill(next(one.pid for one in ours[0].children(recursive=True) if one.name() == "chromium"), signal.SIGKILL)
        assert pages.ask([first, then, first, then]) == before and pages.restarted == 1 and pages.lost == 0
        for other in ({"seed": 100_000}, {"seed": 200_003}, {"family": "click-menu-2"}):
            with pytest.raises(Ended, match="this is no training episode"):
                pages.ask([first | other])


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.long
def test_grpo_on_whole_episodes(tmp_path: Path) -> None:
    """Two steps of the shipped pair: every row has its episode's reward and advantage, which sum to 0 over a group."""
    chromium()
    table = labelled_steps()
    families = ("click-dialog", "click-link", "click-collapsible-nodelay", "focus-text-2")
    columns = zip(table["split"].to_pylist(), table["family"].to_pylist(), table["seed"].to_pylist(), strict=True)
    mine = [
        i for i, (split, family, seed) in enumerate(columns) if split == "train" and family in families and seed < 9
    ]
    steps = table.take(pa.array(mine))
    rows = [
        {
            **{name: row[name] for name in ("step_id", "action_type", "value")},
            **{"plan": "x", "box": row["boxes"][0], "candidate_id": row["step_id"], "planner": "open", "made_in": 0},
            **{"hits": 1, "answered": 1, "score": 1.0, "row_id": row["step_id"]},
            "screenshot_hash": short_hash(row["screenshot"]),
        }
        for row in steps.to_pylist()
    ]
    models = load_experiment(REPOSITORY / "experiments" / "sandbox.yaml").models
    config = Grpo.model_validate(
        {
            "environment": {"episodes": "whole", "max_steps": 3, "processes": 2},
            "prompts_per_step": 4,
            "group_size": 4,
            "max_steps": 2,
        }
        | {"micro_batch_size": 8, "max_plan_tokens": 48, "temperature": 1.0, "kl_beta": 0.0, "learning_rate": 1e-3}
    )
    shipped = REPOSITORY / "models"
    data = (pa.Table.from_pylist(rows, DATASET_SCHEMA), steps, models)
    job = grpo_job(tmp_path / "out", data, shipped / "base-planner", shipped / "base-grounder", config)
    figures = train_grpo(job, quiet)
    assert figures["page"]["episodes"] == 32 and figures["page"]["lost"] == 0
    assert figures["prompts"] == sum(row["step_index"] == 0 for row in steps.to_pylist()), "one for each episode"
    rollouts = pq.read_table(job.out / ROLLOUTS).to_pylist()
    groups: dict[tuple[int, int], dict[int, set[tuple[float, float]]]] = defaultdict(lambda: defaultdict(set))
    for row in rollouts:
        groups[row["optimizer_step"], row["group"]][row["live"]["episode"]].add((row["reward"], row["advantage"]))
    assert len(groups) == 8 and all(len(of) == 4 for of in groups.values())
    for of in groups.values():
        assert all(len(said) == 1 for said in of.values()), "all steps of an episode say the same"
        assert sum(advantage for [(_, advantage)] in of.values()) == pytest.approx(0, abs=1e-5)
    assert len(rollouts) > 32 and {row["reward"] for row in rollouts} == {0.0, 1.0}
    games = {tuple(row["step_id"].split("/")[1:3]) for row in rollouts}
    assert games <= {(row["family"], str(row["seed"])) for row in steps.to_pylist()}
