"""Which groups get an earlier success, which successes are kept, and that a continued training has the same."""

from __future__ import annotations

import doctest
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.experiment.training import Replay
from coepg_dagster.training import replay
from coepg_dagster.training.replay import ReplayBuffer, Success


def buffer(**settings: float) -> ReplayBuffer:
    return ReplayBuffer(**Replay.model_validate(settings).model_dump())


def success(number: int) -> Success:
    return Success([number], [-number / 10], number)


def test_arpos_rule_by_hand() -> None:
    """Mean below 0.2 and standard deviation (N) below 0.05."""
    assert doctest.testmod(replay) == (0, 1)
    rewards = np.array([[0.0, 0, 0, 0], [0.15, 0.15, 0.15, 0.24], [0.15, 0.15, 0.15, 0.26], [0.2, 0.2, 0.2, 0.2]])
    assert rewards.std(axis=1).round(3).tolist() == [0, 0.039, 0.048, 0]
    assert buffer().wants(rewards).tolist() == [True, True, True, False]
    assert buffer(below_std=0.04).wants(rewards).tolist() == [True, True, False, False]
    assert buffer().wants(np.array([[0.0, 0, 0, 0.7]])).tolist() == [False], "it has a success of its own"


def test_the_last_successes_stay_first_in_first_out() -> None:
    kept = buffer(size=2)
    kept.add(("s", None), [success(1), success(2)], [0.1, 1.0])
    assert kept.draw(("s", None), 0) == success(2), "0.1 is not above 0.1"
    kept.add(("s", None), [success(3), success(4)], [0.5, 0.2])
    drawn = [kept.draw(("s", None), seed) for seed in range(20)]
    assert success(3) in drawn and success(4) in drawn and all(one in (success(3), success(4)) for one in drawn)
    assert kept.draw(("s", "a plan"), 0) is None and kept.draw(("t", None), 0) is None


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from([None, "p"]), st.floats(0, 1), st.floats(-9, 0)), max_size=30
    ),
    st.integers(1, 4),
)
def test_what_is_read_again_draws_the_same(answers: list[tuple[str, str | None, float, float]], size: int) -> None:
    """Tokens and log-probabilities to the last bit; never more than `size`, and only successes."""
    one, other = buffer(size=size), buffer(size=size)
    for i, (step_id, plan, reward, logprob) in enumerate(answers):
        one.add((step_id, plan), [Success([i, 7], [logprob, logprob / 3], i)], [reward])
    with tempfile.TemporaryDirectory() as folder:
        one.save(Path(folder))
        other.load(Path(folder))
    for asked in {(step_id, plan) for step_id, plan, *_ in answers}:
        rewarded = [i for i, (*of, reward, _) in enumerate(answers) if tuple(of) == asked and reward > 0.1][-size:]
        drawn = [one.draw(asked, 3, step) for step in range(12)]
        assert drawn == [other.draw(asked, 3, step) for step in range(12)]
        assert {made.sampled_in for made in drawn if made} <= set(rewarded) and (None in drawn) == (not rewarded)
