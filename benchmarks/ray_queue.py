"""Pool work of web_7b on 8, 64 and 512 cards of a Ray cluster, simulated: how long, and what share of the cards works.

Times of chunks are those of `coepg plan` for one H100, the start of a worker and loading a model those of `one_iteration`.
Each row also with a worker in twenty half as fast, and with a node of eight cards lost in the middle. Nothing is run, and
no GPU is needed. `value` is the time on 64 cards; `ratio` is how many times faster that is than 8, `against` their time.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from benchmarks.baseline import FOLDER, Log, command_line, write
from coepg_dagster.planning.dryrun import DryRun, Hardware
from coepg_dagster.planning.estimates import CARDS, StageEstimate, rates_of
from coepg_dagster.project import find_project
from coepg_dagster.running import CHUNK, Chunk, next_chunk, taker

NAME: Final = "ray_queue"
EXPERIMENT: Final = "web_7b"
CARD: Final = CARDS["H100-80GB"]
CARDS_OF_CLUSTERS: Final = (8, 64, 512)
NODE: Final = 8
START: Final = 15.0
"""Seconds until a worker can load a model."""
LOAD: Final = 12.0
"""Seconds to load one of 7B."""


@dataclass(frozen=True)
class Times:
    """Seconds of what a worker does."""

    start: float  # until a new worker can load a model
    load: float  # a member's model
    chunk: Mapping[str, float]  # member → one of its chunks


@dataclass(frozen=True)
class Simulated:
    """What a simulation gave."""

    seconds: float  # until the last chunk is there
    busy: float  # share of the workers' time in which they make chunks that are kept
    loads: int
    made_again: int  # chunks of workers that were lost


def simulate(
    chunks: Sequence[Chunk],
    workers: int,
    times: Times,
    slow: Mapping[int, float] | None = None,
    lost: Mapping[int, float] | None = None,
) -> Simulated:
    """Chunks on `workers` workers, of which each takes the next one when it is free.

    Args:
        slow: worker, 0 to `workers` - 1 → how many times as long it takes for a chunk.
        lost: worker → the second at which its node goes. A worker without work takes its chunk, and another of usual speed
            its place.
    """
    slow, lost, left = dict(slow or {}), dict(lost or {}), list(chunks)
    names, held, idle = count(), dict[int, str | None](), list[int]()
    kept, end, loads, again = 0.0, 0.0, 0, 0
    # when a worker asks for a chunk, the worker, and the chunk of a worker that is lost at this moment
    asks: list[tuple[float, int, Chunk | None]] = []
    for _ in range(min(workers, len(left))):
        heapq.heappush(asks, (times.start, next(names), None))
    while asks:
        now, worker, back = heapq.heappop(asks)
        if back is not None:
            left.append(back)
            again += 1
            heapq.heappush(asks, (now + times.start, next(names), None))
            if not idle:
                continue
            worker = taker(back, idle, held)
            idle.remove(worker)
        elif not left:
            idle.append(worker)
            continue
        chunk = next_chunk(left, held.get(worker))
        left.remove(chunk)
        loaded = held.get(worker) != chunk.member
        held[worker] = chunk.member
        loads += loaded
        works = times.chunk[chunk.member] * slow.get(worker, 1.0)
        done, gone = now + loaded * times.load + works, lost.get(worker, float("inf"))
        if gone < done:
            heapq.heappush(asks, (max(now, gone), worker, chunk))
            continue
        kept, end = kept + works, max(end, done)
        heapq.heappush(asks, (done, worker, None))
    return Simulated(end, kept / (workers * end) if end else 1.0, loads, again)


def pool(stage: StageEstimate, members: int, steps: int) -> tuple[list[Chunk], Times]:
    """The chunks of a pool of equal members, and what each takes on one card."""
    names = [f"member_{i}" for i in range(members)]
    starts = range(0, steps, CHUNK)
    each = stage.gpu_seconds / members / len(starts)
    return [Chunk(name, start) for name in names for start in starts], Times(START, LOAD, dict.fromkeys(names, each))


def measured(chunks: list[Chunk], times: Times, cards: int) -> Mapping[str, Any]:
    """Seconds as it should be, with stragglers and with a lost node; share of the cards at work; loads."""
    usual = simulate(chunks, cards, times)
    slow = simulate(chunks, cards, times, slow={i: 2.0 for i in range(0, cards, 20)})
    lost = simulate(chunks, cards, times, lost={i: usual.seconds / 2 for i in range(NODE)})
    return {
        "seconds": round(usual.seconds),
        "busy": round(100 * usual.busy),
        "loads": usual.loads,
        "seconds with stragglers": round(slow.seconds),
        "seconds with a lost node": round(lost.seconds),
        "made again": lost.made_again,
    }


def main() -> None:
    say, experiment = Log(NAME), find_project().experiments().named(EXPERIMENT)
    dry = DryRun(experiment, find_project().root)
    stages = {stage.asset: stage for stage in dry.stages(Hardware(CARD), rates_of(CARD, FOLDER))}
    trained = experiment.regeneration.trained_members
    members = {"candidate_plans": 1 + trained, "verdicts": trained}  # of the open models only one has no endpoint
    runs: dict[str, Any] = {}
    for asset, n in members.items():
        chunks, times = pool(stages[asset], n, dry.train_steps)
        for cards in CARDS_OF_CLUSTERS:
            runs[f"{asset}, {cards} cards"] = one = measured(chunks, times, cards)
            say(f"{asset}, {len(chunks)} chunks of {times.chunk['member_0']:.0f} s, {cards} cards: {one}")
    for asset in ("planner_sft", "grounder", "planner"):
        say(f"{asset}, one worker: {stages[asset].gpu_seconds / 3600:.1f} hours")
    value, against = (runs[f"candidate_plans, {cards} cards"]["seconds"] for cards in (64, 8))
    write(
        NAME,
        command=command_line(),
        value=value,
        unit="s for candidates on 64 cards, simulated",
        against=against,
        ratio=against / value,
        repetitions=[value],
        log=say.path,
        runs=runs,
    )


if __name__ == "__main__":
    main()
