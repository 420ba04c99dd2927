"""The planner π (Eq. 1) and the grounder ϕ (Eq. 2): an engine, the prompts, and the grounding of answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Final

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
    """What a planner sees of a step (Eq. 1): the columns VISIBLE. The screenshot is looked up by the id."""

    step_id: str
    goal: str
    history: tuple[str, ...]
    instruction: str | None = None  # of this step, if models may see it
    hint: str | None = None  # the label's action, for pool planners with `hindsight_hint`
    scroll: bool = False  # whether it can go on to a further part of the page

    def messages(self, style: Style) -> list[Message]:
        """The chat that asks π for this step's plan."""
        return planner_messages(self.goal, self.history, style, self.instruction, self.hint, self.scroll)

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
    """A planner's answer: its text, and what was parsed from it (None: not a plan)."""

    text: str
    answer: PlannerAnswer | None


@dataclass(frozen=True)
class Grounding:
    """A grounder's answer for one plan.

    `point` is in pixels of the stored screenshot, or None if the answer holds no coordinates. `mean_logprob` is Eq. 6
    over the `tokens` coordinate tokens (over all tokens of an answer without coordinates; over the stop token of an empty
    answer). If the grounder gave no answer at all, `failure` is set and all else is empty. `seconds` is this answer's share
    of the time that its batch took, `weights` the version of the weights that answered. `passing` is that of the Failure.
    """

    point: Point | None = None
    mean_logprob: float = 0.0
    tokens: int = 0
    text: str = ""
    failure: str | None = None
    passing: bool = field(default=False, compare=False)
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
        result: list[list[Plan]] = []
        for task, answers in zip(tasks, self.answers(tasks, sampling), strict=True):
            plans = []
            for answer in answers:
                if isinstance(answer, Failure):
                    raise Ended(f"step {task.step_id}: the planner gave no answer: {answer.reason}")
                plans.append(answer)
            result.append(plans)
        return result

    def answers(self, tasks: Sequence[PlannerInput], sampling: Sampling) -> list[list[Plan | Failure]]:
        """As `plan`, with the failures of the engine among the plans."""
        requests = [Request(self._screens.image(task.step_id), task.messages(self.style)) for task in tasks]
        return [
            [
                answer if isinstance(answer, Failure) else Plan(answer.text, parse_planner(answer.text))
                for answer in answers
            ]
            for answers in self._engine.generate(requests, sampling)
        ]


class Grounder:
    """ϕ: from screenshot and plan to a point. Decoding is greedy, so the answer to each different query is computed once."""

    def __init__(self, engine: Engine, screens: Screens, style: Style, space: Space, max_tokens: int) -> None:
        self.remote = engine.remote
        self._engine, self._screens, self._style, self._space = engine, screens, style, space
        self._sampling = Sampling(max_tokens=max_tokens)
        self._kept: dict[Query, Grounding] = {}

    def ground(self, queries: Sequence[Query]) -> list[Grounding]:
        """A grounding for each query, in order. The engine gets the plans of one screenshot one after another.

        Answers are kept, and take 0 seconds when used again. Failures are not kept, nor answers of other weights than the
        newest answers come from.
        """
        new = sorted(set(queries) - self._kept.keys())
        requests = [Request(self._screens.image(s), grounder_messages(p, self._style)) for s, p in new]
        started = time.perf_counter()
        answers = self._engine.generate(requests, self._sampling) if requests else []
        seconds = (time.perf_counter() - started) / max(1, len(requests))
        computed = {query: self._read(query[0], answer[0]) for query, answer in zip(new, answers, strict=True)}
        weights = {grounding.weights for grounding in computed.values() if grounding.failure is None}
        if weights and any(kept.weights not in weights for kept in self._kept.values()):
            self._kept.clear()
            return self.ground(queries)
        first = set(computed)
        groundings = []
        for query in queries:
            grounding = computed.get(query) or self._kept[query]
            groundings.append(replace(grounding, seconds=seconds) if query in first else grounding)
            first.discard(query)
        self._kept |= {query: grounding for query, grounding in computed.items() if grounding.failure is None}
        return groundings

    def keep(self, groundings: Mapping[Query, Grounding]) -> None:
        """Adds answers of an earlier run that is being continued."""
        self._kept |= groundings

    def _read(self, step_id: str, answer: Generation | Failure) -> Grounding:
        if isinstance(answer, Failure):
            return Grounding(failure=answer.reason, passing=answer.passing)
        coordinates = coordinate_tokens(answer.pieces)
        logprobs = [answer.logprobs[t] for t in coordinates] or list(answer.logprobs)
        if not logprobs:  # an empty answer is an answer, without coordinates
            if answer.stop_logprob is None:
                return Grounding(
                    failure="the answer is empty, and the engine gives no log-probability of its stop token"
                )
            logprobs = [answer.stop_logprob]
        pair = parse_grounder(answer.text)
        point = None
        if pair is not None:
            point = self._screens.viewport(step_id).point(Point(*pair, self._space), Space.ORIGINAL)
        return Grounding(
            point, mean_log_probability(logprobs), len(logprobs), answer.text, weights=answer.weights
        )  # fmt: skip


