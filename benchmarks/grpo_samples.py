"""Rollouts per second of whole GRPO steps on one GPU, by the number of graders, against plain TRL; all of 3B size.

    python -m benchmarks.grpo_samples                        # 1, 3 and 5 graders on one H200
    python -m benchmarks.grpo_samples --graders 3            # adds to the baseline, or replaces, what it measures
    python -m benchmarks.grpo_samples --draw                 # the figure, from the baseline
    python -m benchmarks.grpo_samples --size tiny            # tests the code on a CPU

A step: 8 prompts × 8 rollouts of 80 tokens sampled by transformers, the C-DREM reward of N graders with answers of 12 tokens, the
update with a KL term, full fine-tuning with float32 weights, bf16 passes and recomputed activations. Ways to take it:

- ours: `train_grpo`, as the loop runs it, graders by transformers on the same GPU;
- batched TRL: TRL's GRPOTrainer with one call of transformers' `generate` per grader for all completions of a step;
- plain TRL: the same with one call per completion and grader, the reward written the obvious way.

Weights are random, so on all sides the completions are replaced by the same made plans, all different, before graders see
them. The graders are one checkpoint loaded N times; nothing is shared between them. The first step is not counted: in plain TRL
its graders see one group alone, to save time. Each run is a process with a time limit, and writes every step when it ends;
without a whole measured step it is recorded as failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from transformers import TrainerCallback

from benchmarks import baseline, grpo_vs_trl, limited, plain, sized
from coepg_dagster.artifacts import whole
from coepg_dagster.experiment import Grpo, Member
from coepg_dagster.inference import transformers_engine
from coepg_dagster.inference.visual import VisualStore
from coepg_dagster.jobs import GrpoJob
from coepg_dagster.reports.figures import save
from coepg_dagster.training import grpo

NAME: Final = "grpo_samples"
FIGURE: Final = Path(__file__).parents[1] / "docs" / "images" / "grpo-samples.png"
OURS, BATCHED, PLAIN = WAYS = ("ours", "batched TRL", "plain TRL")
POINT_TOKENS: Final = 12


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("3B", "tiny"), default="3B")
    parser.add_argument("--graders", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--way", choices=WAYS, action="append", help="again for more; default: all")
    parser.add_argument("--steps", type=int, default=2, help="measured, after one that is not")
    parser.add_argument("--limit", type=float, default=540, help="seconds of a run, its start included")
    parser.add_argument("--folder", type=Path, help="where the baseline is written; tiny: by default a temporary one")
    parser.add_argument("--draw", action="store_true", help="draw the figure from the baseline, and measure nothing")
    # one run in this process: its JSON file and its checkpoint
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if not options.run and not options.folder:
        options.folder = Path(tempfile.mkdtemp(prefix="quick-")) if options.size == "tiny" else baseline.FOLDER
    return options


def config_of(options: argparse.Namespace) -> Grpo:
    small = options.size == "tiny"
    return Grpo(
        prompts_per_step=2 if small else 8,
        group_size=4 if small else 8,
        micro_batch_size=8 if small else 16,
        max_steps=options.steps + 1,
        learning_rate=1e-6,
        max_plan_tokens=8 if small else 80,
        probe_steps=0,
    )


class Steps(TrainerCallback):  # type: ignore[misc]
    """Seconds of each optimizer step, and of its rewards; written to a file after each step."""

    def __init__(self, file: Path, about: Mapping[str, Any]) -> None:
        self._file, self._about = file, about
        self._ended = 0.0
        self._rewards = 0.0
        self.steps: list[dict[str, float]] = []

    def rewarded(self, function: Callable[[], list[float]]) -> list[float]:
        """The result of `function`, whose time is that of the rewards of the running step."""
        began = self._now()
        rewards = function()
        self._rewards = self._now() - began
        return rewards

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._ended = self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = self._now()
        self.steps.append({"seconds": now - self._ended, "rewards": self._rewards})
        self._ended = now
        memory = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
        print(f"step {len(self.steps)}: {json.dumps(self.steps[-1])}, {memory:.1f} GB", flush=True)
        with whole(self._file) as draft:
            draft.write_text(json.dumps({**self._about, "steps": self.steps, "memory_gb": memory}))

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Trains one way with so many graders in this process; returns what it wrote."""
    [way], [graders], config = options.way, options.graders, config_of(options)
    torch.manual_seed(0)
    device, dtype = sized.placed(options.size)
    rows = config.prompts_per_step * (config.max_steps or 1)
    steps, dataset = sized.tables(options.size, rows, screens=rows)
    checkpoint = options.checkpoint or str(sized.SOURCE)
    names = [f"grader_{i}" for i in range(graders)]
    clock = Steps(options.run, {"way": way, "graders": graders, "config": config.model_dump(mode="json")})
    if way != OURS:
        grounders = {name: plain.PlainGrounder(checkpoint, POINT_TOKENS, device, dtype) for name in names}
        reward = (plain.BatchedReward if way == BATCHED else plain.PlainReward)(
            grounders, dict.fromkeys(names, 1.0), steps
        )
        grpo_vs_trl.train_plain(checkpoint, steps, Made(reward, clock, config.group_size), config, clock, device=device)
    else:
        _ours(checkpoint, names, config, steps, dataset, clock, device, str(dtype).removeprefix("torch."))
    found: dict[str, Any] = json.loads(options.run.read_text())
    return found


