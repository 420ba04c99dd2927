"""The simulation of the pools' queue: every chunk is made, and the time is within what any queue takes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ray_queue import Times, simulate
from coepg_dagster.running import Chunk

MEMBERS = st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(1, 12), st.floats(1, 50)), min_size=1)


def work(members: dict[str, tuple[int, float]], load: float) -> tuple[list[Chunk], Times]:
    chunks = [Chunk(name, 256 * i) for name, (n, _) in members.items() for i in range(n)]
    return chunks, Times(start=5.0, load=load, chunk={name: seconds for name, (_, seconds) in members.items()})


@given(members=MEMBERS, workers=st.integers(1, 40), load=st.floats(0, 30))
def test_it_takes_at_least_the_share_of_each_and_at_most_what_any_order_takes(
    members: dict[str, tuple[int, float]], workers: int, load: float
) -> None:
    chunks, times = work(members, load)
    total = sum(times.chunk[chunk.member] for chunk in chunks)
    longest = max(times.chunk.values()) + load
    given = simulate(chunks, workers, times)
    assert total / workers + times.start <= given.seconds + 1e-6
    assert given.seconds <= times.start + (total + load * given.loads) / min(workers, len(chunks)) + longest + 1e-6
    assert len(members) <= given.loads <= len(chunks) and given.made_again == 0
    assert given.busy == pytest.approx(total / (workers * given.seconds))


@given(members=MEMBERS, workers=st.integers(1, 10), at=st.floats(0, 200), again=st.floats(0, 200))
def test_a_lost_node_costs_its_chunk_at_most_once_each_and_nothing_is_left_out(
    members: dict[str, tuple[int, float]], workers: int, at: float, again: float
) -> None:
    chunks, times = work(members, 10.0)
    whole = simulate(chunks, workers, times)
    hurt = simulate(chunks, workers, times, lost={0: at, workers - 1: again})
    assert hurt.made_again <= 2 and hurt.loads >= len(members)
    kept = sum(times.chunk[chunk.member] for chunk in chunks)
    assert hurt.busy * workers * hurt.seconds == pytest.approx(kept), "every chunk is kept once"
    # a lost worker costs at most its chunk, a start and a load; then the order is another, by at most a chunk
    longest = max(times.chunk.values()) + times.load
    assert hurt.seconds <= whole.seconds + 2 * (times.start + 2 * longest) + longest * whole.loads + 1e-6


def test_by_hand() -> None:
    chunks, times = work({"a": (3, 10.0), "b": (1, 10.0)}, load=2.0)
    assert simulate(chunks, 1, times).seconds == 5 + 2 + 30 + 2 + 10
    two = simulate(
        chunks, 2, times
    )  # both begin with `a`, of which most are left; one goes on with it, the other has `b`
    assert (two.seconds, two.loads) == (5 + 2 + 10 + 2 + 10, 3)
    assert simulate(chunks, 4, times).seconds == 5 + 2 + 10
    assert simulate(chunks, 400, times).busy == pytest.approx(40 / (400 * 17)), "workers without a chunk wait"
    assert simulate(chunks, 4, times, slow={1: 3.0}).seconds == 5 + 2 + 30, "the slowest decides"
    lost = simulate(chunks, 4, times, lost={2: 12.0})
    assert (lost.seconds, lost.made_again) == (17 + 10, 1), "who holds its model is free before another has started"
    slowest = simulate(chunks, 4, times, slow={2: 3.0}, lost={2: 33.0})
    assert (slowest.seconds, slowest.made_again) == (33 + 10, 1), "who has nothing to do takes it at once"
    assert math.isclose(simulate([], 4, times).seconds, 0.0)
