"""GRPO whose graders compute elsewhere: optimizer steps per second, against asking them when all rollouts are there.

Three tiny grounders behind OpenAI-compatible endpoints over HTTP, served by another process on a core of its own; the trainer has
the other core. Both runs are `train_grpo`, with the same prompts, seed, draws and settings; both ask the three at the same time.
The one asks about a rollout when it ends, the other when TRL wants the rewards. The mean rewards are asserted to be the same.
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
REPETITIONS = 5


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


def run(steps: pa.Table, ports: Mapping[str, int], overlap: bool) -> tuple[Clock, list[float]]:
    """One training, and how long each of its steps but the first waited for rewards."""
    clock, waits = Clock(), Waits()

    def behind(member: Member, *args: Any, **settings: Any) -> AbstractContextManager[Engine]:
        there = Member(
            model="tiny", engine="openai", base_url=f"http://127.0.0.1:{ports[member.model]}/v1", processor=member.model
        )
        return opened(there, *args, **settings)

    with (
        patch.object(grpo, "opened", behind),
        patch.object(CdremReward, "score", waits.of(CdremReward.score)),
        nullcontext() if overlap else patch.object(CdremReward, "elsewhere", False),
    ):
        tiny.train(CONFIG, steps, SEED, clock)
    return clock, waits.seconds[1:]


def main() -> None:
    tiny.one_thread()
    log = baseline.Log(NAME)
    mine, *rest = sorted(os.sched_getaffinity(0))
    ports = {str(path): free_port() for path in tiny.GROUNDERS.values()}
    steps = tiny.train_steps(CONFIG.prompts_per_step * (CONFIG.max_steps or 1))
    rates: dict[str, list[float]] = {"overlap": [], "afterwards": []}
    waited: dict[str, list[float]] = {"overlap": [], "afterwards": []}
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
                together, after = run(steps, ports, overlap=True), run(steps, ports, overlap=False)
                # sums of float32 differ with what the server answers in one batch
                if any(abs(a - b) > 2e-3 for a, b in zip(together[0].rewards, after[0].rewards, strict=True)):
                    raise AssertionError(f"rewards differ: {together[0].rewards}, {after[0].rewards}")
                for name, (clock, seconds) in (("overlap", together), ("afterwards", after)):
                    rates[name].append(clock.steps_per_second)
                    waited[name].append(baseline.median(seconds))
                said = {name: [round(rates[name][-1], 4), round(waited[name][-1], 3)] for name in rates}
                log(json.dumps({"repetition": repetition, "steps/s, seconds of waiting": said}))
    conclude(
        NAME,
        log,
        rates,
        "the same graders, asked when all rollouts are sampled",
        seconds_until_the_rewards=waited,
        cores=f"one for the trainer, {'one' if rest else 'the same'} for the graders",
        load=os.getloadavg()[1],
    )


if __name__ == "__main__":
    main()
