"""SFT with the rows of a step as one row, against separate rows: time of forward and backward passes.

The same rows of D_{k-1} and model, in turns, through TRL's collator and the model's forward pass, as the trainer calls them:
steps with one to eight plans, for a planner (the plan is the answer) and for a grounder (the plan is in the prompt), the vision
tower frozen. `--size tiny` runs on a CPU, on one thread, and counts CPU time, which other work changes little; embeddings of
screenshots are cached for both, as in the trainer there. `--size 3B` runs on a GPU with bf16 weights, recomputed activations,
screenshots encoded in each pass, and the fastest number of rows per pass for each; `--compiled` with compiled layers and no
recomputed activations, as an 80 GB card trains fastest. The baseline is `sft_packing_tiny`, `sft_packing_3B` or
`sft_packing_3B_compiled`; it has the largest difference of the log-probabilities of a row, too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
from trl.trainer.utils import add_fused_lm_head

from benchmarks import baseline, sized
from coepg_dagster.inference.attention import fast_vision
from coepg_dagster.inference.visual import Screenshots, Tower, VisualStore
from coepg_dagster.prompts import assistant, grounder_answer, grounder_messages, planner_answer, planner_messages
from coepg_dagster.training.groups import in_groups, parts
from coepg_dagster.training.packing import packed_pass
from coepg_dagster.training.sft import with_keys
from coepg_dagster.training.speed import compile_layers, expect_right_padding, half_activations, recompute

ROLES = ("planner", "grounder")
MOST = 8
"""Rows of D_{k-1} for a step, at most."""


def rows_of(role: str, size: sized.Size, steps: int) -> list[list[dict[str, Any]]]:
    """Examples of `steps` steps with 1 to MOST plans each."""
    draw, small = np.random.default_rng(3), size == "tiny"
    groups = []
    for g in range(steps):
        width, height = sized.SCREENS[size]
        image = Image.fromarray(draw.integers(256, size=(height, width, 3), dtype=np.uint8))
        history = [f"click {i}" for i in range(g % 3 if small else 12)]
        asked = planner_messages(f"Open entry {g} of the list and save it", history, "compact" if small else "web")
        group = []
        for _ in range(1 + g % MOST):
            plan = sized.plan_of(draw, int(draw.integers(4, 12) if small else draw.integers(20, 60)))
            of_planner = asked, planner_answer(plan, "CLICK", "")
            of_grounder = (
                grounder_messages(plan, "compact" if small else "web"),
                grounder_answer(*draw.integers(99, size=2)),
            )
            prompt, answer = of_planner if role == "planner" else of_grounder
            group.append({"step_id": f"s{g}", "prompt": prompt, "completion": assistant(answer), "images": [image]})
        groups.append(group)
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("tiny", "3B"), default="tiny")
    parser.add_argument(
        "--steps", type=int, default=8, help="steps of the benchmark that have rows, with 1, 2, … 8, 1, … plans"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--compiled", action="store_true", help="compile the layers and recompute nothing")
    options = parser.parse_args()
    small, (device, dtype) = options.size == "tiny", sized.placed(options.size)
    cuda = device == "cuda"
    name = f"sft_packing_{options.size}" + "_compiled" * options.compiled
    say = baseline.Log(name)
    with tempfile.TemporaryDirectory() as folder:
        processor = sized.write_processor(Path(folder) / "processor", options.size)
    model = sized.make_model(options.size, device, dtype)
    model.model.visual.requires_grad_(False)
    shown = Screenshots(processor)
    Tower(model, shown, VisualStore())
    language = model.model.language_model.config
    masked = language._attn_implementation
    if cuda:
        fast_vision(model)
        half_activations(model)
        recompute(model, 0 if options.compiled else 1)
        expect_right_padding(model)
    if options.compiled:
        compile_layers(model)
    alone = language._attn_implementation
    add_fused_lm_head(model.train())
    collate = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
    collators = {
        "rows": collate if cuda else with_keys(collate, shown),
        "groups": in_groups(collate, shown, pixels=cuda),
    }
    settings = {"fused_lm_head": True, "use_cache": False}
    clock = time.process_time if small else time.perf_counter

    def passes(role: str, kind: str, each: int) -> list[Any]:
        """The batches of all rows, `each` per pass: exactly, or of whole groups on average."""
        groups = rows_of(role, options.size, options.steps)
        rows = [row for group in groups for row in group]
        if kind == "rows":
            cut = [rows[start : start + each] for start in range(0, len(rows), each)]
        else:
            cut = [[row for group in of_pass for row in group] for of_pass in parts(groups, -(-len(rows) // each))]
        return [collators[kind]([dict(row) for row in part]) for part in cut if part]

    def update(kind: str, batches: list[Any]) -> tuple[float, torch.Tensor]:
        """(seconds, log-probability of each row)."""
        language._attn_implementation = masked if kind == "groups" else alone
        model.zero_grad(set_to_none=True)
        batches = [{n: t.to(device) for n, t in batch.items()} for batch in batches]
        if cuda:
            torch.cuda.synchronize()
        began, logps = clock(), []
        for batch in batches:
            with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
                output = (
                    packed_pass(model, model, **batch, **settings) if kind == "groups" else model(**batch, **settings)
                )
            (-output.log_probs.sum()).backward()
            logps.append(output.log_probs.detach().sum(-1))
        if cuda:
            torch.cuda.synchronize()
        return clock() - began, torch.cat(logps)

    sizes = {"rows": [4, 9, 18], "groups": [8, 18, 36]}
    if options.compiled:  # the activations of all layers are kept
        sizes = {"rows": [4, 6, 12], "groups": [9, 18, 36]}
    if small:
        sizes = {"rows": [36], "groups": [36]}
    runs = {
        f"{role}, {kind}, {n} rows a pass": (kind, passes(role, kind, n))
        for role in ROLES
        for kind, ns in sizes.items()
        for n in ns
    }
    taken: dict[str, list[float]] = {run: [] for run in runs}
    logps: dict[str, torch.Tensor] = {}
    memory: dict[str, float] = {}
    for repetition in range(options.repetitions + 1):
        for run, (kind, batches) in runs.items():
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            seconds, logps[run] = update(kind, batches)
            say(f"repetition {repetition}, {run}: {seconds:.2f} s")
            memory[run] = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
            if repetition:  # the first warms up, and encodes the screenshots of a CPU
                taken[run].append(seconds)
    medians = {run: baseline.median(seconds) for run, seconds in taken.items()}
    rows, best, apart = len(next(iter(logps.values()))), dict[str, float](), 0.0
    for run, seconds in medians.items():
        say(f"{run}: {1000 * seconds / rows:.1f} ms a row, {memory[run]:.1f} GB")
    for role in ROLES:
        of_role = {run: seconds for run, seconds in medians.items() if run.startswith(role)}
        for kind in sizes:
            best[f"{role}, {kind}"] = min(s for run, s in of_role.items() if f", {kind}," in run)
        one, *others = (logps[run] for run in of_role)
        apart = max(apart, *(float((one - other).abs().max()) for other in others))
    packed, separate = (sum(best[f"{role}, {kind}"] for role in ROLES) for kind in ("groups", "rows"))
    ratios = {role: round(best[f"{role}, rows"] / best[f"{role}, groups"], 3) for role in ROLES}
    say(f"packed {packed:.2f} s, rows {separate:.2f} s: {separate / packed:.2f} times {ratios}; {apart:.1e} nats apart")
    baseline.write(
        name,
        command=baseline.command_line(),
        value=round(packed, 4),
        against=round(separate, 4),
        ratio=round(separate / packed, 3),
        unit=f"{'seconds of CPU time' if small else 's'}, forward and backward passes of SFT of planner and grounder",
        against_what="the same rows, each alone",
        repetitions=taken,
        device=None if cuda else baseline.cpu_name(),
        ratios=ratios,
        steps=options.steps,
        rows=rows,
        logps_apart=apart,
        memory_gb=memory,
    )


if __name__ == "__main__":
    main()
