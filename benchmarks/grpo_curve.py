"""How many rollouts GRPO with C-DREM needs for an effect: greedy Step SR of the sandbox's planner over the rollouts of a run.

Each seed gets D_0, π_1 and ϕ_1 as `coepg evolve sandbox` makes them (the same jobs, on the device of this run). From there
GRPO runs in parallel: a long run at a constant learning rate, evaluated on the way, and short ones that fit a laptop.
Evaluated is Step SR (macro over episodes) with ϕ_1 on `validation` and on the training steps beyond `max_train_steps`, which no
model of the loop has seen. Test splits are not read.

    python -m benchmarks.grpo_curve --seeds 13,42,1234 --out FOLDER     # writes FOLDER/curve-SEED-RUN.json
    python -m benchmarks.grpo_curve --collect FOLDER                    # the baseline and docs/images/results/grpo-curve.png
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import TrainerCallback

from benchmarks import baseline
from coepg_dagster import running
from coepg_dagster.artifacts import CANDIDATES, DATASET, STEPS, VERDICTS, steps_of, write_steps, write_table
from coepg_dagster.evaluation.change import change_of, change_text
from coepg_dagster.evaluation.score import score_steps
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.experiment.training import Grpo
from coepg_dagster.inference.predict import predict
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.jobs import CandidatesJob, GrpoJob, SftJob, VerdictsJob, seed_of
from coepg_dagster.pools.selection import select
from coepg_dagster.project import Project
from coepg_dagster.reports.figures import save
from coepg_dagster.sandbox.miniwob.reader import load_snapshot
from coepg_dagster.training import grpo

NAME: Final = "grpo_curve"
ROOT: Final = Path(__file__).parents[1]
EVALUATED_AT: Final = (1_024, 2_048, 4_096, 8_192, 12_288, 16_384, 24_576, 49_152, 98_304)
"""Rollouts after which the planner is evaluated."""
FIGURE: Final = ROOT / "docs" / "images" / "results" / "grpo-curve.png"
LONG: Final = "constant 3e-4"
SHIPPED: Final = "as shipped"
START: Final = "start"
"""The run that ends before GRPO."""
BATCH: Final = 512


def quiet(done: int, of: int, figures: Any) -> None:
    """A reporter that drops its input."""


class Loop:
    """The first steps of a loop of the sandbox, in a folder."""

    def __init__(self, experiment: Experiment, seed: int, folder: Path, device: str) -> None:
        self.experiment, self.seed, self.folder, self.device = experiment, seed, folder, device
        folder.mkdir(parents=True, exist_ok=True)
        table = load_snapshot(ROOT / experiment.benchmark.path)
        splits = [experiment.benchmark.train, experiment.benchmark.validation]
        if not (folder / STEPS).exists():  # the runs of a seed share it
            write_steps(table, folder / STEPS, splits)
        train = steps_of(folder / STEPS, splits[0])
        most = experiment.benchmark.max_eval_steps
        used = steps_of(folder / STEPS, splits[0], experiment.benchmark.max_train_steps)
        names = pa.array(used["step_id"].to_pylist())
        unused = train.filter(pa.compute.invert(pa.compute.is_in(train["step_id"], names)))
        self.evaluated = {"validation": steps_of(folder / STEPS, splits[1], most), "unused": unused.slice(0, most)}
        self.used = used

    def common(self, asset: str) -> dict[str, Any]:
        """The fields that all jobs of the loop share."""
        scratch = self.folder / "scratch" / asset
        scratch.mkdir(parents=True, exist_ok=True)
        return {
            "models": self.experiment.models,
            "device": self.device,
            "batch_size": BATCH if self.device == "cuda" else self.experiment.batch_size,
            "seed": seed_of(self.seed, asset),
            "scratch": scratch,
            "steps": self.folder / STEPS,
            "train_split": self.experiment.benchmark.train,
        }

    def done(self, kind: Any, asset: str, **settings: Any) -> Path:
        """Runs a job of the loop, unless it is done already; returns its output folder."""
        out = self.folder / asset.replace("[", "-").rstrip("]")
        if out.exists():
            return out
        draft = out.with_name(out.name + ".draft")
        draft.mkdir(exist_ok=True)
        running.run(kind(**self.common(asset), out=draft, **settings), quiet)
        draft.rename(out)
        return out

    def start(self) -> tuple[Path, Path, Path]:
        """Makes (D_0, π_1, ϕ_1); returns their paths."""
        experiment = self.experiment
        pools = experiment.regeneration
        written = self.done(
            CandidatesJob,
            "candidate_plans[0]",
            members=experiment.models.planners,
            max_steps=experiment.benchmark.max_train_steps,
            config=pools,
            processes=1,
        )
        judged = self.done(
            VerdictsJob,
            "verdicts[0]",
            members=experiment.models.verifiers,
            candidates=written / CANDIDATES,
            config=pools,
            shuffled_plans=experiment.quality.shuffled_plans,
            processes=1,
        )
        data = self.folder / DATASET
        if not data.exists():
            tables = pq.read_table(written / CANDIDATES), pq.read_table(judged / VERDICTS)
            rows, _ = select(self.used, *tables, pools, 0, None)
            write_table(rows, data)
        models = [
            self.done(
                SftJob,
                f"{asset}[1]",
                role=role,
                init=str(ROOT / init),
                dataset=data,
                validation_split=experiment.benchmark.validation,
                max_plan_tokens=pools.max_plan_tokens,
                max_point_tokens=pools.max_point_tokens,
                config=experiment.sft.model_copy(update={"probe_steps": 0}),
            )
            for asset, role, init in (
                ("planner_sft", "planner", experiment.models.base_planner),
                ("grounder", "grounder", experiment.models.base_grounder),
            )
        ]
        return data, models[0], models[1]


class CurveCallback(TrainerCallback):  # type: ignore[misc]
    """Evaluates the policy greedily, before the first optimizer step and after each number of rollouts in EVALUATED_AT."""

    def __init__(
        self, loop: Loop, config: Grpo, grounder: TransformersEngine, processor: Any, keep: Callable[[Any], None]
    ) -> None:
        self.loop, self.config, self.grounder, self.processor, self.keep = loop, config, grounder, processor, keep
        self.name = f"seed {loop.seed}, {config.max_steps} steps, peak {config.learning_rate:g}"
        self.began = time.perf_counter()
        self.per_step = config.prompts_per_step * config.group_size
        self.right: dict[int, dict[str, list[bool]]] = {}
        self.seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.evaluate(0, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        rollouts = state.global_step * self.per_step
        if rollouts in EVALUATED_AT or state.global_step >= state.max_steps:
            self.evaluate(rollouts, model)

    def evaluate(self, rollouts: int, model: Any) -> None:
        started, training = time.perf_counter(), model.training
        engine = TransformersEngine.of(model.eval(), self.processor, batch_size=BATCH)
        limits = self.config.max_plan_tokens, self.loop.experiment.regeneration.max_point_tokens
        self.right[rollouts] = {}
        for split, steps in self.loop.evaluated.items():
            with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
                predictions = predict(engine, self.grounder, steps, self.loop.experiment.models, *limits)
            self.right[rollouts][split] = right(steps, predictions, self.loop)
        model.train(training)
        self.seconds += time.perf_counter() - started
        self.keep(
            {
                "settings": self.config.model_dump(mode="json"),
                "seconds": time.perf_counter() - self.began,
                "looking": self.seconds,
                "right": {str(after): values for after, values in self.right.items()},
            }
        )
        means = {split: round(100 * float(np.mean(values)), 1) for split, values in self.right[rollouts].items()}
        after = f"{rollouts} rollouts after {time.perf_counter() - self.began:.0f} s"
        print(f"{self.name}: {after}: {means} (micro)", flush=True)


def right(steps: pa.Table, predictions: pa.Table, loop: Loop) -> list[bool]:
    """Whether each step succeeds by the experiment's protocol."""
    result = score_steps(loop.experiment.benchmark.protocol, steps, predictions)
    return [bool(success) for success in result.steps["step_sr"].to_pylist()]


