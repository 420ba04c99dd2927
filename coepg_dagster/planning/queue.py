"""How long pool work takes on a Ray cluster: the queue of `ray_cluster` with known times, and nothing run."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from coepg_dagster.running import Chunk, next_chunk


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
    names, held, idle = count(), dict[int, str](), list[int]()
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
            worker = next((one for one in idle if held.get(one) == back.member), idle[-1])
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
