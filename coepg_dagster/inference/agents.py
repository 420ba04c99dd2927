"""The planner π (Eq. 1) and the grounder ϕ (Eq. 2): an engine, the prompts, and the grounding of answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import pyarrow as pa

from coepg_dagster.geometry import Box, Point, Space
from coepg_dagster.inference.engine import Engine, Failure, Generation, Request, Sampling
from coepg_dagster.inference.screens import Screens
from coepg_dagster.progress import Ended
from coepg_dagster.prompts import (
    Message,
    PlannerAnswer,
    Style,
    coordinate_span,
    end_to_end_messages,
    grounder_messages,
    parse_grounder,
    parse_planner,
    planner_messages,
)
from coepg_dagster.rewards.cdrem import mean_log_probability
from coepg_dagster.steps import VISIBLE


@dataclass(frozen=True)
class PlannerInput:
    """What a planner sees of a step (Eq. 1): the columns VISIBLE; the screenshot is found by the id."""

    step_id: str
    goal: str
    history: tuple[str, ...]
    instruction: str | None = None  # the step's own, where a model may see it

    def messages(self, style: Style) -> list[Message]:
        """The chat that asks π for this step's plan."""
        return planner_messages(self.goal, self.history, style, self.instruction)

    def end_to_end_messages(self, style: Style) -> list[Message]:
        """The chat that asks an end-to-end agent for this step's action."""
        return end_to_end_messages(self.goal, self.history, style, self.instruction)


def planner_inputs(steps: pa.Table) -> list[PlannerInput]:
    """What planners see of each step, in the order of the table."""
    names = [name for name in ("step_id", *VISIBLE) if name in steps.column_names]
    return [
        PlannerInput(row["step_id"], row["goal"], tuple(row["history"]), row.get("instruction"))
        for row in steps.select(names).to_pylist()
    ]


@dataclass(frozen=True)
class Plan:
    """A planner's answer: its text, and what could be read from it (None: not a plan)."""

    text: str
    answer: PlannerAnswer | None


@dataclass(frozen=True)
class Grounding:
    """A grounder's answer for one plan.

    `point` is in pixels of the stored screenshot, None where the answer holds no coordinates. `mean_logprob` is Eq. 6
    over the `tokens` coordinate tokens (over all tokens of an answer without coordinates; over the stop token of an
    answer without any). `failure` is set, and all else empty, where the grounder gave no answer at all. `seconds` is this
    answer's share of the time that its batch took, `weights` the version of the weights that answered.
    """

    point: Point | None = None
    mean_logprob: float = 0.0
    tokens: int = 0
    text: str = ""
    failure: str | None = None
    seconds: float = field(default=0.0, compare=False)
    weights: str = field(default="", compare=False)

    def hits(self, boxes: Sequence[Box]) -> bool:
        """Eq. 3 with several targets: the point lies in any of the boxes, borders included."""
        return self.point is not None and any(box.contains(self.point) for box in boxes)


class Planner:
    """π: from screenshot, goal and history to plan, action type and value."""

    def __init__(self, engine: Engine, screens: Screens, style: Style) -> None:
        self._engine, self._screens, self.style = engine, screens, style

    def plan(self, tasks: Sequence[PlannerInput], sampling: Sampling) -> list[list[Plan]]:
        """`sampling.samples` plans for each task, in order. Raises Ended where the engine fails on one."""
        requests = [Request(self._screens.image(task.step_id), task.messages(self.style)) for task in tasks]
        result: list[list[Plan]] = []
        for task, answers in zip(tasks, self._engine.generate(requests, sampling), strict=True):
            plans = []
            for answer in answers:
                if isinstance(answer, Failure):
                    raise Ended(f"step {task.step_id}: the planner gave no answer: {answer.reason}")
                plans.append(Plan(answer.text, parse_planner(answer.text)))
            result.append(plans)
        return result