def train(loop: Loop, config: Grpo, start: tuple[Path, Path, Path], keep: Callable[[Any], None]) -> None:
    """One GRPO run from π_1 with all graders; `keep` gets the results so far after each evaluation."""
    data, planner, grounder = start
    models = loop.experiment.models
    plain_init = grpo.CdremTrainer.__init__
    engine = TransformersEngine(grounder, dtype=models.dtype, device=loop.device, batch_size=BATCH)

    def with_callback(self: Any, *args: Any, **settings: Any) -> None:
        callback = CurveCallback(loop, config, engine, settings["processing_class"], keep)
        settings["callbacks"] = [*settings["callbacks"], callback]
        plain_init(self, *args, **settings)

    grpo.CdremTrainer.__init__ = with_callback  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        job = GrpoJob(
            **loop.common("planner[1]") | {"scratch": Path(folder) / "scratch"},
            out=Path(folder) / "model",
            init=str(planner),
            grounder=("grounder_1", str(grounder)),
            verifiers=models.verifiers,
            dataset=data,
            validation_split=loop.experiment.benchmark.validation,
            max_point_tokens=loop.experiment.regeneration.max_point_tokens,
            config=config.model_copy(update={"validate_every": None, "probe_steps": 0}),
        )
        grpo.train_grpo(job, quiet)
    grpo.CdremTrainer.__init__ = plain_init  # type: ignore[method-assign]


