"""A MiniWoB++ page as an environment: what it makes of one action at a recorded step, or of the actions of an episode.

`python -m coepg_dagster.sandbox.miniwob.environment` reads a question as JSON from each line of its input and writes its answer
as JSON to a line of its output, until its input ends. It has one browser; `training.environments` runs several such processes.
It keeps no state between two questions, so that any process can answer any: a Question is answered by an Answer, Actions, all
from the first page on, by a Shown.

A recorded step is reached by loading the page of its family and seed, and repeating the oracle's earlier moves. An action
succeeds

1. if the page then ends the episode with a reward above 0, or
2. if the page goes on, and rewards the oracle, which plays on from there in no more moves than it needs after its own move.

The page alone decides. Its next screen is not compared with the recorded one: the order of two fields may differ, and both are
right. Since the oracle gets no move more, an action that does nothing, or that it must first undo, is no success.
"""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import asdict, dataclass

from pydantic import BaseModel, ConfigDict

from coepg_dagster.processes import end_with_parent
from coepg_dagster.refusal import Refusal
from coepg_dagster.sandbox.miniwob.browser import ActionType, Browser
from coepg_dagster.sandbox.miniwob.elements import Box, Element, element_at, history_entry
from coepg_dagster.sandbox.miniwob.episodes import Episode, encode_png, play
from coepg_dagster.sandbox.miniwob.oracles import ORACLES, Move, OracleError, look
from coepg_dagster.sandbox.miniwob.splits import SEEDS, families_of

SAME_PLACE = 4.0
"""How far, in px, a target may lie from where it was recorded: other fonts move what stands beside a text."""


class Question(BaseModel):
    """An action at a step, with what the step's label says, by which the state is checked. Coordinates are screenshot px."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    seed: int
    step_index: int
    goal: str
    label_type: str
    label_value: str
    label_boxes: list[Box]
    action_type: ActionType
    value: str
    x: float
    y: float


@dataclass(frozen=True)
class Answer:
    """Whether the action succeeded, and why not."""

    success: bool
    why: str = ""


class Action(BaseModel):
    """An action that can be performed. Coordinates are screenshot px."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    action_type: ActionType
    value: str
    x: float
    y: float


class Actions(BaseModel):
    """The actions of an episode so far."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    seed: int
    actions: list[Action]


@dataclass(frozen=True)
class Shown:
    """What the page shows after some actions. `history`: each action as a planner sees it; `reward`: raw, 0 before the end."""

    goal: str
    history: list[str]
    done: bool
    reward: float
    screenshot: str  # PNG, base64; empty where the episode is done


class OtherPage(Refusal, ValueError):
    """The page is not the one of the recorded step, or no episode of training."""


class Environment:
    """Judges and performs actions in one browser. The same question has the same answer."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._oracles: dict[tuple[str, int], Episode] = {}

    def judge(self, question: Question) -> Answer:
        """Raises OtherPage if family and seed do not lead to the step that was recorded."""
        episode = self._oracle(question)
        moves = [step.move for step in episode.steps[: question.step_index]]
        self._browser.reset(question.family, question.seed)
        for move in moves:
            self._browser.act(move.action_type, move.targets[0].centre, move.value)
        point = question.x, question.y
        touched = element_at(self._browser.elements(), point) or Element("page", "", (*point, *point))
        self._browser.act(question.action_type, point, question.value)
        moves.append(Move(question.action_type, (touched,), question.value))
        while True:
            done, reward = self._browser.outcome()
            if done:
                return Answer(reward > 0, "" if reward > 0 else f"reward {reward:g}")
            if len(moves) >= len(episode.steps):
                return Answer(False, "more moves are needed than without the action")
            try:
                after = ORACLES[question.family](look(self._browser, episode.goal, moves))
            except (OracleError, LookupError) as error:
                return Answer(False, f"the oracle does not understand the page: {error}")
            if after is None:
                return Answer(False, "the oracle knows no next move")
            self._browser.act(after.action_type, after.targets[0].centre, after.value)
            moves.append(after)

    def perform(self, asked: Actions) -> Shown:
        """Performs the actions of an episode from its first page on. Raises OtherPage for an episode of another split's seeds."""
        if asked.seed not in SEEDS["train"] or asked.family not in families_of("train"):
            raise OtherPage(
                f"{asked.family}, seed {asked.seed}: this is no training episode, and no other is played in training"
            )
        # as in collection; loading the page anew takes five times as long, and shows the same
        goal, history = self._browser.reset(asked.family, asked.seed, reload=False), list[str]()
        for action in asked.actions:
            point = action.x, action.y
            touched = element_at(self._browser.elements(), point)
            history.append(history_entry(touched, action.action_type, action.value))
            self._browser.act(action.action_type, point, action.value)
        done, reward = self._browser.outcome()
        # fast to compress: it is sent, and not kept
        seen = "" if done else base64.b64encode(encode_png(self._browser.screenshot(), level=1)).decode()
        return Shown(goal, history, done, reward, seen)

    def _oracle(self, question: Question) -> Episode:
        """The oracle's own episode, whose move at the step must be the label."""
        game = question.family, question.seed
        if question.family not in ORACLES:
            raise OtherPage(f"there is no oracle for the family {question.family!r}, so no state of it can be reached")
        if game not in self._oracles:
            self._oracles[game] = play(self._browser, *game)
        episode = self._oracles[game]
        move = episode.steps[question.step_index].move if question.step_index < len(episode.steps) else None
        label = question.label_type, question.label_value
        there = move is not None and not episode.reason and episode.goal == question.goal
        if move is None or not there or (move.action_type, move.value) != label or not self._near(question, move):
            raise OtherPage(
                f"{question.family}, seed {question.seed}, step {question.step_index}: this page is not the recorded one "
                f"(goal {episode.goal!r:.80}, {episode.reason or 'another label or place'}): give steps that were collected "
                "with this version of miniwob, Chromium and the fonts, or collect them again (`coepg collect miniwob`)"
            )
        return episode

    @staticmethod
    def _near(question: Question, move: Move) -> bool:
        """Whether some target lies where one of the label does."""
        return any(
            max(abs(a - b) for a, b in zip(piece, box, strict=True)) <= SAME_PLACE
            for target in move.targets
            for piece in target.pieces
            for box in question.label_boxes
        )


def main() -> None:
    """Answers questions until the input ends; an error of the browser ends it."""
    end_with_parent()
    with Browser() as browser:
        environment = Environment(browser)
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                if "actions" in asked:
                    said: dict[str, object] = asdict(environment.perform(Actions.model_validate(asked)))
                else:
                    said = asdict(environment.judge(Question.model_validate(asked)))
            except Refusal as error:
                said = {"refused": str(error)}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
