"""Ways to infer (plug-ins of kind `inference`): what planner and grounder are asked at a step, and how answers become an action.

`evaluation.inference` of an experiment file names them; each is scored as a further pair beside the agent, whose own number is
greedy as ever. A way is a function of Agent, which asks the models; its keyword-only parameters are its settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Protocol

import numpy as np
from pydantic import Field

from coepg_dagster.geometry import Box, Point, Size, Space
from coepg_dagster.plugins import plugin
from coepg_dagster.prompts import PlannerAnswer, json_object
from coepg_dagster.strategies.curation import square

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class Answered:
    """What a way answers at a step: the planner's text with what was read from it (None: no plan), and the grounder's point.

    `point` is in pixels of the stored screenshot. `confidence`, 0 to 1, is None where the way has none of its own.
    """

    text: str
    answer: PlannerAnswer | None
    point: Point | None = None
    grounder_text: str = ""
    confidence: float | None = None


class Agent(Protocol):
    """π and ϕ at N steps. Every list has an entry for each step asked about, in order. Points are pixels of the screenshot."""

    @property
    def sizes(self) -> Sequence[Size]:
        """The stored screenshot of each step."""
        ...

    @property
    def seed(self) -> int: ...

    def plans(self, steps: Sequence[int], samples: int = 1, temperature: float = 0.0) -> list[list[Answered]]:
        """`samples` plans of π for each of `steps`, without points."""
        ...

    def points(
        self,
        queries: Sequence[tuple[int, str]],
        samples: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
        crops: Sequence[Box] | None = None,
    ) -> list[list[tuple[Point | None, str]]]:
        """`samples` points of ϕ, with its text, for each (step, plan); ϕ sees `crops` of the screenshots, if given."""
        ...

    def ask(self, questions: Sequence[tuple[int, str]]) -> list[str]:
        """π's greedy answer to a question about the screenshot of a step."""
        ...


def grounded(agent: Agent, planned: Sequence[Answered]) -> list[Answered]:
    """One plan for each step, each with ϕ's greedy point."""
    queries = [(i, one.answer.plan) for i, one in enumerate(planned) if one.answer]
    found = iter(agent.points(queries)) if queries else iter(())
    return [_with(one, next(found)[0]) if one.answer else one for one in planned]


def _with(one: Answered, found: tuple[Point | None, str], confidence: float | None = None) -> Answered:
    return Answered(one.text, one.answer, found[0], found[1], confidence)


# --- GUI-RC -----------------------------------------------------------------------------------------------------------


@plugin("inference", "GUI-RC (arXiv 2508.05615)")
def region_vote(
    agent: Agent,
    *,
    samples: Annotated[int, Field(ge=2, le=256)] = 64,
    temperature: Positive = 0.5,
    top_p: Share = 0.95,
    side: Positive = 50.0,
) -> list[Answered]:
    """ϕ answers each greedy plan `samples` times; the point is the centre of where most answers agree (`consensus`).

    A point counts as a square of `side` px of the stored screenshot. Settings are the paper's; its code samples at 0.7. The
    confidence is v_max / samples.
    """
    planned = [first for (first,) in agent.plans(range(len(agent.sizes)))]
    queries = [(i, one.answer.plan) for i, one in enumerate(planned) if one.answer]
    sampled = iter(agent.points(queries, samples, temperature, top_p) if queries else ())
    result = []
    for one in planned:
        if one.answer is None:
            result.append(one)
            continue
        answers = next(sampled)
        regions = [square(point, side) for point, _ in answers if point is not None]
        centre, votes = consensus(regions)
        result.append(_with(one, (centre, " ".join(text for _, text in answers)), votes / samples))
    return result


