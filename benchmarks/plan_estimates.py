"""What `coepg plan` estimates against what is measured: memory and time of each kind of stage, one GPU.

SFT, a planner's candidates and a verifier's verdicts are run here, as jobs of the loop. At 3B GRPO is the step that
`grpo_breakdown` measured on the same device, and compiled SFT the runs of `sft_mfu`; of another `--size`, GRPO is a step of
`grpo_breakdown` that is run here, and the baseline is `plan_estimates_SIZE`. The estimate gets rates and lengths of texts as in
`coepg plan`; memory is the peak of tensors. `ratio` is estimate over measurement, of the stage that is farthest off; a stage
with a `note` was measured with other code and is in no ratio. The baseline is written anew after each stage. `--again`
measures nothing: it estimates anew what is in the baseline. `--quick` runs the tiny model of the family; its ratios mean
nothing.
"""

from __future__ import annotations

import argparse
import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks import grpo_breakdown, limited, pool_scaling, sized
from benchmarks.baseline import FOLDER, Log, command_line, device_name, earlier, write, write_none
from benchmarks.sft_mfu import measure as measure_sft
from coepg_dagster import running
from coepg_dagster.artifacts import write_steps
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.jobs import VerdictsJob
from coepg_dagster.planning.dryrun import find_gpus
from coepg_dagster.planning.estimates import (
    CARDS,
    Example,
    Graders,
    Memory,
    Rates,
    Spread,
    generation_memory,
    generation_seconds,
    grpo_memory,
    grpo_seconds,
    rates_of,
    sft_memory,
    sft_seconds,
)
from coepg_dagster.steps import CANDIDATE_SCHEMA, GATE_PASSED

NAME: Final = "plan_estimates"
SFT_RUNS: Final[dict[str, list[str]]] = {
    "sft, vision frozen, all recomputed": ["--freeze-vision", "--micro", "6", "--recompute", "1"],
    "sft, half recomputed": ["--micro", "2", "--recompute", "0.5"],
}
PROMPT: Final = 90
"""Text tokens of a planner's prompt, as `coepg plan` takes them for compact prompts; a grounder's has half of them."""
POINT: Final = 12


def name_of(size: sized.Size) -> str:
    """The name of the baseline of a size."""
    return NAME if size == "3B" else f"{NAME}_{size}"


def off(ratio: float) -> float:
    """How far a ratio is from 1, in either direction."""
    return max(ratio, 1 / ratio) if ratio > 0 else float("inf")