class Made:
    """A reward function for TRL that puts made plans in place of completions; in the first step it rewards one group alone."""

    __name__ = "made"

    def __init__(self, reward: plain.PlainReward, clock: Steps, group: int) -> None:
        self._reward, self._clock, self._group = reward, clock, group

    def __call__(self, completions: Sequence[Any], step_id: Sequence[str], **_: Any) -> list[float]:
        texts = [plain.text_of(completion) for completion in completions]
        made = sized.made_answers(texts, step_id)
        if not self._clock.steps and type(self._reward) is plain.PlainReward:
            made = made[: self._group]
        rewards = self._clock.rewarded(lambda: self._reward.score(made, step_id[: len(made)]))
        return rewards + [0.0] * (len(texts) - len(made))


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


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """Rollouts per second and seconds of a step: medians over all steps but the first. Raises RuntimeError without such."""
    measured = found["steps"][1:]
    if not measured:
        raise RuntimeError("no step after the first was done")
    seconds = baseline.median([step["seconds"] for step in measured])
    return {
        "rollouts_per_second": round(found["config"]["prompts_per_step"] * found["config"]["group_size"] / seconds, 4),
        "seconds": round(seconds, 3),
        "rewards": round(baseline.median([step["rewards"] for step in measured]), 3),
        "measured_steps": len(measured),
        "memory_gb": round(found["memory_gb"], 1),
        "commit": baseline.commit(),
    }


def measure(options: argparse.Namespace, way: str, graders: int, say: baseline.Log) -> dict[str, Any]:
    """A run in a separate process. Raises RuntimeError with the end of its output if no measured step was done."""
    device, _ = sized.placed(options.size)
    environment = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    # five graders nearly fill the card: memory must not be lost between blocks
    environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    with (
        tempfile.TemporaryDirectory(prefix="grpo-samples-") as folder,
        sized.shared_checkpoint(options.size, device) as checkpoint,
    ):
        file, log = Path(folder) / "found.json", Path(folder) / "log"
        asked = ["--size", options.size, "--steps", str(options.steps), "--way", way, "--graders", str(graders)]
        asked += ["--run", str(file), "--checkpoint", str(checkpoint)]
        code = limited.run(["benchmarks.grpo_samples", *asked], log, options.limit, **environment)
        lines = log.read_text(errors="replace").splitlines()
        for line in lines:
            if line.startswith("step "):
                say(f"{way}, {graders} graders: {line}")
        end = f"its time limit of {options.limit:.0f} s" if code is None else f"code {code}"
        if code != 0:
            say("\n".join([f"{way}, {graders} graders: ended by {end}", *(f"    {line}" for line in lines[-60:])]))
        if not file.exists():
            raise RuntimeError("\n".join([f"ended by {end} before a step was done", *lines[-30:]]))
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def record(found: Mapping[str, Any] | None, failed: Mapping[str, str], folder: Path, device: str) -> None:
    """Adds a run to the baseline; its value is our rate with the most graders that plain TRL was measured with too."""
    with baseline.alone(folder):
        before = baseline.earlier(NAME, folder, device)
        table: dict[str, dict[str, Any]] = before.get("table", {})
        repetitions: dict[str, list[Any]] = before.get("repetitions", {})
        if found:
            table.setdefault(str(found["graders"]), {})[found["way"]] = summary(found)
            repetitions[f"{found['way']}, {found['graders']} graders"] = found["steps"]
        both = [int(n) for n, ways in table.items() if {OURS, PLAIN} <= ways.keys()]
        most = max(both or [int(n) for n, ways in table.items() if OURS in ways], default=0)
        value = table[str(most)][OURS]["rollouts_per_second"] if most else None
        against = table[str(most)].get(PLAIN, {}).get("rollouts_per_second") if most else None
        config = found["config"] if found else before.get("config")
        baseline.write(
            NAME,
            command=baseline.command_line(),
            value=value,
            unit=f"rollouts/s of whole optimizer steps, {most} graders",
            against=against,
            ratio=round(value / against, 3) if value and against else None,
            reason=None if value else "; ".join(failed.values()) or "ours was not measured",
            repetitions=repetitions,
            folder=folder,
            device=device,
            against_what="TRL's GRPOTrainer with one call of transformers' generate per completion and grader",
            table={n: table[n] for n in sorted(table, key=int)},
            config=config,
            failed=before.get("failed", {}) | failed,
        )


def draw(folder: Path) -> None:
    """Rollouts per second over the number of graders, with the seconds of a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    facts = json.loads((folder / f"{NAME}.json").read_text())
    numbers, width = list(facts["table"]), 0.27
    figure, axis = pyplot.subplots(figsize=(6.4, 3.4))
    for place, (way, color) in enumerate(zip(WAYS, ("C0", "C1", "0.6"), strict=True)):
        at = [i for i, n in enumerate(numbers) if way in facts["table"][n]]
        of = [facts["table"][numbers[i]][way] for i in at]
        bars = axis.bar(
            [i + (place - 1) * width for i in at],
            [each["rollouts_per_second"] for each in of],
            width * 0.94,
            color=color,
            label=way,
        )
        axis.bar_label(bars, [f"{each['seconds']:.3g} s" for each in of], padding=2, fontsize=8)
    axis.set_yscale("log")
    axis.margins(y=0.12)
    axis.set_xticks(range(len(numbers)), [f"{n} grader" + "s" * (n != "1") for n in numbers])
    axis.set_ylabel("rollouts per second")
    axis.set_title(f"whole GRPO steps, 3B, {facts['device']}; above: seconds of a step", fontsize=9)
    axis.legend(frameon=False, fontsize=8)
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
    for graders in options.graders:
        for way in options.way or WAYS:
            found, failed = None, dict[str, str]()
            try:
                found = measure(options, way, graders, say)
                say(f"{way}, {graders} graders: {json.dumps(summary(found))}")
            except RuntimeError as error:
                found, failed = None, {f"{way}, {graders} graders": str(error)[-3000:]}
                say(f"{way}, {graders} graders failed: {error}")
            record(found, failed, options.folder, device)
    return None


if __name__ == "__main__":
    main()
