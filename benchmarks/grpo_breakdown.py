"""Time of a GRPO step by stage: rollouts, rewards, update; Qwen2.5-VL of 3B size, G = 8, two grounders, one GPU.

Runs `train_grpo` as the loop does, with rollouts from transformers or from vLLM on the same GPU, which sleeps during the update.
Weights are random, so the planner's answers are replaced by made plans that pass the gate, all different, before grounders
see them: every rollout costs a call of every grounder, and every answer of planner and grounders has the maximum length.

    python -m benchmarks.grpo_breakdown                               # both kinds of rollouts, full or LoRA as the card allows
    python -m benchmarks.grpo_breakdown --rollouts vllm --micro 16    # two groups per pass
    python -m benchmarks.grpo_breakdown --rollouts vllm --servers 4   # four verifiers in vLLM servers on a second GPU
    python -m benchmarks.grpo_breakdown --size 7B --processes 2 --strategy fsdp --rollouts transformers
    python -m benchmarks.grpo_breakdown --size tiny                   # tests the code on a CPU

Each variant of the settings is a record of its own in the baseline (`kinds`, by `name_of`), beside those measured before on such
a device; runs beside each other may write at once. `value` is the seconds of a step until its rewards are known (prompts,
weight sync, wake, sleep included), `against` those of the update (reference and old log-probabilities, forward and backward
passes, optimizer); `ratio` above 1: the update takes longer. A run that is ended by its time limit leaves its finished steps and
prints its stacks.

With `--servers` the verifiers answer while rollouts are sampled and log-probabilities computed; `rewards` is the wait that is
left.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from transformers import TrainerCallback
from trl.generation import vllm_generation

from benchmarks import baseline, limited, sized
from coepg_dagster.artifacts import whole
from coepg_dagster.experiment.models import Member, Serving
from coepg_dagster.experiment.training import Grpo, Lora
from coepg_dagster.inference.engine import Engine
from coepg_dagster.inference.opening import opened
from coepg_dagster.inference.processing import load_processor
from coepg_dagster.jobs import GrpoJob, Placement
from coepg_dagster.planning.estimates import CONTEXT, Example, Spread, grpo_memory
from coepg_dagster.training import grpo
from coepg_dagster.training.launch import is_main, is_rank, launch_ranks

NAME: Final = "grpo_breakdown"
KINDS: Final = ("transformers", "vllm")
LIMITS: Final = {"transformers": 150.0, "vllm": 330.0}
"""Time limit of a run in seconds, its start included, where `--limit` gives none."""
ENGINES: Final[dict[str, dict[str, Any]]] = {
    "eager": {"enforce_eager": True},
    "graphs": {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48, 64],
        }
    },
    "compiled": {},
}
"""Settings of the vLLM that samples; `compiled` are its own, with which the loop runs."""
SLOW: Final = 5.0
"""A stage that takes more seconds is printed before its step ends."""
COLLECT: Final = ("prompts", "rollouts", "weight sync", "wake", "sleep", "rewards")
UPDATE: Final = ("log-probabilities", "forward and backward", "optimizer and the rest")
SERVING: Final = Serving(context=4096, rollout_memory=0.3)
SERVERS: Final = Serving(
    context=4096,
    memory=0.88,
    # started at once, they cannot measure the free memory of their GPU; 8 GB hold 200,000 tokens
    arguments=["--enforce-eager", "--kv-cache-memory-bytes", "8000000000"],
    start_minutes=5,
)
"""Of the verifiers on the second GPU."""


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
        "--engine",
        choices=ENGINES,
        default="eager",
        help="how vLLM samples: eager; with CUDA graphs; compiled too, its default, which takes minutes",
    )
    parser.add_argument("--servers", type=int, default=0, help="verifiers in vLLM servers on the second GPU")
    parser.add_argument("--processes", type=int, default=1, help="GPUs that train together")
    parser.add_argument("--strategy", choices=("ddp", "zero2", "zero3", "fsdp"), default="ddp")
    parser.add_argument("--limit", type=float, help="seconds of a run, its start included")
    parser.add_argument("--folder", type=Path, help="where the baseline is written; tiny: by default a temporary one")
    # one kind, in this process: its JSON file, its checkpoint, and the GPU of the servers
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    parser.add_argument("--second", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    small = options.size == "tiny"
    options.prompts = options.prompts or (2 if small else 8)
    if options.servers and options.processes > 1:
        parser.error("--servers: the second GPU trains where --processes is more than 1")
    if not options.run and not options.folder:
        options.folder = Path(tempfile.mkdtemp(prefix="quick-")) if small else baseline.FOLDER
    return options


class Stages(TrainerCallback):  # type: ignore[misc]
    """Seconds of each stage of each step, nested stages counted once; written to a file after each step."""

    def __init__(self, about: dict[str, Any], file: Path, second: str = "") -> None:
        self._about, self._file, self._second = about, file, second
        self._used: dict[str, float] = {}
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
        for place, gigabytes in used_memory(self._second).items():
            self._used[place] = max(gigabytes, self._used.get(place, 0.0))
        self.write()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if grpo.difference([logs or {}]):
            self.differences.append(logs["sampling/sampling_logp_difference/mean"])
            self.write()

    def write(self) -> None:
        memory = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
        figures = {"steps": self.steps, "sampling_logp_difference": self.differences, "memory_gb": memory}
        figures["used_gb"] = self._used
        if not is_main():
            return
        with whole(self._file) as draft:
            draft.write_text(json.dumps(self._about | figures))


def used_memory(second: str) -> dict[str, float]:
    """GB that all processes take of the policy's GPU and of the `second`, if there is one."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    used = {"policy": (total - free) / 1e9}
    if second:
        asked = ["nvidia-smi", "-i", second, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        used["graders"] = float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout) * 2**20 / 1e9
    return used


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


