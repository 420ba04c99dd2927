"""Rollouts per second of whole GRPO steps on one GPU, by the number of graders, against plain TRL; all of 3B size.

    python -m benchmarks.grpo_samples                        # 1, 3 and 5 graders on one H200
    python -m benchmarks.grpo_samples --graders 3            # adds to the baseline, or replaces, what it measures
    python -m benchmarks.grpo_samples --way MS-SWIFT --python /tmp/swift/bin/python
    python -m benchmarks.grpo_samples --draw                 # the figure, from the baseline
    python -m benchmarks.grpo_samples --size tiny            # tests the code on a CPU

A step: 8 prompts × 8 rollouts of 80 tokens sampled by transformers, the C-DREM reward of N graders with answers of 12 tokens, the
update with a KL term, full fine-tuning with float32 weights, bf16 passes and recomputed activations. Ways to take it:

- ours: `train_grpo`, as the loop runs it, graders by transformers on the same GPU;
- batched TRL: TRL's GRPOTrainer with one call of transformers' `generate` per grader for all completions of a step;
- plain TRL: the same with one call per completion and grader, the reward written the obvious way;
- MS-SWIFT: its `rlhf grpo` with the same settings and the reward of plain TRL, in an environment of its own, whose Python is
  given (see `benchmarks.grpo_vs_swift`). There a plug-in (`benchmarks.swift_samples`) registers the reward, and the callback of
  the trainer that measures the steps of every way.

Weights are random, so on all sides the completions are replaced by the same made plans, all different, before graders see
them. The graders are one checkpoint loaded N times; nothing is shared between them. Each run is a process with a time limit, and
writes every step when it ends. The first step is not counted: in plain TRL and MS-SWIFT its graders see one plan alone, to save
time. Ours takes a run for each N; the other ways take one for all, N after N, since their graders share nothing with the
trainer. An N without a whole measured step is recorded as failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from benchmarks import baseline, grpo_vs_trl, limited, ms_swift, plain, sized
from benchmarks.made_rewards import POINT_TOKENS, Steps, made_reward, names_of, rows_of
from coepg_dagster.experiment.models import Member
from coepg_dagster.experiment.training import Grpo
from coepg_dagster.inference import transformers_engine
from coepg_dagster.inference.visual import VisualStore
from coepg_dagster.jobs import GrpoJob
from coepg_dagster.reports.figures import save
from coepg_dagster.training import grpo

NAME: Final = "grpo_samples"
FIGURE: Final = Path(__file__).parents[1] / "docs" / "images" / "grpo-samples.png"
OURS, BATCHED, PLAIN, SWIFT = WAYS = ("ours", "batched TRL", "plain TRL", "MS-SWIFT")
COLORS: Final = dict(zip(WAYS, ("C0", "C1", "0.6", "0.8"), strict=True))


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("3B", "tiny"), default="3B")
    parser.add_argument("--graders", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--way", choices=WAYS, action="append", help="again for more; default: all that can run")
    parser.add_argument("--python", type=Path, help=f"Python of an environment with ms-swift, for the way {SWIFT}")
    parser.add_argument("--steps", type=int, default=2, help="measured, after one that is not")
    parser.add_argument("--limit", type=float, default=540, help="seconds of a run, its start included")
    parser.add_argument("--folder", type=Path, help="where the baseline is written; tiny: by default a temporary one")
    parser.add_argument("--draw", action="store_true", help="draw the figure from the baseline, and measure nothing")
    # one run in this process: its JSON file and its checkpoint
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.python:
        options.python = options.python.absolute()
    elif SWIFT in (options.way or ()):
        parser.error(f"--way {SWIFT} needs --python")
    if not options.run and not options.folder:
        options.folder = Path(tempfile.mkdtemp(prefix="quick-")) if options.size == "tiny" else baseline.FOLDER
    return options


def ways_of(options: argparse.Namespace) -> Sequence[str]:
    """The ways that are asked for; by default all, MS-SWIFT only where its Python is given."""
    return options.way or tuple(way for way in WAYS if way != SWIFT or options.python)


def config_of(options: argparse.Namespace) -> Grpo:
    small = options.size == "tiny"
    return Grpo(
        prompts_per_step=2 if small else 8,
        group_size=4 if small else 8,
        micro_batch_size=8 if small else 16,
        max_steps=len(schedule(options)),
        learning_rate=1e-6,
        max_plan_tokens=8 if small else 80,
        probe_steps=0,
    )


def schedule(options: argparse.Namespace) -> list[int]:
    """The number of graders in each step: one step to warm up, then `--steps` for each of `--graders`."""
    return [options.graders[0], *(n for n in options.graders for _ in range(options.steps))]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Trains one way in this process, MS-SWIFT in a child of it; returns what was written."""
    [way], graders, config = options.way, schedule(options), config_of(options)
    torch.manual_seed(0)
    device, dtype = sized.placed(options.size)
    steps, dataset = rows_of(options.size, config.prompts_per_step * (config.max_steps or 1))
    checkpoint = options.checkpoint or str(sized.SOURCE)
    about = {"way": way, "graders": graders, "config": config.model_dump(mode="json")}
    if way == SWIFT:
        _swift(options, checkpoint, config, steps, about, device)
    else:
        clock = Steps(options.run, about)
        if way == OURS:
            [number] = options.graders
            _ours(
                checkpoint, names_of(number), config, steps, dataset, clock, device, str(dtype).removeprefix("torch.")
            )
        else:
            kind = plain.BatchedReward if way == BATCHED else plain.PlainReward
            reward = made_reward(kind, checkpoint, graders, options.size, steps, clock)
            grpo_vs_trl.train_plain(checkpoint, steps, reward, config, clock, device=device)
    found: dict[str, Any] = json.loads(options.run.read_text())
    return found


