"""C-DREM scoring on a CPU: scored rollouts per second, against the plain loop of one call at a time.

Three tiny grounders, G = 8, real MiniWoB++ screens, rollouts sampled from the base planner. Ours: gate first, each
different (screenshot, plan) once, the plans of a screenshot behind one shared prefix, batched. Both run on one thread, in
turns, each repetition on prompts that are new to both; the rewards are asserted to be the same.
"""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa

from benchmarks import baseline, tiny
from benchmarks.plain import PlainGrounder, PlainReward
from coepg_dagster.experiment.training import Grpo
from coepg_dagster.geometry import Space
from coepg_dagster.inference.agents import Grounder
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.steps import GATE_PASSED
from coepg_dagster.training.cdrem_reward import CdremReward

NAME = "scoring_cpu"
GROUP, PROMPTS, REPETITIONS, BATCH = 8, 16, 5, 64


def main() -> None:
    tiny.one_thread()
    log = baseline.Log(NAME)
    steps = tiny.train_steps(PROMPTS * (REPETITIONS + 1))
    texts, step_ids = tiny.rollouts(steps, GROUP, seed=7)
    engines = {
        name: TransformersEngine(path, dtype="float32", device="cpu", batch_size=BATCH)
        for name, path in tiny.GROUNDERS.items()
    }
    resize = next(iter(engines.values())).resize
    grounders = {name: PlainGrounder(path, tiny.MAX_POINT_TOKENS) for name, path in tiny.GROUNDERS.items()}

    def ours(part: pa.Table) -> CdremReward:
        screens = Screens(part, resize)
        batched = {
            name: Grounder(engine, screens, "compact", Space.RESIZED, tiny.MAX_POINT_TOKENS)
            for name, engine in engines.items()
        }
        return CdremReward(batched, tiny.PRIORS, part, screens, Grpo())

    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    cpu: dict[str, list[float]] = {"ours": [], "plain": []}
    calls, passed = 0, 0
    for repetition in range(REPETITIONS + 1):
        part = steps.slice(repetition * PROMPTS, PROMPTS)
        rows = slice(repetition * PROMPTS * GROUP, (repetition + 1) * PROMPTS * GROUP)
        fast, slow = ours(part), PlainReward(grounders, tiny.PRIORS, part)
        started, cpu_started = time.perf_counter(), time.process_time()
        rewards = fast.score(texts[rows], step_ids[rows])
        between, cpu_between = time.perf_counter(), time.process_time()
        expected = slow.score(texts[rows], step_ids[rows])
        ended, cpu_ended = time.perf_counter(), time.process_time()
        # float32 sums differ with the batch
        np.testing.assert_allclose(rewards, expected, atol=1e-4)
        if repetition == 0:
            continue  # warm-up
        seconds["ours"].append(between - started)
        seconds["plain"].append(ended - between)
        cpu["ours"].append(cpu_between - cpu_started)
        cpu["plain"].append(cpu_ended - cpu_between)
        calls += slow.calls
        passed += sum(row["gate"] == GATE_PASSED for row in fast.rows)
        log(f"{repetition}: ours {between - started:.2f} s, plain {ended - between:.2f} s, same rewards")
    scored = PROMPTS * GROUP
    rates = {name: [scored / t for t in times] for name, times in seconds.items()}
    value, against = (baseline.median(rates[name]) for name in ("ours", "plain"))
    log(f"{value:.1f} against {against:.2f} scored rollouts/s: {value / against:.1f} times")
    baseline.write(
        NAME,
        command=baseline.command_line(),
        value=value,
        unit="scored rollouts/s",
        against=against,
        ratio=value / against,
        ratio_of_cpu_time=baseline.median(cpu["plain"]) / baseline.median(cpu["ours"]),
        repetitions={"rollouts/s": rates, "seconds": seconds, "cpu seconds": cpu},
        device=baseline.cpu_name(),
        against_what="one call of transformers' generate per rollout and grounder",
        threads=1,
        grounders=list(tiny.GROUNDERS),
        group_size=GROUP,
        prompts=PROMPTS,
        calls_of_the_plain_loop=calls,
        gate_passed=100 * passed / (scored * REPETITIONS),
    )


if __name__ == "__main__":
    main()
