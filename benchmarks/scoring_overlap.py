"""GRPO whose graders compute elsewhere: optimizer steps per second, against asking them when all rollouts are there.

Three tiny grounders behind OpenAI-compatible endpoints over HTTP, served by another process on a core of its own; the trainer has
the other core. Both runs are `train_grpo`, with the same prompts, seed, draws and settings; both ask the three at the same time.
The one asks about a rollout when it ends, the other when TRL wants the rewards; a third, to tell what hides how much, when all
rollouts are sampled and log-probabilities are next. The mean rewards are asserted to be the same.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from benchmarks import baseline, tiny
from benchmarks.grpo_vs_trl import CONFIG, SEED, Clock, conclude
from coepg_dagster.experiment import Member
from coepg_dagster.inference.engine import Engine
from coepg_dagster.inference.opening import opened
from coepg_dagster.inference.vllm_server import free_port, started
from coepg_dagster.training import grpo
from coepg_dagster.training.grpo import CdremReward

NAME = "scoring_overlap"
REPETITIONS = 4
RUNS = ("when a rollout ends", "when all are sampled", "when rewards are due")
"""When graders are asked."""


class Waits:
    """How long each step waits for its rewards."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def of(self, score: Any) -> Any:
        def timed(reward: CdremReward, texts: Sequence[str], step_ids: Sequence[str]) -> list[float]:
            before = time.perf_counter()
            rewards: list[float] = score(reward, texts, step_ids)
            self.seconds.append(time.perf_counter() - before)
            return rewards

        return timed


def run(steps: pa.Table, ports: Mapping[str, int], asked: str) -> tuple[Clock, list[float]]:
    """One training, and how long each of its steps but the first waited for its rewards."""
    clock, waits = Clock(), Waits()

    def behind(member: Member, *args: Any, **settings: Any) -> AbstractContextManager[Engine]:
        there = Member(
            model="tiny", engine="openai", base_url=f"http://127.0.0.1:{ports[member.model]}/v1", processor=member.model
        )
        return opened(there, *args, **settings)

    with (
        patch.object(grpo, "opened", behind),
        patch.object(CdremReward, "score", waits.of(CdremReward.score)),
        patch.object(CdremReward, "elsewhere", asked != "when rewards are due"),
        nullcontext()
        if asked == "when a rollout ends"
        else patch.object(grpo, "as_they_end", lambda *_: nullcontext()),
    ):
        tiny.train(CONFIG, steps, SEED, clock)
    return clock, waits.seconds[1:]


def main() -> None:
    tiny.one_thread()
    log = baseline.Log(NAME)
    mine, *rest = sorted(os.sched_getaffinity(0))
    ports = {str(path): free_port() for path in tiny.GROUNDERS.values()}
    steps = tiny.train_steps(CONFIG.prompts_per_step * (CONFIG.max_steps or 1))
    rates: dict[str, list[float]] = {asked: [] for asked in RUNS}
    waited: dict[str, list[float]] = {asked: [] for asked in RUNS}
    served = [f"{checkpoint}={port}" for checkpoint, port in ports.items()]
    with tempfile.TemporaryDirectory(prefix="coepg-bench-") as folder:
        os.sched_setaffinity(0, rest[:1] or [mine])  # what is started inherits it
        with started(
            [sys.executable, "-m", "benchmarks.endpoint", *served],
            f"http://127.0.0.1:{next(iter(ports.values()))}",
            {},
            Path(folder) / "endpoint.log",
            120,
        ):
            os.sched_setaffinity(0, [mine])
            for repetition in range(REPETITIONS):
                rewards = []
                for asked in RUNS:
                    clock, seconds = run(steps, ports, asked)
                    rates[asked].append(clock.steps_per_second)
                    waited[asked].append(baseline.median(seconds))
                    rewards.append(clock.rewards)
                # sums of float32 differ with what the server answers in one batch
                np.testing.assert_allclose(rewards[:-1], [rewards[-1]] * (len(RUNS) - 1), atol=2e-3)
                log(
                    json.dumps(
                        {"repetition": repetition} | {a: [round(of[a][-1], 3) for of in (rates, waited)] for a in RUNS}
                    )
                )
    for asked in RUNS:
        log(
            f"{asked}: {baseline.median(rates[asked]):.3f} steps/s, {baseline.median(waited[asked]):.2f} s until the rewards"
        )
    conclude(
        NAME,
        log,
        {asked: rates[asked] for asked in (RUNS[0], RUNS[-1])},
        "the same graders, asked when the rewards are due",
        between={RUNS[1]: rates[RUNS[1]]},
        seconds_until_the_rewards=waited,
        cores=f"one for the trainer, {'one' if rest else 'the same'} for the graders",
        load=os.getloadavg()[1],
    )


if __name__ == "__main__":
    main()