def _swift(
    options: argparse.Namespace, checkpoint: str, config: Grpo, steps: Any, about: Mapping[str, Any], device: str
) -> None:
    """Raises CalledProcessError if MS-SWIFT fails; its output is this process's."""
    settings = ms_swift.settings_of(checkpoint, config, grpo_vs_trl.SEED, on_gpu=device != "cpu")
    settings |= {"reward_funcs": "made_plans", "callbacks": "clock"}
    asked = {
        "file": str(options.run),
        "about": {**about, "versions": ms_swift.versions(options.python)},
        "checkpoint": checkpoint,
        "graders": about["graders"],
        "size": options.size,
        "rows": steps.num_rows,
    }
    environment = {ms_swift.RUN: json.dumps(asked)} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    # beside the run's file: it goes with that, also when this process is killed
    with tempfile.TemporaryDirectory(prefix="swift-", dir=options.run.parent) as folder:
        ms_swift.train(options.python, settings, steps, Path(folder), "swift_samples", environment).check_returncode()


def _ours(
    checkpoint: str, names: list[str], config: Grpo, steps: Any, dataset: Any, clock: Steps, device: str, dtype: str
) -> None:
    score, begin = grpo.CdremReward.score, grpo.CdremTrainer.__init__

    def made(reward: Any, texts: Sequence[str], step_ids: Sequence[str]) -> list[float]:
        return clock.rewarded(lambda: score(reward, sized.made_answers(texts, step_ids), step_ids))

    def watched(trainer: Any, *args: Any, **kwargs: Any) -> None:
        begin(trainer, *args, **kwargs)
        trainer.add_callback(clock)

    first, *others = names
    with ExitStack() as stack:
        stack.enter_context(patch.object(grpo.CdremReward, "score", made))
        stack.enter_context(patch.object(grpo.CdremTrainer, "__init__", watched))
        stack.enter_context(patch.object(grpo, "save_trained", lambda *_, **__: {}))
        # each grader has its own: other weights would have other embeddings
        stack.enter_context(patch.object(transformers_engine, "process_store", VisualStore))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-samples-"))
        job = GrpoJob(
            **sized.inputs(Path(folder), steps, dataset),
            init=checkpoint,
            grounder=(first, checkpoint),
            verifiers={name: Member(model=checkpoint) for name in others},
            models=sized.models_of(checkpoint, dtype=dtype),
            config=config,
            max_point_tokens=POINT_TOKENS,
            batch_size=64,
            device=device,
        )
        grpo.train_grpo(job, lambda done, of, figures: None)


