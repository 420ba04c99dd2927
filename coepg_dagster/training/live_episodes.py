"""GRPO on whole episodes of live pages: π plays, ϕ_k grounds its plans, and the page alone rewards.

In an episode π is asked at each step about the screen of the moment, with the history of its own actions, until the page ends
the episode, an answer cannot be performed, or `environment.max_steps` are reached. The reward is 1 if the page then rewards the
episode, else 0, and each of its steps is a row of training.

A process of `environments` keeps no state: each step, all actions of an episode are performed again, by any process. So a
browser that dies costs nothing but time, episodes that did the same share what the page shows, and thousands of episodes need
no more browsers than there are cores. An episode is lost, and left out, if two environments died with it, or ϕ_k gave no answer.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from coepg_dagster.experiment.training import Environment
from coepg_dagster.geometry import Size
from coepg_dagster.inference.agents import Grounder, Plan, refuse_outage
from coepg_dagster.inference.predict import NOT_REWARDED, STEP_LIMIT, UNKNOWN_ACTION, UNPARSED, obstacle, prediction_row
from coepg_dagster.inference.screens import Screens
from coepg_dagster.pictures import picture
from coepg_dagster.progress import Ended
from coepg_dagster.prompts import Style, parse_planner
from coepg_dagster.rewards.answers import Floats
from coepg_dagster.rewards.estimators import Integers
from coepg_dagster.steps import (
    GATE_CUT,
    GATE_PASSED,
    GATE_UNPARSED,
    GATE_WRONG_TYPE,
    NO_VALUE,
    STEP_SCHEMA,
    short_hash,
)
from coepg_dagster.training.environments import Environments, is_lost
from coepg_dagster.training.examples import grpo_prompts
from coepg_dagster.training.page_reward import PAGE

LOST: Final = "lost"
_GATES: Final = {UNPARSED: GATE_UNPARSED, UNKNOWN_ACTION: GATE_WRONG_TYPE, GATE_CUT: GATE_CUT}


@dataclass(frozen=True)
class Sampled:
    """An answer of π: its tokens, their log-probabilities, its text, and whether it was cut before a vision token."""

    tokens: list[int]
    logprobs: list[float]
    text: str
    cut: bool


@dataclass
class Step:
    """One step of an episode."""

    asked: dict[str, Any]  # the row of the dataset of prompts: its `step_id` names what was shown
    answer: Sampled
    plan: Plan
    x: float | None
    y: float | None
    obstacle: str | None
    entry: str | None = None  # the action as the next step's history has it; null: none was performed


@dataclass
class Episode:
    """One episode. `failure`: why it was not rewarded (`inference.predict`), or LOST; None: it was, or it goes on."""

    group: int
    number: int  # in its group
    family: str
    seed: int
    goal: str  # as recorded
    steps: list[Step] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False
    failure: str | None = None

    @property
    def reward(self) -> float:
        """1 or 0; NaN: it was lost."""
        return float("nan") if self.failure == LOST else float(self.ended and self.failure is None)

    def end(self, failure: str | None) -> None:
        self.ended, self.failure = True, failure

    @property
    def question(self) -> dict[str, Any]:
        return {"family": self.family, "seed": self.seed, "actions": self.actions}


Ask = Callable[[Sequence[dict[str, Any]]], list[Sampled]]
"""Lets π answer prompts, rows of a dataset of prompts, of which equal ones stand together."""
Ground = Callable[[pa.Table], Grounder]
"""ϕ_k on the screens of a table (STEP_SCHEMA)."""


class LiveEpisodes:
    """Plays the episodes of a batch, and is its reward: `steps` holds those that are trained on, `rows` their rollouts.

    Args:
        recorded: the training steps, of which a prompt names the first of an episode.
        resize: of π's image processor.
    """

    __name__ = PAGE

    def __init__(
        self,
        recorded: pa.Table,
        resize: tuple[int, int, int],
        style: Style,
        ground: Ground,
        environments: Environments,
        config: Environment,
    ) -> None:
        games = recorded.select(["step_id", "family", "seed", "goal"]).to_pylist()
        self._games = {row.pop("step_id"): row for row in games}
        self._resize, self._style, self._ground = resize, style, ground
        self._environments, self._max_steps = environments, config.max_steps
        self.episodes: list[Episode] = []
        self.steps: list[tuple[Episode, int]] = []
        self.rows: list[dict[str, Any]] = []

    def play(self, prompts: Sequence[str], group_size: int, ask: Ask) -> None:
        """Plays an episode for each of the prompts' step ids, of which `group_size` consecutive ones are equal.

        Raises Ended where all environments failed, a page is not the recorded one, or all episodes are lost.
        """
        self.episodes = [Episode(*divmod(i, group_size), **self._games[step]) for i, step in enumerate(prompts)]
        playing = self.episodes
        while looked := self._looked(playing):
            playing = self._acted(looked, ask)
        kept = [episode for episode in self.episodes if episode.failure != LOST]
        if not kept:
            raise Ended("grpo.environment: all episodes of an optimizer step were lost")
        # equal prompts stand together, so that they are computed once
        self.steps = sorted(
            ((episode, t) for episode in kept for t in range(len(episode.steps))),
            key=lambda one: (one[0].group, one[1], one[0].steps[one[1]].asked["step_id"], one[0].number),
        )
        self.rows = [self._row(episode, t) for episode, t in self.steps]

    def _looked(self, playing: Sequence[Episode]) -> list[tuple[Episode, dict[str, Any]]]:
        """Looks at the pages after the last actions; the episodes that go on, each with its screen (STEP_SCHEMA)."""
        by_question = {json.dumps(episode.question): episode.question for episode in playing}
        answers = dict(zip(by_question, self._environments.ask(list(by_question.values())), strict=True))
        looked = []
        for episode in playing:
            shown = answers[json.dumps(episode.question)]
            if is_lost(shown):
                episode.end(LOST)
                continue
            if shown["goal"] != episode.goal:
                raise Ended(
                    f"grpo.environment: {episode.family}, seed {episode.seed}: the page asks {shown['goal']!r:.80}, and not "
                    f"{episode.goal!r:.80} as recorded: give steps that were collected with this version of miniwob"
                )
            if episode.steps:
                episode.steps[-1].entry = shown["history"][-1]
            if shown["done"]:
                episode.end(None if shown["reward"] > 0 else NOT_REWARDED)
            elif len(episode.steps) == self._max_steps:
                episode.end(STEP_LIMIT)
            else:
                looked.append((episode, _frame(episode, shown)))
        return looked

    def _acted(self, looked: Sequence[tuple[Episode, dict[str, Any]]], ask: Ask) -> list[Episode]:
        """Asks π and ϕ_k about the screens of `_looked`; the episodes whose action is to be performed."""
        playing, names = [episode for episode, _ in looked], [frame["step_id"] for _, frame in looked]
        frames = pa.Table.from_pylist(list({frame["step_id"]: frame for _, frame in looked}.values()), STEP_SCHEMA)
        prompts = grpo_prompts(frozenset(names), frames, Screens(frames, self._resize), self._style)
        asked = {row["step_id"]: row for row in prompts}
        order = sorted(range(len(playing)), key=lambda i: (playing[i].group, names[i], playing[i].number))
        answers = dict(zip(order, ask([dict(asked[names[i]]) for i in order]), strict=True))
        plans = [Plan(answers[i].text, parse_planner(answers[i].text)) for i in range(len(playing))]
        said = [i for i, plan in enumerate(plans) if plan.answer and not answers[i].cut]
        groundings = self._ground(frames).ground([(names[i], plans[i].answer.plan) for i in said])  # type: ignore[union-attr]
        refuse_outage("ϕ_k", groundings)
        grounded = dict(zip(said, groundings, strict=True))
        size = Size(frames["width"][0].as_py(), frames["height"][0].as_py())
        for i, episode in enumerate(playing):
            grounding = grounded.get(i)
            if grounding is not None and grounding.failure:
                episode.end(LOST)
                continue
            predicted = prediction_row(names[i], plans[i], grounding)
            why = GATE_CUT if answers[i].cut else obstacle(predicted, size)
            episode.steps.append(Step(asked[names[i]], answers[i], plans[i], predicted["x"], predicted["y"], why))
            if why is not None:
                episode.end(why)
            else:
                episode.actions.append({name: predicted[name] for name in ("action_type", "value", "x", "y")})
        return [episode for episode in playing if not episode.ended]

    def _row(self, episode: Episode, t: int) -> dict[str, Any]:
        """The rollout of a step (ROLLOUT_SCHEMA without optimizer step and advantage)."""
        step, last = episode.steps[t], t + 1 == len(episode.steps)
        where = {"episode": episode.number, "step": t, "x": step.x, "y": step.y, "entry": step.entry}
        return {
            "group": episode.group,
            "step_id": step.asked["step_id"],
            "text": step.plan.text,
            "plan": step.plan.answer and step.plan.answer.plan,
            "gate": _GATES.get(step.obstacle or "", GATE_PASSED),
            "graders": [],
            "parts": [{"name": PAGE, "score": episode.reward}],
            "live": {**where, "failure": episode.failure if last else None},
            "reward": episode.reward,
        }

    def __call__(self, completions: Sequence[Any], **_: Any) -> list[float]:
        """The reward of its episode for each of `steps`, whose answers are the completions."""
        assert len(completions) == len(self.rows)
        return [row["reward"] for row in self.rows]

    def outcomes(self, group_size: int) -> tuple[Floats, Integers]:
        """Rewards and lengths of the episodes, (pages, G) each; a reward is NaN where an episode was lost."""
        rewards = np.array([episode.reward for episode in self.episodes]).reshape(-1, group_size)
        return rewards, np.array([len(episode.steps) for episode in self.episodes]).reshape(-1, group_size)


def _frame(episode: Episode, shown: Mapping[str, Any]) -> dict[str, Any]:
    """What a page shows as a row of STEP_SCHEMA without a label. Equal ids mean equal prompts."""
    seen, of = base64.b64decode(shown["screenshot"]), f"miniwob/{episode.family}/{episode.seed}"
    size = picture(seen).size
    what = short_hash(json.dumps(shown["history"]).encode() + seen)
    return {
        "step_id": f"{of}/{len(episode.steps)}@{what}",
        "split": "live",
        "episode_id": of,
        "step_index": len(episode.steps),
        "family": episode.family,
        "seed": episode.seed,
        "goal": shown["goal"],
        "history": shown["history"],
        "screenshot": seen,
        "width": size[0],
        "height": size[1],
        "boxes": [],
        "action_type": "",
        "value": NO_VALUE,
    }


def played(rollouts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """How whole episodes went, from rollouts (ROLLOUT_SCHEMA) that have `live`.

    Returns their number, their mean number of steps, and the share that the page rewarded, per cent, in all, in the first and in
    the last fifth of the optimizer steps. None over nothing.

    >>> step = lambda at, episode, t, reward: {
    ...     "optimizer_step": at, "group": 0, "live": {"episode": episode, "step": t}, "reward": reward}
    >>> played([step(0, 0, 0, 0.0), step(0, 0, 1, 0.0), step(0, 1, 0, 1.0), step(1, 0, 0, 1.0)])
    {'episodes': 3, 'steps': 1.3333333333333333, 'success': 66.66666666666667, 'success_first': 50.0, 'success_last': 100.0}
    """
    rewards: dict[int, dict[tuple[int, int], float]] = {}
    steps = 0
    for row in rollouts:
        if row.get("live"):
            steps += 1
            rewards.setdefault(row["optimizer_step"], {})[row["group"], row["live"]["episode"]] = row["reward"]
    parts = [list(of.values()) for _, of in sorted(rewards.items())]
    fifth = max(1, len(parts) // 5)
    n = sum(map(len, parts))

    def success(some: Sequence[Sequence[float]]) -> float | None:
        every = [reward for part in some for reward in part]
        return 100 * sum(every) / len(every) if every else None

    return {
        "episodes": n,
        "steps": steps / n if n else None,
        "success": success(parts),
        "success_first": success(parts[:fifth]),
        "success_last": success(parts[-fifth:]),
    }
