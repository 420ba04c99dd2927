"""Rollouts per second of whole GRPO optimizer steps on a CPU, with the sandbox's settings, against an earlier commit.

64 prompts × 8 rollouts, three grounders, from the base planner and the base grounder, which need no training first. BEFORE is
the last commit that computed a row for each rollout, and encoded screenshots and queried graders again in each step; its tree
is unpacked, and this module runs there with that tree's trainer. The sides take turns, one step at a time, each in a separate
process on one thread. The rewards of the first step are asserted to be the same; later ones differ, since the sides draw from
other random states. Loading is not counted.

Two steps see new prompts and three see them again, as 16 and 24 of the sandbox's 40 do. The visual embeddings of frozen towers
are in the store, as SFT and verdicts of the same iteration leave them; a third side starts with an empty store.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from transformers import Trainer

import coepg_dagster
from benchmarks import baseline, tiny
from coepg_dagster.experiment.training import Grpo
from coepg_dagster.inference.engine import Request, Sampling
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.project import Project

NAME: Final = "grpo_rollouts_per_second"
BEFORE: Final = "87cc44b1161ba9b315b94149ba825a88082a8685"
"""The parent of the commit that made a group one row and kept embeddings and greedy answers."""
TREE: Final = ("benchmarks", "coepg_dagster", "data/miniwob", "models")
PROMPTS, STEPS, SEED = 128, 5, 11
SETTINGS: Final = ("prompts_per_step", "group_size", "micro_batch_size", "learning_rate", "kl_beta", "max_plan_tokens")
"""Settings taken from the sandbox's GRPO. Not its schedule: BEFORE has only the cosine, which is the default here too."""
FILLED, EMPTY, OLD = SIDES = ("embeddings in the store", "an empty store", "before")

Step = dict[str, Any]
"""What a side reports of a step: wall seconds, CPU seconds, and figures of TRL's log."""


def keep_in(store: Path) -> None:
    """Makes this process read and write visual embeddings in `store`; imported here, since BEFORE has no such module."""
    from coepg_dagster.inference import visual

    visual.keep_in(store)


def train(settings: Mapping[str, Any], store: Path | None) -> None:
    """A side: prints a line when it is loaded and after each step, then waits for a line of input."""
    if store is not None:
        keep_in(store)
    tiny.one_thread()
    plain, began = Trainer.train, (time.perf_counter(), time.process_time())

    def turn(**figures: Any) -> None:
        nonlocal began
        seconds, core = time.perf_counter() - began[0], time.process_time() - began[1]
        print(json.dumps({"seconds": seconds, "core_seconds": core} | figures), flush=True)
        input()
        began = time.perf_counter(), time.process_time()

    def when_loaded(trainer: Any, *args: Any, **more: Any) -> Any:
        turn(package=coepg_dagster.__file__)
        return plain(trainer, *args, **more)

    def report(done: int, of: int, figures: Mapping[str, float]) -> None:
        if "reward" in figures:
            turn(**{name: figures[name] for name in ("reward", "completions/mean_length")})

    with patch.object(Trainer, "train", when_loaded):
        tiny.train(Grpo(**settings, max_steps=STEPS), tiny.train_steps(PROMPTS), SEED, report)