def measured_steps(found: Mapping[str, Any], graders: int) -> list[dict[str, float]]:
    """The steps of a run with so many graders, without the first of all."""
    return [step for step, n in list(zip(found["steps"], found["graders"], strict=False))[1:] if n == graders]


def summary(found: Mapping[str, Any], graders: int) -> dict[str, Any] | None:
    """Rollouts per second and seconds of a step with so many graders: medians; None if no step with them was measured."""
    measured = measured_steps(found, graders)
    if not measured:
        return None
    seconds = baseline.median([step["seconds"] for step in measured])
    return {
        "rollouts_per_second": round(found["config"]["prompts_per_step"] * found["config"]["group_size"] / seconds, 4),
        "seconds": round(seconds, 3),
        "rewards": round(baseline.median([step["rewards"] for step in measured]), 3),
        "measured_steps": len(measured),
        "memory_gb": round(max(step["memory_gb"] for step in measured), 1),
        "commit": baseline.commit(),
    }


def measure(
    options: argparse.Namespace, checkpoint: Path, way: str, graders: Sequence[int], say: baseline.Log
) -> dict[str, Any]:
    """A run in a separate process. Raises RuntimeError with the end of its output if no step was done."""
    environment = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    # five graders nearly fill the card: memory must not be lost between blocks
    environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    with tempfile.TemporaryDirectory(prefix="grpo-samples-") as folder:
        file, log = Path(folder) / "found.json", Path(folder) / "log"
        asked = ["--size", options.size, "--steps", str(options.steps), "--way", way, "--graders", *map(str, graders)]
        asked += ["--run", str(file), "--checkpoint", str(checkpoint)]
        asked += ["--python", str(options.python)] if way == SWIFT else []
        code = limited.run(["benchmarks.grpo_samples", *asked], log, options.limit, **environment)
        lines = log.read_text(errors="replace").splitlines()
        numbers = " ".join(map(str, graders))
        for line in lines:
            if line.startswith("step "):
                say(f"{way}, {numbers} graders: {line}")
        end = f"its time limit of {options.limit:.0f} s" if code is None else f"code {code}"
        if code != 0:
            say("\n".join([f"{way}, {numbers} graders: ended by {end}", *(f"    {line}" for line in lines[-60:])]))
        if not file.exists():
            raise RuntimeError("\n".join([f"ended by {end} before a step was done", *lines[-30:]]))
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def record(
    way: str, graders: int, found: Mapping[str, Any] | None, reason: str, folder: Path, device: str
) -> dict[str, Any] | None:
    """Adds the measured steps of a run with so many graders to the baseline, or the reason why there are none.

    Returns their `summary`. The baseline's value is our rate with the most graders that plain TRL was measured with too.
    """
    name = f"{way}, {graders} graders"
    figures = summary(found, graders) if found else None
    with baseline.alone(folder):
        before = baseline.earlier(NAME, folder, device)
        table: dict[str, dict[str, Any]] = before.get("table", {})
        repetitions: dict[str, list[Any]] = before.get("repetitions", {})
        if found and figures:
            table.setdefault(str(graders), {})[way] = figures
            repetitions[name] = measured_steps(found, graders)
        both = [int(n) for n, ways in table.items() if {OURS, PLAIN} <= ways.keys()]
        most = max(both or [int(n) for n, ways in table.items() if OURS in ways], default=0)
        value = table[str(most)][OURS]["rollouts_per_second"] if most else None
        against = table[str(most)].get(PLAIN, {}).get("rollouts_per_second") if most else None
        config = found["config"] if found else before.get("config")
        theirs = (found or {}).get("versions") or before.get("versions_of_swift")
        baseline.write(
            NAME,
            command=baseline.command_line(),
            value=value,
            unit=f"rollouts/s of whole optimizer steps, {most} graders",
            against=against,
            ratio=round(value / against, 3) if value and against else None,
            reason=None if value else reason or "ours was not measured",
            repetitions=repetitions,
            folder=folder,
            device=device,
            against_what="TRL's GRPOTrainer with one call of transformers' generate per completion and grader",
            table={n: table[n] for n in sorted(table, key=int)},
            config=config,
            failed={run: why for run, why in before.get("failed", {}).items() if run != name}
            | ({} if figures else {name: reason}),
            **({"versions_of_swift": theirs} if theirs else {}),
        )
    return figures