PASSING_AT_MOST: Final = 0.01
"""The share of queries that a server may leave unanswered; two always may be."""


def is_outage(failed: int, of: int) -> bool:
    """Whether so many of `of` queries got no answer that it is no chance."""
    return failed > max(2, PASSING_AT_MOST * of)


def refuse_outage(name: str, groundings: Sequence[Grounding]) -> None:
    """Raises Ended if the server of a grounder left more queries unanswered than chance does: the rest would be votes without it.

    A few are counted as failures, so that one request that a server cannot answer does not stop the loop for ever.
    """
    failed = [grounding.failure or "" for grounding in groundings if grounding.passing]
    assert_answered(name, failed, len(groundings), "plans")


def assert_answered(name: str, reasons: Sequence[str], of: int, what: str) -> None:
    """Raises Ended in an outage of a model's server, of `what`, such as "plans"; `reasons`: why each unanswered query is."""
    if is_outage(len(reasons), of):
        raise Ended(
            f"{name}: {len(reasons)} of {of} {what} got no answer: {reasons[0]}. "
            "Check its server and run again: what was finished is kept"
        )


Query = tuple[str, str]
"""(step_id, plan): one question to a grounder."""


class GrounderPool:
    """All grounders of a pool, each queried as early as possible. A context manager: at its end, remaining queries are dropped.

    Grounders with a remote engine work at the same time, each in its own thread: while one answers, new queries wait for its
    next batch. The others take turns on this process's device, once all plans are known.
    """

    def __init__(self, grounders: Mapping[str, Grounder]) -> None:
        self._grounders = list(grounders.values())
        self._remote = {id(grounder): _RemoteGrounder(grounder) for grounder in self._grounders if grounder.remote}

    def __enter__(self) -> GrounderPool:
        return self

    def __exit__(self, *_: object) -> None:
        for remote in self._remote.values():
            remote.end()

    def query(self, queries: Sequence[Query]) -> None:
        """Starts remote grounders on the queries that are new; returns at once."""
        for remote in self._remote.values():
            remote.query(queries)

    def groundings(self, queries: Sequence[Query]) -> list[list[Grounding]]:
        """For each grounder, in order, its grounding of each query. Raises any error of a grounder's thread."""
        self.query(queries)
        local = {id(g): g.ground(queries) for g in self._grounders if not g.remote}
        return [local[id(g)] if id(g) in local else self._remote[id(g)].groundings(queries) for g in self._grounders]


class _RemoteGrounder:
    """A grounder with a remote engine, and the thread that queries it."""

    def __init__(self, grounder: Grounder) -> None:
        self._grounder, self._thread = grounder, ThreadPoolExecutor(1)
        self._submitted: set[Query] = set()
        self._waiting: SimpleQueue[Query] = SimpleQueue()
        self._turns: list[Future[None]] = []
        self._groundings: dict[Query, Grounding] = {}

    def query(self, queries: Sequence[Query]) -> None:
        new = [query for query in dict.fromkeys(queries) if query not in self._submitted]
        self._submitted.update(new)
        for query in new:
            self._waiting.put(query)
        if new:
            self._turns.append(self._thread.submit(self._turn))

    def _turn(self) -> None:
        queries = [self._waiting.get() for _ in range(self._waiting.qsize())]  # this thread is the only consumer
        if queries:
            self._groundings.update(zip(queries, self._grounder.ground(queries), strict=True))

    def groundings(self, queries: Sequence[Query]) -> list[Grounding]:
        for turn in self._turns:
            turn.result()
        return [self._groundings[query] for query in queries]

    def end(self) -> None:
        # does not wait: after an error the rest of a turn is useless, and ends with its engine
        self._thread.shutdown(wait=False, cancel_futures=True)


def coordinate_tokens(pieces: Sequence[bytes]) -> list[int]:
    """Positions of the tokens that hold a digit of the answer's point or box ("digit tokens of x and y only").

    `pieces` are the bytes of each token, shape (tokens,).
    """
    # every byte that is not UTF-8 becomes one character, so that characters can be counted back to bytes
    text = b"".join(pieces).decode(errors="surrogateescape")
    spans = [tuple(len(text[:i].encode(errors="surrogateescape")) for i in span) for span in coordinate_span(text)]
    chosen, start = [], 0
    for position, piece in enumerate(pieces):
        end = start + len(piece)
        if any(start < high and end > low for low, high in spans):
            chosen.append(position)
        start = end
    return chosen