@contextmanager
def served(job: GrpoJob, folder: Path, second: str) -> Iterator[dict[str, Engine]]:
    """The job's verifiers as vLLM servers on GPU `second`, started at once; the loop starts them one after another.

    Raises the first error of a server that does not start.
    """
    there = job.model_copy(update={"device": "cuda:0" if second else job.device, "serving": SERVERS})
    seen = {"CUDA_VISIBLE_DEVICES": second} if second else {}
    if second:
        torch.cuda.init()  # before the environment names another GPU
    load_processor(job.init)  # transformers imports modules on their first use, which threads must not do at once
    with ExitStack() as stack, ThreadPoolExecutor(len(job.verifiers)) as pool:
        with patch.dict(os.environ, seen):
            servers = {
                name: opened(member, there, logs=folder / name, share=len(job.verifiers), beside_training=True)
                for name, member in job.verifiers.items()
            }
            began = {name: pool.submit(server.__enter__) for name, server in servers.items()}
            wait(began.values())
        for name, engine in began.items():
            if not engine.exception():
                stack.push(servers[name].__exit__)
        yield {name: engine.result() for name, engine in began.items()}


def run(options: argparse.Namespace, kind: str, file: Path) -> dict[str, Any]:
    """Trains with rollouts from `kind`; returns the content of `file` after the last step."""
    began = time.perf_counter()
    small = options.size == "tiny"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = options.checkpoint or str(sized.SOURCE)
    config = config_of(options, kind)
    steps, dataset = sized.tables(
        options.size, options.prompts * options.steps, screens=options.prompts * options.steps
    )
    dtype = "float32" if small else "bfloat16"
    verifiers = {"verifier": Member(model=checkpoint)}
    if options.servers:
        verifiers = {f"server_{i}": Member(model=checkpoint, engine="vllm") for i in range(options.servers)}
    models = sized.models_of(checkpoint, verifiers=verifiers, dtype=dtype)
    lora = config.lora is not None
    about = {
        "name": name_of(options, kind, lora=lora),
        "size": options.size,
        "rollouts": kind,
        "engine": options.engine,
    }
    about |= {"servers": options.servers, "processes": options.processes, "strategy": options.strategy}
    stages = Stages(about | {"config": config.model_dump(mode="json")}, file, options.second)
    begin = grpo.CdremTrainer.__init__

    def on_made(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def of_texts(self: Any, texts: Sequence[str], step_ids: Sequence[str]) -> Any:
            return function(self, sized.made_answers(texts, step_ids), step_ids)

        return of_texts

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
        if kind == "vllm":
            shown = {"limit_mm_per_prompt": {"image": 1, "video": 0}}  # else it tries out a largest video first
            engine = partial(vllm_generation.LLM, **ENGINES[options.engine], **shown)
            stack.enter_context(patch.object(vllm_generation, "LLM", engine))
        for method in ("ask", "score"):
            made = on_made(getattr(grpo.CdremReward, method))
            stack.enter_context(patch.object(grpo.CdremReward, method, made))
        stack.enter_context(patch.object(grpo.CdremTrainer, "__init__", watched))
        stack.enter_context(patch.object(grpo, "save_trained", lambda *_, **__: {}))
        with tempfile.TemporaryDirectory(prefix="grpo-breakdown-") as folder:
            job = GrpoJob(
                **sized.inputs(Path(folder), steps, dataset),
                init=checkpoint,
                placement=Placement(processes=options.processes, strategy=options.strategy),
                grounder=("grounder", checkpoint),
                verifiers=verifiers,
                models=models,
                config=config,
                max_point_tokens=12,
                batch_size=64,
                device=device,
                serving=SERVING,
            )
            if options.servers:
                engines = stack.enter_context(served(job, Path(folder) / "servers", options.second))
                print(f"{len(engines)} servers answer after {time.perf_counter() - began:.0f} s", flush=True)

                def beside(member: Member, *args: Any, **settings: Any) -> Any:
                    remote = next((name for name, of in verifiers.items() if of is member), None)
                    return nullcontext(engines[remote]) if remote else opened(member, *args, **settings)

                stack.enter_context(patch.object(grpo, "opened", beside))
            grpo.train_grpo(job, lambda done, of, figures: None)
    figures: dict[str, Any] = json.loads(file.read_text()) if is_main() else {}
    return figures


def name_of(options: argparse.Namespace, kind: str, *, lora: bool) -> str:
    """The name of a variant: the kind of rollouts, and what differs from 3B, full, 8 a pass, eager, on one GPU."""
    differs = {
        options.size: options.size != "3B",
        "LoRA": lora,
        f"{options.micro} a pass": options.micro != 8,
        options.engine: kind == "vllm" and options.engine != "eager",
        f"{options.servers} servers": options.servers > 0,
        f"{options.processes} GPUs by {options.strategy}": options.processes > 1,
        f"{options.prompts} × {options.group}": options.size != "tiny" and (options.prompts, options.group) != (8, 8),
    }
    return ", ".join([kind, *(name for name, is_so in differs.items() if is_so)])


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
    rollouts = figures["config"]["prompts_per_step"] * figures["config"]["group_size"]
    return {
        **{name: figures[name] for name in ("size", "rollouts", "engine", "servers", "processes", "strategy")},
        "measured_steps": len(measured),
        "warmed_up": len(figures["steps"]) > 1,
        "stages": {name: round(seconds, 3) for name, seconds in stages.items()},
        "collect_seconds": round(collect, 3),
        "update_seconds": round(update, 3),
        "rollouts_per_second": round(rollouts / baseline.median([sum(step.values()) for step in measured]), 3),
        "ratio": round(update / collect, 4),
        "memory_gb": round(figures["memory_gb"], 1),
        "used_gb": {place: round(gigabytes, 1) for place, gigabytes in figures["used_gb"].items()},
        **({"sampling_logp_difference": round(sum(differences) / len(differences), 4)} if differences else {}),
    }


def record(figures: Sequence[dict[str, Any]], failed: Mapping[str, str], folder: Path) -> Path:
    """Adds runs to the baseline, by their names; its value is of the variant with the most rollouts per second."""
    with baseline.alone(folder):
        before = baseline.earlier(NAME, folder, card())
        kinds = before.get("kinds", {}) | {of["name"]: summary(of) | {"commit": baseline.commit()} for of in figures}
        configurations = before.get("configurations", {}) | {of["name"]: of["config"] for of in figures}
        best = max(kinds, key=lambda kind: float(kinds[kind]["rollouts_per_second"]), default=None)
        common: dict[str, Any] = {
            "command": baseline.command_line(),
            "unit": "s/step until the rewards are known",
            "repetitions": before.get("repetitions", {}) | {of["name"]: of["steps"] for of in figures},
            "folder": folder,
            "device": card(),
            "kinds": kinds,
            "failed": {name: why for name, why in (before.get("failed", {}) | failed).items() if name not in kinds},
            "configurations": configurations,
        }
        if best is None:
            reason = "; ".join(dict.fromkeys(failed.values()))
            return baseline.write(NAME, value=None, against=None, ratio=None, reason=reason, **common)
        return baseline.write(
            NAME,
            value=kinds[best]["collect_seconds"],
            against=kinds[best]["update_seconds"],
            ratio=kinds[best]["ratio"],
            against_what=f"seconds of the update of the same step; rollouts from {best}",
            rollouts=best,
            commit=kinds[best]["commit"],
            trained="lora" if configurations[best]["lora"] else "full",
            **common,
        )


def card() -> str:
    """The device whose records belong together: one GPU, also where a variant uses two; else the CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else baseline.cpu_name()


def without_bars(output: str) -> list[str]:
    """The lines of `output` without progress bars and empty lines."""
    return [line for line in output.splitlines() if line.strip() and not line.rstrip().endswith(("it/s]", "s/it]"))]


def measure(options: argparse.Namespace, given: Sequence[str], kind: str, say: baseline.Log) -> dict[str, Any]:
    """A run in a separate process. Raises RuntimeError with the end of its output if no step was done."""
    limit = options.limit or LIMITS[kind] + 180 * bool(options.servers) + 120 * (options.engine == "compiled")
    first, *others = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with (
        tempfile.TemporaryDirectory(prefix="grpo-breakdown-") as folder,
        sized.shared_checkpoint(options.size, device) as checkpoint,
    ):
        file, log = Path(folder) / "figures.json", Path(folder) / "log"
        arguments = ["benchmarks.grpo_breakdown", *given, "--rollouts", kind, "--run", str(file)]
        arguments += ["--checkpoint", str(checkpoint)]
        if options.servers:
            arguments += ["--second", others[0]]
        # with two GPUs, Trainer would spread a batch over them by threads
        seen = {} if options.processes > 1 else {"CUDA_VISIBLE_DEVICES": first}
        code = limited.run(arguments, log, limit, **seen)
        end = f"its time limit of {limit:.0f} s" if code is None else f"code {code}"
        lines = without_bars(log.read_text(errors="replace"))
        for line in lines:
            if (
                line.startswith(("step ", "stage ", "trainer made", "attention:", "preflight:"))
                or "servers answer" in line
            ):
                say(f"{kind}: {line}")
        if not file.exists():
            raise RuntimeError("\n".join([f"ended by {end} before a step was done", *lines[-120:]]))
        if code != 0:
            say(
                "\n".join([f"{kind}: ended by {end}; the steps before count", *(f"    {line}" for line in lines[-60:])])
            )
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures


def lacking(options: argparse.Namespace, kind: str) -> str:
    """What this machine lacks for a run; empty: nothing."""
    gpus = 2 if options.servers else options.processes
    if torch.cuda.is_available() and torch.cuda.device_count() < gpus:
        return f"{gpus} GPUs are needed, there are {torch.cuda.device_count()}"
    in_vllm = kind == "vllm" or options.servers
    if in_vllm and (not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None):
        return "vLLM and a GPU are not both here"
    return ""


def main(given: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if given is None else given)
    options = arguments(given)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # a sampler of vLLM that would be built first, for top-k and top-p, which nothing here uses
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if options.run:
        one(options, given)
        return
    if options.size != "tiny" and not torch.cuda.is_available():
        record([], dict.fromkeys(KINDS, "no GPU here; `--size tiny` proves the code path on a CPU"), options.folder)
        raise SystemExit("no GPU here: use --size tiny")
    say = baseline.Log(NAME, options.folder, keep=True)
    say(f"{baseline.command_line()}, on {baseline.device_name()}")
    failed: dict[str, str] = {}
    for kind in options.rollouts or KINDS:
        done: list[dict[str, Any]] = []
        name = name_of(options, kind, lora=config_of(options, kind).lora is not None)
        if why := lacking(options, kind):
            failed[name] = why
        else:
            try:
                done = [measure(options, given, kind, say)]
                say(f"{name}: {json.dumps(summary(done[0]))}")
            except RuntimeError as error:
                failed[name] = str(error)[-6000:]
        if name in failed:
            say(f"{name} failed: {failed[name]}")
        record(done, failed, options.folder)


def one(options: argparse.Namespace, given: Sequence[str]) -> None:
    """A run in this process, or as one of the processes that `accelerate launch` starts for it."""
    [kind] = options.rollouts[-1:]
    on_gpu = torch.cuda.is_available()
    placement = Placement(processes=options.processes, strategy=options.strategy)
    if placement.spread and not is_rank():
        with tempfile.TemporaryDirectory(prefix="grpo-breakdown-") as scratch:
            sys.exit(launch_ranks(placement, Path(scratch), "benchmarks.grpo_breakdown", list(given), on_gpu=on_gpu))
    if on_gpu and is_rank():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    run(options, kind, options.run)


if __name__ == "__main__":
    main()