def draw(folder: Path) -> None:
    """Rollouts per second over the number of graders, with the seconds of a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    facts = json.loads((folder / f"{NAME}.json").read_text())
    numbers = list(facts["table"])
    ways = [way for way in WAYS if any(way in facts["table"][n] for n in numbers)]
    width = 0.81 / len(ways)
    figure, axis = pyplot.subplots(figsize=(6.4, 3.4))
    for place, way in enumerate(ways):
        at = [i for i, n in enumerate(numbers) if way in facts["table"][n]]
        of = [facts["table"][numbers[i]][way] for i in at]
        bars = axis.bar(
            [i + (place - (len(ways) - 1) / 2) * width for i in at],
            [each["rollouts_per_second"] for each in of],
            width * 0.94,
            color=COLORS[way],
            label=way,
        )
        axis.bar_label(bars, [f"{each['seconds']:.3g} s" for each in of], padding=2, fontsize=8 if len(ways) < 4 else 7)
    axis.set_yscale("log")
    axis.margins(y=0.12)
    axis.set_xticks(range(len(numbers)), [f"{n} grader" + "s" * (n != "1") for n in numbers])
    axis.set_ylabel("rollouts per second")
    axis.set_title(f"whole GRPO steps, 3B, {facts['device']}; above: seconds of a step", fontsize=9)
    axis.set_ylim(top=2 * axis.get_ylim()[1])
    axis.legend(frameon=False, fontsize=8, ncols=len(WAYS))
    figure.tight_layout()
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    save(figure, FIGURE, dpi=160)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    if options.draw:
        return draw(options.folder)
    if options.run:
        run(options)
        return None
    if options.size != "tiny" and not torch.cuda.is_available():
        sys.exit("no GPU here: use --size tiny")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else baseline.cpu_name()
    say = baseline.Log(NAME, options.folder, keep=True)
    say(baseline.command_line())
    where, _ = sized.placed(options.size)
    with sized.shared_checkpoint(options.size, where) as checkpoint:  # seconds to write: once for all runs
        for way in ways_of(options):
            for numbers in [[n] for n in options.graders] if way == OURS else [options.graders]:
                run_and_record(options, checkpoint, way, numbers, device, say)
    return None


def run_and_record(
    options: argparse.Namespace, checkpoint: Path, way: str, numbers: Sequence[int], device: str, say: baseline.Log
) -> None:
    """One run of `way` with each of `numbers` of graders; an N without a measured step is recorded as failed."""
    found, reason = None, "no step after the first was done"
    try:
        found = measure(options, checkpoint, way, numbers, say)
    except RuntimeError as error:
        reason = str(error)[-3000:]
    for graders in numbers:
        figures = record(way, graders, found, reason, options.folder, device)
        say(f"{way}, {graders} graders: {json.dumps(figures) if figures else f'failed: {reason}'}")


if __name__ == "__main__":
    main()
