"""Shared by the CPU benchmarks: the embedded benchmark's screens and models, and rollouts of its planner."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads slow tiny models, and wait for each other on few cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import tempfile
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import torch

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Grpo
from coepg_dagster.inference.agents import Planner, planner_inputs
from coepg_dagster.inference.engine import Sampling
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.progress import Report
from coepg_dagster.sandbox.miniwob.reader import load_snapshot

ROOT: Final = Path(__file__).parents[1]
MODELS: Final = ROOT / "models"
PLANNER: Final = str(MODELS / "base-planner")
GROUNDERS: Final = {
    "base_grounder": MODELS / "base-grounder",
    "verifier_a": MODELS / "verifier-a",
    "verifier_b": MODELS / "verifier-b",
}
PRIORS: Final = {"base_grounder": 2.0, "verifier_a": 1.0, "verifier_b": 1.0}
TIMES, PROMPTS = "COEPG_BENCH_TIMES", "COEPG_BENCH_PROMPTS"
"""Environment variables by which `grpo_vs_swift` gives its plugin the file for times and the number of prompts."""
MAX_PLAN_TOKENS: Final = 48
MAX_POINT_TOKENS: Final = 12


def settings() -> Models:
    """The tiny models with their prompts and dtype."""
    return Models(
        base_planner=str(MODELS / "base-planner"),
        base_grounder=str(MODELS / "base-grounder"),
        planners={"planner_a": str(MODELS / "planner-a")},
        verifiers={name: str(GROUNDERS[name]) for name in ("verifier_a", "verifier_b")},
        prompts="compact",
        dtype="float32",
    )


def train_steps(prompts: int) -> pa.Table:
    """`prompts` training steps of the snapshot, spread over all families."""
    table = load_snapshot(ROOT / "data" / "miniwob")
    table = table.filter(pc.equal(table["split"], "train"))
    return table.take([i * table.num_rows // prompts for i in range(prompts)])


def rollouts(steps: pa.Table, group_size: int, seed: int) -> tuple[list[str], list[str]]:
    """(texts, step ids): `group_size` sampled answers of the base planner per step, at GRPO's temperature."""
    engine = TransformersEngine(MODELS / "base-planner", dtype="float32", device="cpu", batch_size=64)
    planner = Planner(engine, Screens(steps, engine.resize), "compact")
    tasks = planner_inputs(steps)
    sampling = Sampling(MAX_PLAN_TOKENS, temperature=Grpo().temperature, samples=group_size, seed=seed)
    answers = planner.plan(tasks, sampling)
    texts = [plan.text for plans in answers for plan in plans]
    return texts, [task.step_id for task in tasks for _ in range(group_size)]


def train(config: Grpo, steps: pa.Table, seed: int, report: Report) -> None:
    """GRPO of the base planner with all GROUNDERS, as the sandbox runs it; its output is deleted."""
    # imported here: MS-SWIFT's environment, with another TRL, imports this module too
    from benchmarks.sized import inputs
    from coepg_dagster.jobs import GrpoJob
    from coepg_dagster.training.grpo import train_grpo

    trained, *others = GROUNDERS
    with tempfile.TemporaryDirectory(prefix="coepg-bench-") as folder:
        job = GrpoJob(
            **inputs(Path(folder), steps, steps.select(["step_id"])) | {"seed": seed},
            init=PLANNER,
            grounder=(trained, str(GROUNDERS[trained])),
            verifiers={name: str(GROUNDERS[name]) for name in others},
            models=settings(),
            config=config.model_copy(update={"probe_steps": 0}),
            max_point_tokens=MAX_POINT_TOKENS,
            batch_size=64,
            device="cpu",
        )
        train_grpo(job, report)


def one_thread() -> None:
    """Limits torch to one thread, as in the sandbox's workers."""
    torch.set_num_threads(1)
