"""Time of a GRPO step by stage: rollouts, rewards, update; 3B-sized Qwen2.5-VL, G = 8, two grounders, one GPU.

Runs `train_grpo` as the loop does, once with rollouts from transformers and once, if vLLM can be imported, from vLLM on the
same GPU, which sleeps during the update. Weights are random, so the planner's answers are replaced by made plans that pass the
gate, all different, before they are rewarded: every rollout costs a call of every grounder, and every answer of planner and
grounders has the maximum length. Trained in full if the card can hold it by estimate, else by LoRA.

`value` is the seconds of a step until its rewards are known (prompts, weight sync, wake, sleep included), `against` those of
the update (reference and old log-probabilities, forward and backward passes, optimizer); `ratio` above 1: the update takes
longer. `--size tiny` tests the code on a CPU. A run that is ended by its time limit leaves its finished steps and prints its
stacks. With `--rollouts` for one kind, the baseline keeps its results of the other, if the device is the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from transformers import TrainerCallback
from trl.generation import vllm_generation

from benchmarks import baseline, limited, sized
from coepg_dagster.artifacts import whole
from coepg_dagster.experiment import Grpo, Lora, Serving
from coepg_dagster.jobs import GrpoJob
from coepg_dagster.planning.estimates import CONTEXT, Example, Spread, grpo_memory
from coepg_dagster.prompts import planner_answer
from coepg_dagster.training import grpo

NAME: Final = "grpo_breakdown"
KINDS: Final = ("transformers", "vllm")
LIMITS: Final = {"transformers": 150.0, "vllm": 330.0}
"""Time limit of a run in seconds, its start included."""
SLOW: Final = 5.0
"""A stage that takes more seconds is printed before its step ends."""
COLLECT: Final = ("prompts", "rollouts", "weight sync", "wake", "sleep", "rewards")
UPDATE: Final = ("log-probabilities", "forward and backward", "optimizer and the rest")
SERVING: Final = Serving(context=4096, rollout_memory=0.3)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("3B", "7B", "tiny"), default="3B")
    parser.add_argument("--rollouts", choices=KINDS, action="append", help="again for both; default: both")
    parser.add_argument("--train", choices=("full", "lora"), help="default: full where the estimate fits the card")
    parser.add_argument("--prompts", type=int, help="of a step; default 8 (tiny: 2)")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--micro", type=int, default=8, help="rollouts per forward pass of the update")
    parser.add_argument("--steps", type=int, default=4, help="the first is not measured")
    parser.add_argument(
        "--compiled", action="store_true", help="vLLM compiles and captures graphs, which takes minutes"
    )
    parser.add_argument("--folder", type=Path, help="where the baseline is written; tiny: by default a temporary one")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)  # one kind, in this process; its JSON file
    options = parser.parse_args(given)
    small = options.size == "tiny"
    options.prompts = options.prompts or (2 if small else 8)
    if not options.run and not options.folder:
        options.folder = Path(tempfile.mkdtemp(prefix="quick-")) if small else baseline.FOLDER
    return options


class Stages(TrainerCallback):  # type: ignore[misc]
    """Seconds of each stage of each step, nested stages counted once; written to a file after each step."""

    def __init__(self, about: dict[str, Any], file: Path) -> None:
        self._about, self._file = about, file
        self._inner: list[float] = []
        self._step: dict[str, float] = {}
        self._began = 0.0
        self.steps: list[dict[str, float]] = []
        self.differences: list[float] = []

    @staticmethod
    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the time within it for `name`, without that of nested stages."""
        began = self.now()
        self._inner.append(0.0)
        try:
            yield
        finally:
            took = self.now() - began
            self._step[name] = self._step.get(name, 0.0) + took - self._inner.pop()
            if self._inner:
                self._inner[-1] += took
            if took > SLOW:
                print(f"stage {name}: {took:.1f} s", flush=True)

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return function(*args, **kwargs)

        return within

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._step, self._began = {}, self.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        total = self.now() - self._began
        self._step["optimizer and the rest"] = total - sum(self._step.values())
        self.steps.append(dict(self._step))
        stages = ", ".join(f"{name} {self._step[name]:.2f}" for name in (*COLLECT, *UPDATE) if name in self._step)
        print(f"step {state.global_step}: {total:.2f} s: {stages}", flush=True)
        self.write()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if grpo.difference([logs or {}]):
            self.differences.append(logs["sampling/sampling_logp_difference/mean"])
            self.write()

    def write(self) -> None:
        memory = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
        figures = {"steps": self.steps, "sampling_logp_difference": self.differences, "memory_gb": memory}
        with whole(self._file) as draft:
            draft.write_text(json.dumps(self._about | figures))