class Grounder:
    """ϕ: from screenshot and plan to a point. Greedy, so each different (screenshot, plan) is asked once and kept."""

    def __init__(self, engine: Engine, screens: Screens, style: Style, space: Space, max_tokens: int) -> None:
        self.remote = engine.remote
        self._engine, self._screens, self._style, self._space = engine, screens, style, space
        self._sampling = Sampling(max_tokens=max_tokens)
        self._kept: dict[Query, Grounding] = {}

    def ground(self, plans: Sequence[Query]) -> list[Grounding]:
        """A grounding for each (step_id, plan), in order; the engine is given the plans of one screenshot in a row.

        A kept answer took no time. A failure is not kept, and nothing of weights that answer no more.
        """
        new = sorted(set(plans) - self._kept.keys())
        requests = [Request(self._screens.image(s), grounder_messages(p, self._style)) for s, p in new]
        started = time.perf_counter()
        answers = self._engine.generate(requests, self._sampling) if requests else []
        seconds = (time.perf_counter() - started) / max(1, len(requests))
        found = {pair: self._read(pair[0], answer[0]) for pair, answer in zip(new, answers, strict=True)}
        weights = {grounding.weights for grounding in found.values() if grounding.failure is None}
        if weights and any(kept.weights not in weights for kept in self._kept.values()):
            self._kept.clear()
            return self.ground(plans)
        first = set(found)
        groundings = []
        for pair in plans:
            grounding = found.get(pair) or self._kept[pair]
            groundings.append(replace(grounding, seconds=seconds) if pair in first else grounding)
            first.discard(pair)
        self._kept |= {pair: grounding for pair, grounding in found.items() if grounding.failure is None}
        return groundings

    def keep(self, groundings: Mapping[Query, Grounding]) -> None:
        """Answers that were given before, for a run that is continued."""
        self._kept |= groundings

    def _read(self, step_id: str, answer: Generation | Failure) -> Grounding:
        if isinstance(answer, Failure):
            return Grounding(failure=answer.reason)
        coordinates = coordinate_tokens(answer.pieces)
        logprobs = [answer.logprobs[t] for t in coordinates] or list(answer.logprobs)
        if not logprobs:  # the model said nothing: that is an answer, without coordinates
            if answer.stop_logprob is None:
                return Grounding(
                    failure="the answer is empty, and the engine does not say how sure of that the model was"
                )
            logprobs = [answer.stop_logprob]
        pair = parse_grounder(answer.text)
        point = None
        if pair is not None:
            point = self._screens.viewport(step_id).point(Point(*pair, self._space), Space.ORIGINAL)
        return Grounding(
            point, mean_log_probability(logprobs), len(logprobs), answer.text, weights=answer.weights
        )  # fmt: skip


Query = tuple[str, str]
"""(step_id, plan): what a grounder is asked about."""


class GrounderPool:
    """What all grounders say of plans, each asked as soon as it can be; a context, at whose end nobody is asked any more.

    Those whose engines compute remotely are asked at the same time, each from a thread of its own, about the plans that came in
    while it gave its last answers. The others take turns on this process's device, once all plans are known.
    """

    def __init__(self, grounders: Mapping[str, Grounder]) -> None:
        self._grounders = list(grounders.values())
        self._remote = {id(grounder): _RemoteGrounder(grounder) for grounder in self._grounders if grounder.remote}

    def __enter__(self) -> GrounderPool:
        return self

    def __exit__(self, *_: object) -> None:
        for remote in self._remote.values():
            remote.end()

    def query(self, plans: Sequence[Query]) -> None:
        """Returns at once; whoever computes remotely begins with the plans that are new."""
        for remote in self._remote.values():
            remote.query(plans)

    def groundings(self, plans: Sequence[Query]) -> list[list[Grounding]]:
        """What each grounder says of each plan, in the order of the grounders. Raises what went wrong in a thread."""
        self.query(plans)
        here = {id(g): g.ground(plans) for g in self._grounders if not g.remote}
        return [here[id(g)] if id(g) in here else self._remote[id(g)].groundings(plans) for g in self._grounders]


class _RemoteGrounder:
    """A grounder that computes remotely, and the thread that asks it."""

    def __init__(self, grounder: Grounder) -> None:
        self._grounder, self._thread = grounder, ThreadPoolExecutor(1)
        self._known: set[Query] = set()
        self._waiting: SimpleQueue[Query] = SimpleQueue()
        self._turns: list[Future[None]] = []
        self._groundings: dict[Query, Grounding] = {}

    def query(self, plans: Sequence[Query]) -> None:
        new = [plan for plan in dict.fromkeys(plans) if plan not in self._known]
        self._known.update(new)
        for plan in new:
            self._waiting.put(plan)
        if new:
            self._turns.append(self._thread.submit(self._turn))

    def _turn(self) -> None:
        plans = [self._waiting.get() for _ in range(self._waiting.qsize())]  # nobody else takes any
        if plans:
            self._groundings.update(zip(plans, self._grounder.ground(plans), strict=True))

    def groundings(self, plans: Sequence[Query]) -> list[Grounding]:
        for turn in self._turns:
            turn.result()
        return [self._groundings[plan] for plan in plans]

    def end(self) -> None:
        # no waiting: after an error the rest of a turn is of no use, and ends with its engine
        self._thread.shutdown(wait=False, cancel_futures=True)


def coordinate_tokens(pieces: Sequence[bytes]) -> list[int]:
    """Positions of the tokens that hold a digit of the answer's point or box ("digit tokens of x and y only")."""
    # every byte that is no UTF-8 becomes a character of its own, so that characters can be counted back to bytes
    text = b"".join(pieces).decode(errors="surrogateescape")
    spans = [tuple(len(text[:i].encode(errors="surrogateescape")) for i in span) for span in coordinate_span(text)]
    chosen, start = [], 0
    for position, piece in enumerate(pieces):
        end = start + len(piece)
        if any(start < high and end > low for low, high in spans):
            chosen.append(position)
        start = end
    return chosen