def estimated(stage: dict[str, Any], rates: Rates, card: float) -> tuple[Memory, float]:
    """(memory, seconds) that `coepg plan` estimates for a measured stage, whose settings are in `stage`."""
    model, kind = sized.architecture_of(stage["size"]), stage["kind"]
    image = sized.SCREENS[stage["size"]]
    if kind == "sft":
        sft, example = Sft.model_validate(stage["config"]), Example(image, stage["prompt"], stage["answer"])
        return sft_memory(model, sft, example), sft_seconds(model, sft, example, stage["rows"], rates)
    if kind == "generation":
        example = Example(image, stage["prompt"], stage["answer"])
        given: Any = (model, example, stage["batch"], stage["samples"])
        return generation_memory(*given), generation_seconds(*given, stage["screenshots"], rates)
    config = Grpo.model_validate(stage["config"])
    plan, point = Example(image, PROMPT, config.max_plan_tokens), Example(image, PROMPT // 2, POINT)
    graders = [model, model]
    memory = grpo_memory(model, graders, config, plan, Spread(memory=card), serving=grpo_breakdown.SERVING)
    return memory, grpo_seconds(
        model, Graders(graders, point, stage["batch"]), config, plan, config.prompts_per_step, rates
    )


def sft(size: sized.Size, settings: list[str], say: Log, timeout: float) -> dict[str, Any]:
    """One measured SFT run."""
    return sft_stage(size, measure_sft(settings, say, timeout=timeout))


def sft_stage(size: sized.Size, figures: dict[str, Any]) -> dict[str, Any]:
    """The stage of an SFT run that `sft_mfu` measured."""
    chosen, answer = figures["configuration"], round(figures["scored_per_sequence"])
    config = Sft(
        batch_size=chosen["micro"] * chosen["accumulation"],
        micro_batch_size=chosen["micro"],
        freeze_vision=chosen["freeze_vision"],
        recompute=chosen["recompute"],
        compile=chosen["kernels"] == "compiled",
    )
    return {
        "kind": "sft",
        "size": size,
        "config": config.model_dump(mode="json"),
        "prompt": round(figures["tokens_per_sequence"] - figures["image_tokens"] - answer),
        "answer": answer,
        "rows": figures["sequences"],
        "measured": {"gb": figures["memory_gb"], "seconds": sum(figures["step_seconds"])},
        "figures": figures,
    }


def candidates(options: argparse.Namespace, say: Log) -> dict[str, Any]:
    """One measured planner pool."""
    size: sized.Size = options.size
    batch, plans, tokens = (8, 2, 8) if options.quick else (48, 4, 64)
    settings = ["--size", size, "--batch", str(batch), "--plans", str(plans), "--tokens", str(tokens)]
    settings += ["--chunk", "8" if options.quick else "24", "--chunks", "3"]
    figures = pool_scaling.measure(settings, 1, options.checkpoint, say, timeout=options.timeout)
    return {
        "kind": "generation",
        "size": size,
        "prompt": PROMPT,
        "answer": tokens,
        "batch": batch,
        "samples": plans,
        "screenshots": figures["candidates"] // plans,
        "measured": {
            "gb": figures["memory_gb"],
            "seconds": figures["candidates"] / figures["candidates_per_second"],
        },
        "figures": figures,
    }


def verdicts_work(size: sized.Size, screens: int, plans: int, batch: int, checkpoint: Path, folder: Path) -> Any:
    """A VerdictsJob in chunks: one verifier on `plans` plans of each of `screens` screenshots."""
    steps, dataset = sized.tables(size, screens * plans, screens=screens)
    shown = steps.slice(0, screens)
    write_steps(shown, folder / "steps.arrow", ["train"])
    made = [
        {
            "candidate_id": f"s{i % screens:05}#{i}",
            "step_id": f"s{i % screens:05}",
            "planner": "made",
            "sample": i // screens,
            "text": row["plan"],
            "plan": row["plan"],
            "action_type": "CLICK",
            "value": "",
            "gate": GATE_PASSED,
            "duplicate_of": None,
            "prompt_hash": "",
            "sampling_seed": 0,
        }
        for i, row in enumerate(dataset.to_pylist())
    ]
    pq.write_table(pa.Table.from_pylist(made, CANDIDATE_SCHEMA), folder / "candidates.parquet")
    for name in ("scratch", "out"):
        (folder / name).mkdir()
    path = str(checkpoint)
    job = VerdictsJob(
        out=folder / "out",
        scratch=folder / "scratch",
        steps=folder / "steps.arrow",
        models=sized.models_of(path),
        device="cuda" if torch.cuda.is_available() else "cpu",
        batch_size=batch,
        seed=13,
        processes=1,
        members={"open": path},
        candidates=folder / "candidates.parquet",
        train_split="train",
        config=Regeneration(max_point_tokens=POINT),
        shuffled_plans=0,
    )
    return running.chunked(job)


def verdicts_here(options: argparse.Namespace) -> dict[str, Any]:
    """One measured verifier pool, in this process: rates are those after the first chunk."""
    screens, plans, batch = (4, 2, 4) if options.quick else (24, 8, 64)
    size: sized.Size = options.size
    running.CHUNK = screens * plans // 3
    with tempfile.TemporaryDirectory(prefix="verdicts-") as temporary:
        work = verdicts_work(size, screens, plans, batch, options.checkpoint, Path(temporary))
        figures = work.run(lambda done, of, _: print(f"step {done} of {of} chunks", flush=True))
        files = [work.file_of(chunk) for chunk in work.chunks() if chunk.start != running.CONTROL]
        ends = sorted(file.stat().st_mtime for file in files)
    seconds = [b - a for a, b in pairwise(ends)]
    return {
        "kind": "generation",
        "size": size,
        "prompt": PROMPT // 2,
        "answer": POINT,
        "batch": batch,
        "samples": plans,
        "screenshots": len(seconds) * running.CHUNK // plans,
        "measured": {
            "gb": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0,
            "seconds": sum(seconds),
        },
        "figures": {"chunk_seconds": seconds, "rows": figures["rows"], "failed": figures["failed_open"]},
    }


def grpo_here(options: argparse.Namespace) -> dict[str, Any]:
    """The steps of `grpo_breakdown` with rollouts of transformers, in this process; the first is not measured."""
    given = ["--rollouts", "transformers", "--train", "full", "--steps", "3", "--run", str(options.out)]
    given += ["--checkpoint", str(options.checkpoint), *["--prompts", "2", "--group", "4"] * options.quick]
    asked = grpo_breakdown.arguments(given)
    asked.size = options.size
    with tempfile.TemporaryDirectory(prefix="grpo-") as folder:
        figures = grpo_breakdown.run(asked, "transformers", Path(folder) / "steps.json")
    of = grpo_breakdown.summary(figures)
    return {
        "kind": "grpo",
        "size": options.size,
        "config": figures["config"],
        "batch": 64,
        "measured": {"gb": of["memory_gb"], "seconds": of["collect_seconds"] + of["update_seconds"]},
        "figures": of,
    }


STAGES: Final[dict[str, Callable[[argparse.Namespace], dict[str, Any]]]] = {
    "verdicts": verdicts_here,
    "grpo": grpo_here,
}


def in_process(stage: str, options: argparse.Namespace, say: Log) -> dict[str, Any]:
    """A stage of STAGES in a separate process."""
    with tempfile.TemporaryDirectory() as temporary:
        file, log = Path(temporary) / "stage.json", Path(temporary) / "log"
        arguments = ["benchmarks.plan_estimates", "--stage", stage, "--out", str(file), "--size", options.size]
        arguments += ["--checkpoint", str(options.checkpoint), *["--quick"] * options.quick]
        code = limited.run(arguments, log, options.timeout)
        lines = log.read_text(errors="replace").splitlines()
        say("\n".join(f"  {line}" for line in lines[-6 if code == 0 else -80 :]))
        if not file.exists():
            raise RuntimeError(f"{stage} ended by {'the limit' if code is None else f'code {code}'}")
        made: dict[str, Any] = json.loads(file.read_text())
        return made


def measured_by_others(device: str) -> dict[str, dict[str, Any]]:
    """Stages that other benchmarks measured on such a device: GRPO steps by source of the rollouts, compiled SFT runs."""
    stages: dict[str, dict[str, Any]] = {}
    steps = earlier(grpo_breakdown.NAME, FOLDER, device)
    for kind, of in steps.get("kinds", {}).items():
        if of["servers"] or of["processes"] > 1:
            continue  # more than one GPU
        stages[f"grpo, rollouts from {kind}"] = {
            "kind": "grpo",
            "size": of["size"],
            "config": steps["configurations"][kind],
            "batch": 64,
            "measured": {"gb": of["memory_gb"], "seconds": of["collect_seconds"] + of["update_seconds"]},
            "from": f"{grpo_breakdown.NAME}, {of.get('commit', steps['commit'])}",
        }
    runs = earlier("sft_mfu", FOLDER, device)
    for name, figures in runs.get("configurations", {}).items():
        stage = sft_stage(figures["configuration"]["size"], figures)
        del stage["figures"]
        if name == runs["fastest"]:
            del stage["measured"]["seconds"]  # the rate is made from them
        stages[f"sft, {name}"] = stage | {"from": f"sft_mfu, {figures['commit']}"}
    return stages


def known_stages(device: str) -> dict[str, dict[str, Any]]:
    """Stages of the 3B measured on such a device: those in the baseline, replaced by newer ones of other benchmarks."""
    stages: dict[str, dict[str, Any]] = earlier(NAME, FOLDER, device).get("stages", {})
    newer = {
        name: stage
        for name, stage in measured_by_others(device).items()
        if stage["from"] != stages.get(name, {}).get("from")
    }
    return stages | newer


def measured_earlier(name: str) -> dict[str, dict[str, Any]]:
    """The stages of the baseline `name` on such a device; each says from which commit it is."""
    facts = earlier(name, FOLDER, device_name())
    return {of: {"from": f"{name}, {facts['commit']}"} | stage for of, stage in facts.get("stages", {}).items()}


def record(
    name: str, stages: dict[str, dict[str, Any]], failed: dict[str, str], card: str, log: Path, **more: Any
) -> None:
    """Writes the baseline `name` of `stages` with the current estimate of each; `more`: as in `write`."""
    rates = rates_of(CARDS[card], FOLDER)
    ratios = {}
    for of, stage in stages.items():
        memory, seconds = estimated(stage, rates, CARDS[card].memory)
        stage["estimate"] = {"gb": memory.total / 1e9, "seconds": seconds}
        for unit, measured in stage["measured"].items():
            if measured and "note" not in stage:
                ratios[f"{of}: {unit}"] = stage["estimate"][unit] / measured
    worst = max(ratios, key=lambda key: off(ratios[key]))
    write(
        name,
        command=command_line(),
        value=round(ratios[worst], 4),
        unit="× (estimate over measurement)",
        against=1.0,
        ratio=round(ratios[worst], 4),
        repetitions={key: round(value, 4) for key, value in ratios.items()},
        log=log,
        what=f"The estimate that is farthest off: {worst}.",
        rates=rates.basis,
        card=card,
        stages=stages,
        failed=failed,
        **more,
    )


def measured_before(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(a baseline, what of it stays where its measurements are estimated again, with a note that says so)."""
    facts = json.loads((FOLDER / f"{name}.json").read_text())
    note = "Estimated again by the code that this file is committed with; commit, date and versions are of the measurements."
    return facts, {key: facts[key] for key in ("device", "commit", "date", "versions")} | {"note": note}


def estimate_again() -> None:
    """Writes the baseline with current estimates; commit, date and versions stay those of the measurements."""
    facts, stays = measured_before(NAME)
    record(NAME, known_stages(facts["device"]), facts["failed"], facts["card"], FOLDER / f"{NAME}.log", **stays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model; proves the code path")
    parser.add_argument("--again", action="store_true", help="estimate anew what was measured at 3B; needs no GPU")
    parser.add_argument("--size", choices=sized.SIZES, default="3B")
    parser.add_argument("--timeout", type=float, default=85, help="seconds for each run")
    parser.add_argument(
        "--only", action="append", metavar="RUN", help="one run; again for more. The others stay as measured"
    )
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)  # one stage, in this process
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # its JSON file
    options = parser.parse_args()
    if options.stage:
        options.out.write_text(json.dumps(STAGES[options.stage](options)))
        return
    if options.again:
        estimate_again()
        return
    name = name_of(options.size)
    here = found.card if (found := find_gpus()) else None
    if here is None and not options.quick:
        reason = f"no GPU here of a kind that `coepg plan` knows ({', '.join(CARDS)}); `--quick` proves the code path on a CPU"
        write_none(name, "×", reason)
        raise SystemExit(reason)
    if options.quick:
        options.size = "qwen3-tiny" if options.size.startswith("qwen3") else "tiny"
    cuda, card = torch.cuda.is_available(), here.name if here else "H200-141GB"
    say = Log(name, Path(tempfile.mkdtemp(prefix="quick-"))) if options.quick else Log(name)
    say(f"{card}, rates: {rates_of(CARDS[card], FOLDER).basis}")
    size: sized.Size = options.size
    options.checkpoint = Path(tempfile.gettempdir() if options.quick else "/dev/shm") / f"coepg-{size}-sharp"  # noqa: S108
    atexit.register(shutil.rmtree, options.checkpoint, ignore_errors=True)  # gigabytes of memory
    sized.make_checkpoint(options.checkpoint, size, device="cuda" if cuda else "cpu", sharp=True)
    if cuda:
        torch.cuda.empty_cache()  # the runs need the whole card
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "candidates": lambda: candidates(options, say),
        "verdicts": lambda: in_process("verdicts", options, say),
    }
    for of, settings in SFT_RUNS.items():
        small = ["--device", "cuda" if cuda else "cpu", "--micro", "2", "--steps", "3"]
        chosen = ["--size", size, *(small if options.quick else [*settings, "--steps", "4"])]
        chosen += ["--accumulation", "2" if options.quick else "4", "--warmup", "1"]
        runs[of] = lambda chosen=chosen: sft(size, chosen, say, options.timeout)  # type: ignore[misc]
    known = known_stages(device_name()) if size == "3B" else {}
    if size not in ("3B", "tiny"):
        runs["grpo, rollouts from transformers"] = lambda: in_process("grpo", options, say)
    stages, failed = {of: stage for of, stage in known.items() if "from" in stage}, dict[str, str]()
    if options.only:
        if unknown := set(options.only) - runs.keys():
            parser.error(f"--only: no run {', '.join(sorted(unknown))}; there are {', '.join(runs)}")
        stages = measured_earlier(name) | stages  # what others measured since goes before it
        runs = {of: runs[of] for of in options.only}
    for of, run in runs.items():
        try:
            stages[of] = run()
            for unit, measured in stages[of]["measured"].items():
                say(f"{of}: {measured:.2f} {unit}")
        except RuntimeError as error:
            failed[of] = str(error)[-3000:]
            say(f"{of} failed: {failed[of]}")
        if stages and not options.quick:
            record(name, stages, failed, card, say.path)
    rates = rates_of(CARDS[card], FOLDER)
    for of, stage in stages.items():
        memory, seconds = estimated(stage, rates, CARDS[card].memory)
        measured = stage["measured"]
        say(f"{of}: {memory.total / 1e9:.1f} GB estimated, {measured['gb'] or 0:.1f} measured")
        if "seconds" in measured:
            say(f"{of}: {seconds:.1f} s estimated, {measured['seconds']:.1f} measured")
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