@contextmanager
def side(tree: Path, settings: Mapping[str, Any], store: Path | None, scratch: Path) -> Iterator[subprocess.Popen[str]]:
    """A side that runs in `tree`, loaded."""
    command = [sys.executable, "-m", f"benchmarks.{NAME}", "--settings", json.dumps(settings)]
    process = subprocess.Popen(
        command + (["--store", str(store)] if store else []),
        cwd=tree,
        env=os.environ | {"TMPDIR": str(scratch)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        package = Path(heard(process)["package"])
        if not package.is_relative_to(tree):
            raise AssertionError(f"what was to be measured is in {tree}, what ran in {package}")
        yield process
    finally:
        process.kill()
        process.wait()


def heard(process: subprocess.Popen[str]) -> Step:
    """The next report of a side."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            figures: Step = json.loads(line)
            return figures
    raise RuntimeError(f"a side ended with code {process.wait()}; its traceback is above")


def step(process: subprocess.Popen[str]) -> Step:
    """Lets a side take its next step."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return heard(process)


def unpack(commit: str, folder: Path) -> None:
    """Unpacks the training code of `commit` into `folder`, with this module added."""
    packed = subprocess.run(["git", "archive", commit, *TREE], cwd=tiny.ROOT, capture_output=True)
    if packed.returncode:
        raise SystemExit(f"{commit} is not in this clone: fetch its whole history ({packed.stderr.decode().strip()})")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
        tar.extractall(folder, filter="data")
    shutil.copy(__file__, folder / "benchmarks")


def fill(store: Path) -> None:
    """Encodes the screenshots with all towers, as SFT and verdicts do before GRPO."""
    from coepg_dagster.inference.agents import planner_inputs  # BEFORE has no such function

    keep_in(store)
    steps = tiny.train_steps(PROMPTS)
    for checkpoint in (Path(tiny.PLANNER), *tiny.GROUNDERS.values()):
        engine = TransformersEngine(checkpoint, dtype="float32", device="cpu", batch_size=64)
        screens = Screens(steps, engine.resize)
        requests = [Request(screens.image(task.step_id), task.messages("compact")) for task in planner_inputs(steps)]
        engine.generate(requests, Sampling(max_tokens=1))


def measure() -> None:
    tiny.one_thread()
    log = baseline.Log(NAME)
    sandbox = Project(tiny.ROOT).experiments()["sandbox"].grpo
    settings = {name: getattr(sandbox, name) for name in SETTINGS}
    taken: dict[str, list[Step]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory(prefix="coepg-bench-") as folder, ExitStack() as stack:
        here = Path(folder).resolve()
        unpack(BEFORE, here / "before")
        fill(here / "filled")
        trees = {FILLED: (tiny.ROOT, here / "filled"), EMPTY: (tiny.ROOT, here / "empty"), OLD: (here / "before", None)}
        running = {
            name: stack.enter_context(side(tree, settings, store, here)) for name, (tree, store) in trees.items()
        }
        for turn in range(STEPS):
            first = turn % len(SIDES)  # none always runs first
            for name in SIDES[first:] + SIDES[:first]:
                taken[name].append(step(running[name]))
            log(json.dumps({"step": turn, "load": os.getloadavg()[0]} | {name: taken[name][-1] for name in SIDES}))
    rewards = [steps[0]["reward"] for steps in taken.values()]
    if max(rewards) - min(rewards) > 2e-3:  # sums of float32 in another order
        raise AssertionError(f"rewards differ from the first step on: {rewards}")
    conclude(log, settings, taken)


def conclude(log: baseline.Log, settings: Mapping[str, Any], taken: Mapping[str, Sequence[Step]]) -> None:
    """Writes the baseline: rollouts per second over all steps, and ratios by kind of step."""
    rollouts = settings["prompts_per_step"] * settings["group_size"]
    new = PROMPTS // settings["prompts_per_step"]
    parts = {
        "all steps": slice(STEPS),
        "after the first": slice(1, STEPS),
        "new prompts": slice(new),
        "prompts again": slice(new, STEPS),
    }

    def total(name: str, part: str, clock: str = "seconds") -> float:
        return float(sum(figures[clock] for figures in taken[name][parts[part]]))

    ratios = {
        clock: {
            name: {part: round(total(OLD, part, clock) / total(name, part, clock), 3) for part in parts}
            for name in (FILLED, EMPTY)
        }
        for clock in ("seconds", "core_seconds")
    }
    rates = {name: rollouts * STEPS / total(name, "all steps") for name in taken}
    for name, rate in rates.items():
        seconds = ", ".join(f"{figures['seconds']:.1f}" for figures in taken[name])
        log(f"{name}: {rate:.1f} rollouts/s, steps of {seconds} s")
    for clock, by_side in ratios.items():
        log(f"times the rollouts before, by {clock.replace('_', ' ')}: {json.dumps(by_side)}")
    baseline.write(
        NAME,
        command=baseline.command_line(),
        value=round(rates[FILLED], 3),
        unit="rollouts/s of whole optimizer steps",
        against=round(rates[OLD], 3),
        against_what=f"this project at {BEFORE[:7]}, before groups were rows and anything was kept",
        ratio=ratios["seconds"][FILLED]["all steps"],
        repetitions=taken,
        device=baseline.cpu_name(),
        before=BEFORE,
        ratios=ratios,
        settings=settings,
        prompts=PROMPTS,
        threads=1,
        planner=Path(tiny.PLANNER).name,
        grounders=list(tiny.GROUNDERS),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=json.loads, help="run as a side, with these settings of GRPO")
    parser.add_argument("--store", type=Path, help="of a side: the folder of visual embeddings")
    options = parser.parse_args()
    if options.settings:
        train(options.settings, options.store)
    else:
        measure()


if __name__ == "__main__":
    main()