def start_of(seed: int, options: argparse.Namespace) -> tuple[Loop, tuple[Path, Path, Path]]:
    """A seed's loop with (D_0, π_1, ϕ_1), made if they do not exist."""
    experiment = Project(ROOT).experiments()["sandbox"]
    if options.quick:
        few = experiment.benchmark.model_copy(update={"max_train_steps": 40, "max_eval_steps": 40})
        experiment = experiment.model_copy(update={"benchmark": few})
    loop = Loop(experiment, seed, options.out / f"seed-{seed}", options.device)
    return loop, loop.start()


def one(seed: int, name: str, options: argparse.Namespace) -> None:
    """One run of one seed; its file is written after each evaluation."""
    loop, start = start_of(seed, options)
    change = settings_of(options.steps)[name]
    if options.device == "cuda":
        change = {"micro_batch_size": BATCH} | change
    if options.quick:
        change |= {"prompts_per_step": 4, "group_size": 4, "micro_batch_size": 16, "max_steps": 2}
    config = Grpo.model_validate(loop.experiment.grpo.model_dump() | {"num_train_epochs": 1000} | change)
    file = options.out / f"curve-{seed}-{list(settings_of(0)).index(name)}.json"

    def keep(run: dict[str, Any]) -> None:
        about = {"seed": seed, "name": name, "episodes": episodes(loop), "device": baseline.device_name()}
        file.write_text(json.dumps(about | run))

    train(loop, config, start, keep)


def settings_of(steps: int) -> dict[str, dict[str, Any]]:
    """Run → its changes to the experiment: a long run at a constant rate, the shipped settings, and runs that are too small."""
    constant = {"lr_scheduler_type": "constant_with_warmup"}
    small = {"prompts_per_step": 8, "micro_batch_size": 64, "max_steps": 16, "learning_rate": 1e-5, "kl_beta": 0.04}
    return {
        LONG: {"max_steps": steps, "learning_rate": 3e-4, **constant},
        SHIPPED: {},
        "40 steps": {"max_steps": 40},
        "48 steps to 5e-4": {"learning_rate": 5e-4, "max_steps": 48},
        "1,024 rollouts at 1e-5": {**small, "lr_scheduler_type": "cosine", "temperature": 0.9},
    }


def episodes(loop: Loop) -> dict[str, list[str]]:
    return {split: table["episode_id"].to_pylist() for split, table in loop.evaluated.items()}