def consensus(regions: Sequence[Box]) -> tuple[Point | None, int]:
    """(the centre of the region where most of `regions` overlap, v_max, how many do); (None, 0) without regions.

    v(x, y) is the number of regions that hold the point. Of the connected areas where v is maximal the largest is taken, and
    of it the bounding rectangle. Exact: v is constant between neighbouring edges of the regions. GUI-RC counts pixels.

    >>> consensus([Box(0, 0, 4, 4, Space.ORIGINAL), Box(2, 2, 6, 6, Space.ORIGINAL), Box(20, 0, 21, 1, Space.ORIGINAL)])
    (Point(x=3.0, y=3.0, space=<Space.ORIGINAL: 'original'>), 2)
    """
    if not regions:
        return None, 0
    from scipy.ndimage import find_objects, label  # slow to import

    xs = np.unique([edge for box in regions for edge in (box.x1, box.x2)])
    ys = np.unique([edge for box in regions for edge in (box.y1, box.y2)])
    votes = np.zeros((max(1, len(ys) - 1), max(1, len(xs) - 1)), dtype=np.int64)
    for box in regions:
        x1, x2 = np.searchsorted(xs, (box.x1, box.x2))
        y1, y2 = np.searchsorted(ys, (box.y1, box.y2))
        votes[y1:y2, x1:x2] += 1
    areas, count = label(votes == votes.max())
    sizes = np.outer(np.diff(ys), np.diff(xs))
    largest = max(range(1, count + 1), key=lambda area: (float(sizes[areas == area].sum()), -area))
    down, across = find_objects(areas)[largest - 1]
    centre = (xs[across.start] + xs[across.stop]) / 2, (ys[down.start] + ys[down.stop]) / 2
    return Point(float(centre[0]), float(centre[1]), regions[0].space), int(votes.max())


# --- crop and zoom ----------------------------------------------------------------------------------------------------


@plugin(
    "inference", "Iris (information-sensitive cropping), as crop and zoom; the rule of the crop is this project's own"
)
def zoom(agent: Agent, *, share: Share = 0.5) -> list[Answered]:
    """ϕ answers twice: on the whole screenshot, then on a crop around its first point, `share` of each side (`crop_around`).

    Departs: Iris finds crops by the density of edges. Without a point in the crop the first one stays.
    """
    first = grounded(agent, [plan for (plan,) in agent.plans(range(len(agent.sizes)))])
    again = [i for i, one in enumerate(first) if one.point is not None]
    queries = [(i, first[i].answer.plan) for i in again]  # type: ignore[union-attr]
    crops = [crop_around(first[i].point, agent.sizes[i], share) for i in again]  # type: ignore[arg-type]
    for i, ((point, text),) in zip(again, agent.points(queries, crops=crops) if queries else (), strict=True):
        if point is not None:
            first[i] = _with(first[i], (point, text))
    return first


def crop_around(point: Point, size: Size, share: float) -> Box:
    """A box of `share` of each side of a screenshot, whole pixels, centred on `point` as far as the screenshot allows.

    >>> crop_around(Point(10, 90, Space.ORIGINAL), Size(100, 100), 0.5)
    Box(x1=0, y1=50, x2=50, y2=100, space=<Space.ORIGINAL: 'original'>)
    """
    width, height = max(1, round(size.width * share)), max(1, round(size.height * share))
    x = min(max(round(point.x - width / 2), 0), size.width - width)
    y = min(max(round(point.y - height / 2), 0), size.height - height)
    return Box(x, y, x + width, y + height, Space.ORIGINAL)


# --- best of K plans --------------------------------------------------------------------------------------------------

_JUDGE: Final = """Several next actions were proposed for this screenshot.
{candidates}
Answer with one JSON object and nothing else, the number of the best proposal: {{"index": 1}}"""


