"""GRPO with remote graders: optimizer steps per second, against sending the queries when the rewards are due.

Three tiny grounders behind OpenAI-compatible endpoints over HTTP, served by another process on one core; the trainer has the
other core. All runs are `train_grpo` with the same prompts, seed and draws, and query the three in parallel. They differ in
the moment of the query: when a rollout ends, as we do; when all are sampled, before the log-probabilities are computed; when
TRL needs the rewards. The servers answer in batches, as vLLM does, or, the slow ones, one request at a time. The mean rewards are
asserted to be the same.
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
from coepg_dagster.experiment.models import Member
from coepg_dagster.inference.engine import Engine
from coepg_dagster.inference.opening import opened
from coepg_dagster.inference.vllm_server import free_port, started
from coepg_dagster.training import grpo, grpo_trainer
from coepg_dagster.training.cdrem_reward import CdremReward
from coepg_dagster.training.sampling import sampling_groups

NAME = "scoring_overlap"
REPETITIONS = 3
ENDS, SAMPLED, DUE = MOMENTS = ("when a rollout ends", "when all are sampled", "when rewards are due")
SERVERS = {"in batches": 16, "one at a time": 1}


def run(steps: pa.Table, ports: Mapping[str, int], moment: str) -> tuple[Clock, list[float]]:
    """One training run: its clock, and the seconds that each step but the first waited for its rewards."""
    clock, waited = Clock(), []
    score = CdremReward.score

    def behind(member: Member, *args: Any, **settings: Any) -> AbstractContextManager[Engine]:
        url = f"http://127.0.0.1:{ports[member.model]}/v1"
        there = Member(model="tiny", engine="openai", base_url=url, processor=member.model)
        return opened(there, *args, **settings)

    def unheard(model: Any, policy: Any, tell: Any) -> AbstractContextManager[None]:
        return sampling_groups(model, policy, lambda _: None)

    def timed(reward: CdremReward, texts: Sequence[str], step_ids: Sequence[str]) -> list[float]:
        before = time.perf_counter()
        rewards = score(reward, texts, step_ids)
        waited.append(time.perf_counter() - before)
        return rewards

    with (
        patch.object(grpo, "opened", behind),
        patch.object(CdremReward, "score", timed),
        nullcontext() if moment == ENDS else patch.object(grpo_trainer, "sampling_groups", unheard),
        nullcontext() if moment != DUE else patch.object(CdremReward, "remote", False),
    ):
        tiny.train(CONFIG, steps, SEED, clock)
    return clock, waited[1:]


def measured(rows: int, steps: pa.Table, log: baseline.Log) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """(optimizer steps per second, seconds until the rewards) by the moment of the query; servers answer `rows` at a time."""
    rates: dict[str, list[float]] = {moment: [] for moment in MOMENTS}
    waits: dict[str, list[float]] = {moment: [] for moment in MOMENTS}
    ports = {str(path): free_port() for path in tiny.GROUNDERS.values()}
    command = [
        sys.executable,
        "-m",
        "benchmarks.endpoint",
        str(rows),
        *(f"{path}={port}" for path, port in ports.items()),
    ]
    mine, *rest = cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="coepg-bench-") as folder:
        os.sched_setaffinity(0, rest[:1] or cores)  # what is started inherits it
        with started(command, f"http://127.0.0.1:{next(iter(ports.values()))}", {}, Path(folder) / "log", 120):
            os.sched_setaffinity(0, [mine])
            for repetition in range(REPETITIONS):
                rewards = []
                for moment in MOMENTS[repetition:] + MOMENTS[:repetition]:  # none always runs first
                    clock, waited = run(steps, ports, moment)
                    rates[moment].append(clock.steps_per_second)
                    waits[moment].append(baseline.median(waited))
                    rewards.append(clock.rewards)
                # sums of float32 differ with what a server answers in one batch
                np.testing.assert_allclose(rewards, [rewards[0]] * len(rewards), atol=2e-3)
                latest = {moment: [round(of[moment][-1], 3) for of in (rates, waits)] for moment in MOMENTS}
                log(json.dumps({"rows": rows, "repetition": repetition, "load": os.getloadavg()[0]} | latest))
        os.sched_setaffinity(0, cores)
    for moment in MOMENTS:
        log(
            f"{moment}: {baseline.median(rates[moment]):.3f} steps/s, {baseline.median(waits[moment]):.2f} s until the rewards"
        )
    return rates, waits


def main() -> None:
    tiny.one_thread()
    log = baseline.Log(NAME)
    steps = tiny.train_steps(CONFIG.prompts_per_step * (CONFIG.max_steps or 1))
    measurements = {servers: measured(rows, steps, log) for servers, rows in SERVERS.items()}
    rates, _ = measurements["in batches"]
    conclude(
        NAME,
        log,
        {moment: rates[moment] for moment in (ENDS, DUE)},
        f"the same graders, asked {DUE}",
        all_rates={servers: rates for servers, (rates, _) in measurements.items()},
        seconds_until_the_rewards={servers: waits for servers, (_, waits) in measurements.items()},
        cores="one for the trainer, one for the graders" if os.cpu_count() != 1 else "one for both",
        rows_at_a_time=SERVERS,
    )


if __name__ == "__main__":
    main()