def collect(folder: Path) -> None:
    """Writes the baseline and the figure from the curves of all seeds."""
    say = baseline.Log(NAME)
    runs = [json.loads(file.read_text()) for file in sorted(folder.rglob("curve-*.json"))]
    table: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        for split, of in run["episodes"].items():
            for rollouts, values in run["right"].items():
                change = change_of(run["right"]["0"][split], values[split], of)
                table.setdefault(run["name"], {}).setdefault(split, {}).setdefault(rollouts, []).append(change)
    for name, splits in table.items():
        for split, by_rollouts in splits.items():
            for rollouts, changes in by_rollouts.items():
                say(f"{name}, {split}, {rollouts} rollouts: " + "; ".join(map(change_text, changes)))
    draw(table)
    last = table[LONG]["unused"]
    seeds = sorted({run["seed"] for run in runs})
    whole = [rollouts for rollouts, changes in last.items() if len(changes) == len(seeds)]
    final = [change["difference"] for change in last[max(whole, key=int)]]
    seconds: dict[str, dict[str, float]] = {}
    for run in runs:
        seconds.setdefault(run["name"], {})[str(run["seed"])] = round(run["seconds"] - run["looking"], 1)
    baseline.write(
        NAME,
        command="python -m benchmarks.grpo_curve",
        value=round(float(np.mean(final)), 2),
        unit="points of Step SR on unused training steps",
        rollouts=max(map(int, whole)),
        against="pi_1",
        ratio=None,
        repetitions=table,
        settings={run["name"]: run["settings"] for run in runs},
        device=max(run["device"] for run in runs if run["name"] == LONG),
        devices={run["name"]: run["device"] for run in runs},
        seeds=seeds,
        seconds=seconds,
    )


def draw(table: dict[str, Any]) -> None:
    """Step SR over rollouts: each seed thin, the mean of the seeds thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    shown = {LONG: ("C0", "constant 3e-4"), SHIPPED: ("C1", "as shipped: 1e-3 falling to a tenth")}
    for axis, split in zip(axes, ("validation", "unused"), strict=True):
        for name, (color, label) in shown.items():
            changes = table[name][split]
            rollouts = sorted(map(int, changes))
            after = np.array([[change["after"] for change in changes[str(n)]] for n in rollouts])
            at = [max(n, 512) for n in rollouts]
            axis.plot(at, after, color=color, lw=0.8, alpha=0.4)
            axis.plot(at, after.mean(1), color=color, lw=2, marker="o", ms=4, label=label)
        axis.axhline(after.mean(1)[0], color="0.5", ls=":", lw=1)
        axis.set_xscale("log")
        ticks = [n for n in EVALUATED_AT if n & (n - 1) == 0] + [n for n in EVALUATED_AT if n > 32_768]
        axis.set_xticks([512, *ticks], ["0", *(f"{n // 1024}k" for n in ticks)])
        axis.minorticks_off()
        axis.set_title({"validation": "validation", "unused": "training steps that no model saw"}[split])
        axis.set_xlabel("rollouts")
    axes[0].set_ylabel("Step SR with ϕ₁, %")
    axes[1].legend(frameon=False, loc="lower right")
    figure.tight_layout()
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    save(figure, FIGURE, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="13,42,1234")
    parser.add_argument("--out", type=Path, required=False)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=EVALUATED_AT[-1] // 512, help="updates of the long run")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # one run of one seed, in this process
    parser.add_argument("--collect", type=Path)
    parser.add_argument("--quick", action="store_true", help="a few steps of one seed; proves the code path")
    options = parser.parse_args()
    if options.collect:
        return collect(options.collect)
    if options.out is None:
        parser.error("--out: give the folder for models and curves")
    options.out.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if options.run == START:
        start_of(*seeds, options)
    elif options.run:
        one(*seeds, options.run, options)
    else:
        side_by_side(options, seeds, [START])
        side_by_side(options, seeds, list(settings_of(0)))
    return None


def side_by_side(options: argparse.Namespace, seeds: list[int], runs: list[str]) -> None:
    """Runs each seed and run in a separate process, all at the same time."""
    command = [sys.executable, "-m", "benchmarks.grpo_curve", "--out", str(options.out), "--device", options.device]
    command += ["--steps", str(options.steps), *(["--quick"] if options.quick else [])]
    running = [
        subprocess.Popen([*command, "--seeds", str(seed), "--run", run], cwd=ROOT) for run in runs for seed in seeds
    ]
    if any([process.wait() for process in running]):
        raise SystemExit("a run failed; its traceback is above")


if __name__ == "__main__":
    main()