def how_trained(size: sized.Size, config: Grpo) -> str:
    """`full` if the card can hold it with the engine and two grounders, else `lora`."""
    if not torch.cuda.is_available():
        return "full"
    model, card = sized.architecture_of(size), float(torch.cuda.get_device_properties(0).total_memory)
    example = Example(sized.SCREENS[size], 200, config.max_plan_tokens)
    need = grpo_memory(model, [model, model], config, example, Spread(memory=card), serving=SERVING)
    return "full" if need.total + CONTEXT < card else "lora"


def config_of(options: argparse.Namespace, kind: str) -> Grpo:
    small = options.size == "tiny"
    config = Grpo(
        prompts_per_step=options.prompts,
        group_size=options.group,
        micro_batch_size=options.micro,
        max_steps=options.steps,
        learning_rate=1e-6,
        max_plan_tokens=8 if small else 80,
        rollouts=kind,
        probe_steps=0,
    )
    # the same for both kinds of rollouts, so that they can be compared
    chosen = options.train or how_trained(options.size, config.model_copy(update={"rollouts": "vllm"}))
    return config.model_copy(update={"lora": Lora() if chosen == "lora" else None})


def run(options: argparse.Namespace, kind: str, file: Path) -> dict[str, Any]:
    """Trains with rollouts from `kind`; returns the content of `file` after the last step."""
    began = time.perf_counter()
    small = options.size == "tiny"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = str(checkpoint_of(options.size))
    config = config_of(options, kind)
    steps, dataset = sized.tables(
        options.size, options.prompts * options.steps, screens=options.prompts * options.steps
    )
    dtype = "float32" if small else "bfloat16"
    models = sized.models_of(checkpoint, verifiers={"verifier": checkpoint}, dtype=dtype)
    about = {"rollouts": kind, "config": config.model_dump(mode="json"), "vllm_compiled": options.compiled}
    stages = Stages(about, file)
    score, begin, draw = grpo.CdremReward.score, grpo.CdremTrainer.__init__, sized.np.random.default_rng(5)

    def passing(self: Any, texts: Sequence[str], step_ids: Sequence[str]) -> list[float]:
        made = [planner_answer(sized.plan_of(draw, int(draw.integers(20, 60))), "CLICK", "") for _ in texts]
        return score(self, made, step_ids)

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.add_callback(stages)
        print(f"trainer made after {time.perf_counter() - began:.0f} s", flush=True)
        engine = getattr(getattr(self, "vllm_generation", None), "llm", None)
        if engine is not None:
            engine.wake_up, engine.sleep = stages.timed(engine.wake_up, "wake"), stages.timed(engine.sleep, "sleep")

    of_trainer = {
        "_tokenize_prompts": "prompts",
        "_generate_single_turn": "rollouts",
        "_calculate_rewards": "rewards",
        "_generate_and_score_completions": "log-probabilities",
        "training_step": "forward and backward",
    }
    with ExitStack() as stack:
        for method, name in of_trainer.items():
            stack.enter_context(
                patch.object(grpo.CdremTrainer, method, stages.timed(getattr(grpo.CdremTrainer, method), name))
            )
        generation = vllm_generation.VLLMGeneration
        stack.enter_context(
            patch.object(generation, "sync_weights", stages.timed(generation.sync_weights, "weight sync"))
        )
        if kind == "vllm" and not options.compiled:
            eager = partial(vllm_generation.LLM, enforce_eager=True, limit_mm_per_prompt={"image": 1, "video": 0})
            stack.enter_context(patch.object(vllm_generation, "LLM", eager))
        stack.enter_context(patch.object(grpo.CdremReward, "score", passing))
        stack.enter_context(patch.object(grpo.CdremTrainer, "__init__", watched))
        stack.enter_context(patch.object(grpo, "save_trained", lambda *_, **__: {}))
        with tempfile.TemporaryDirectory(prefix="grpo-breakdown-") as folder:
            job = GrpoJob(
                **sized.inputs(Path(folder), steps, dataset),
                init=checkpoint,
                grounder=("grounder", checkpoint),
                verifiers={"verifier": checkpoint},
                models=models,
                config=config,
                max_point_tokens=12,
                batch_size=64,
                device=device,
                serving=SERVING,
            )
            grpo.train_grpo(job, lambda done, of, figures: None)
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def checkpoint_of(size: sized.Size) -> Path:
    """The checkpoint, made if it does not exist; in memory (/dev/shm), so that it loads fast."""
    if size == "tiny":
        return sized.SOURCE
    shared = Path("/dev/shm")  # noqa: S108
    folder = (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"coepg-{size}"
    sized.make_checkpoint(folder, size, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.cuda.empty_cache()  # the runs need the whole card
    return folder


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """Medians over all steps but the first: seconds by stage, until the rewards, and of the update."""
    measured = figures["steps"][1:] or figures["steps"]
    stages = {
        name: baseline.median([step.get(name, 0.0) for step in measured])
        for name in (*COLLECT, *UPDATE)
        if any(name in step for step in measured)
    }
    collect = baseline.median([sum(step.get(name, 0.0) for name in COLLECT) for step in measured])
    update = baseline.median([sum(step.get(name, 0.0) for name in UPDATE) for step in measured])
    differences = figures["sampling_logp_difference"]
    return {
        "measured_steps": len(measured),
        "warmed_up": len(figures["steps"]) > 1,
        "stages": {name: round(seconds, 3) for name, seconds in stages.items()},
        "collect_seconds": round(collect, 3),
        "update_seconds": round(update, 3),
        "ratio": round(update / collect, 4),
        "memory_gb": round(figures["memory_gb"], 1),
        **({"sampling_logp_difference": round(sum(differences) / len(differences), 4)} if differences else {}),
    }


def record(figures: dict[str, dict[str, Any]], failed: dict[str, str], folder: Path) -> Path:
    """Writes the baseline; its value is of the kind of rollouts with the highest ratio."""
    before = earlier(folder)
    kinds = before.get("kinds", {}) | {
        kind: summary(of) | {"commit": baseline.commit()} for kind, of in figures.items()
    }
    configurations = before.get("configurations", {}) | {kind: of["config"] for kind, of in figures.items()}
    best = max(kinds, key=lambda kind: float(kinds[kind]["ratio"]), default=None)
    common: dict[str, Any] = {
        "command": baseline.command_line(),
        "unit": "s/step until the rewards are known",
        "repetitions": before.get("repetitions", {}) | {kind: of["steps"] for kind, of in figures.items()},
        "folder": folder,
        "kinds": kinds,
        "failed": failed,
        "configurations": configurations,
    }
    if best is None:
        reason = "; ".join(dict.fromkeys(f"{why}" for why in failed.values()))
        return baseline.write(NAME, value=None, against=None, ratio=None, reason=reason, **common)
    return baseline.write(
        NAME,
        value=kinds[best]["collect_seconds"],
        against=kinds[best]["update_seconds"],
        ratio=kinds[best]["ratio"],
        against_what=f"seconds of the update of the same step; rollouts from {best}",
        rollouts=best,
        trained="lora" if configurations[best]["lora"] else "full",
        **common,
    )


def earlier(folder: Path) -> dict[str, Any]:
    """The existing baseline, if it was measured on this device and has a value; else empty."""
    file = folder / f"{NAME}.json"
    facts: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if facts.get("value") is None or facts["device"] != baseline.device_name():
        return {}
    for of_kind in facts["kinds"].values():
        of_kind.setdefault("commit", facts["commit"])
    return facts


def without_bars(output: str) -> list[str]:
    """The lines of `output` without progress bars and empty lines."""
    return [line for line in output.splitlines() if line.strip() and not line.rstrip().endswith(("it/s]", "s/it]"))]


def measure(options: argparse.Namespace, given: Sequence[str], kind: str, say: baseline.Log) -> dict[str, Any]:
    """A run in a separate process. Raises RuntimeError with the end of its output if no step was done."""
    with tempfile.TemporaryDirectory(prefix="grpo-breakdown-") as folder:
        file, log = Path(folder) / "figures.json", Path(folder) / "log"
        arguments = ["benchmarks.grpo_breakdown", *given, "--rollouts", kind, "--run", str(file)]
        code = limited.run(arguments, log, LIMITS[kind])
        end = f"its time limit of {LIMITS[kind]:.0f} s" if code is None else f"code {code}"
        lines = without_bars(log.read_text(errors="replace"))
        for line in lines:
            if line.startswith(("step ", "stage ", "trainer made", "attention:", "preflight:")):
                say(f"{kind}: {line}")
        if not file.exists():
            raise RuntimeError("\n".join([f"ended by {end} before a step was done", *lines[-120:]]))
        if code != 0:
            say(
                "\n".join([f"{kind}: ended by {end}; the steps before count", *(f"    {line}" for line in lines[-60:])])
            )
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures


def main(given: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if given is None else given)
    options = arguments(given)
    if options.run:
        [kind] = options.rollouts[-1:]
        run(options, kind, options.run)
        return
    if options.size != "tiny" and not torch.cuda.is_available():
        record({}, dict.fromkeys(KINDS, "no GPU here; `--size tiny` proves the code path on a CPU"), options.folder)
        raise SystemExit("no GPU here: use --size tiny")
    say = baseline.Log(NAME, options.folder)
    checkpoint = checkpoint_of(options.size)
    figures: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for kind in options.rollouts or KINDS:
        if kind == "vllm" and (not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None):
            failed[kind] = "vLLM and a GPU are not both here"
        else:
            try:
                figures[kind] = measure(options, given, kind, say)
                say(f"{kind}: {json.dumps(summary(figures[kind]))}")
            except RuntimeError as error:
                failed[kind] = str(error)[-6000:]
        if kind in failed:
            say(f"{kind} failed: {failed[kind]}")
        record(figures, failed, options.folder)
    if checkpoint != sized.SOURCE:
        shutil.rmtree(checkpoint)


if __name__ == "__main__":
    main()