@plugin("inference", "GTA1 (arXiv 2507.05791), test-time scaling")
def best_of_plans(
    agent: Agent, *, plans: Annotated[int, Field(ge=2, le=32)] = 4, temperature: Positive = 1.0
) -> list[Answered]:
    """π proposes `plans` plans for a step and is then its own judge: it sees them numbered and names one.

    The judge's prompt is not published; this is this project's. If its answer names no proposal, the majority of (type,
    value) decides (`majority`). Only the chosen plan is grounded.
    """
    sampled = agent.plans(range(len(agent.sizes)), plans, temperature)
    options = [[one for one in of_step if one.answer] for of_step in sampled]
    asked = [i for i, of_step in enumerate(options) if len({one.answer for one in of_step}) > 1]
    verdicts = dict(
        zip(asked, agent.ask([(i, judge_question(options[i])) for i in asked]) if asked else (), strict=True)
    )
    chosen = []
    for i, of_step in enumerate(options):
        if not of_step:
            chosen.append(sampled[i][0])
            continue
        index = judged(verdicts[i], len(of_step)) if i in verdicts else None
        chosen.append(of_step[majority([one.answer for one in of_step if one.answer]) if index is None else index])
    return grounded(agent, chosen)


def judge_question(options: Sequence[Answered]) -> str:
    """The question to the judge: the proposals, numbered from 1."""
    lines = [
        f"{i}. {one.answer.plan} ({' '.join(filter(None, (one.answer.action_type, one.answer.value)))})"
        for i, one in enumerate(options, 1)
        if one.answer
    ]
    return _JUDGE.format(candidates="\n".join(lines))


def judged(text: str, options: int) -> int | None:
    """The position, from 0, that a judge's answer names; None: it names none of the `options`.

    >>> judged('The second: {"index": 2}', 3), judged('{"index": 9}', 3), judged("none", 3)
    (1, None, None)
    """
    index = (json_object(text, "index") or {}).get("index")
    return index - 1 if isinstance(index, int) and not isinstance(index, bool) and 1 <= index <= options else None


def majority(answers: Sequence[PlannerAnswer]) -> int:
    """The position of the first answer whose (type, value) is the most frequent; of equal ones the first."""
    actions = [(answer.action_type, answer.value) for answer in answers]
    (most, _), *_ = Counter(actions).most_common(1)
    return actions.index(most)


# --- check before acting ----------------------------------------------------------------------------------------------

_CHECK: Final = """A next action was proposed for this screenshot.
Plan: {plan}
Action: {action}
Do plan and action say the same thing, and can it be done here? Answer with one JSON object and nothing else: \
{{"consistent": true}}"""


@plugin("inference", "D-Artemis, check of thought and action before execution")
def consistency_check(
    agent: Agent, *, retries: Annotated[int, Field(ge=1, le=8)] = 2, temperature: Positive = 1.0
) -> list[Answered]:
    """Before a plan is grounded π is asked whether plan and action agree; where not, it plans again, up to `retries` times.

    Departs: D-Artemis has a trained critic, and corrects by kind of error; here π checks itself and samples another plan. If
    all are refused, the greedy plan stays. An answer that cannot be read refuses nothing.
    """
    planned = [first for (first,) in agent.plans(range(len(agent.sizes)))]
    result, open_ = list(planned), [i for i, one in enumerate(planned) if one.answer]
    others = agent.plans(open_, retries, temperature) if open_ else []
    tries = {i: [planned[i], *(one for one in more if one.answer)] for i, more in zip(open_, others, strict=True)}
    for turn in range(retries + 1):
        open_ = [i for i in open_ if turn < len(tries[i])]
        if not open_:
            break
        answers = agent.ask([(i, check_question(tries[i][turn].answer)) for i in open_])  # type: ignore[arg-type]
        accepted = {i for i, text in zip(open_, answers, strict=True) if not refuses(text)}
        for i in accepted:
            result[i] = tries[i][turn]
        open_ = [i for i in open_ if i not in accepted]
    return grounded(agent, result)


def check_question(answer: PlannerAnswer) -> str:
    """The question whether a plan and its action agree."""
    return _CHECK.format(plan=answer.plan, action=" ".join(filter(None, (answer.action_type, answer.value))))


def refuses(text: str) -> bool:
    """Whether a check's answer says no.

    >>> refuses('{"consistent": false}'), refuses('{"consistent": true}'), refuses("perhaps")
    (True, False, False)
    """
    return (json_object(text, "consistent") or {}).get("consistent") is False
