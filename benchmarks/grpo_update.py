"""Update of a GRPO step with one row per group, against one row per rollout: seconds of forward and backward passes.

The same rollouts and model through the model's forward pass, in turns, as the trainer calls it: groups of 8, completions of up
to 35 tokens (tiny) or 80 (3B), the vision tower frozen and its embeddings cached for both. `--size tiny` runs on a CPU, on one
thread; `--size 3B` on a GPU with bf16 weights, recomputed activations, and the fastest number of rollouts per pass for each.
The baseline is `grpo_update_tiny` or `grpo_update_3B`; it has the largest difference of their log-probabilities, too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from trl.trainer.utils import add_fused_lm_head

from benchmarks import baseline, sized
from coepg_dagster.inference.attention import fast_vision
from coepg_dagster.inference.visual import Screenshots, Tower, VisualStore
from coepg_dagster.prompts import planner_messages
from coepg_dagster.training.packing import pack, select_rows
from coepg_dagster.training.speed import half_activations

GROUP = 8


def rollouts(processor: Any, size: sized.Size, groups: int, answer: int, shown: Screenshots) -> dict[str, torch.Tensor]:
    """Rollouts of `groups` prompts, as TRL makes them, with keys of the vision cache in place of pixels."""
    draw = torch.Generator().manual_seed(3)
    words = [t for t in range(1000) if t not in processor.tokenizer.all_special_ids][:400]
    texts, images = [], []
    for g in range(groups):
        history = [f"click {i}" for i in range(12 if size != "tiny" else g % 3)]
        messages = planner_messages(
            f"Open entry {g} of the list and save it", history, "web" if size != "tiny" else "compact"
        )
        texts += [processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)] * GROUP
        images += [[Image.effect_noise(sized.SCREENS[size], 60 + g).convert("RGB")]] * GROUP
    with shown.keys():
        made = processor(text=texts, images=images, padding=True, return_tensors="pt")
    lengths = torch.randint(answer // 2, answer + 1, (len(texts), 1), generator=draw)
    mask = (torch.arange(answer) < lengths).long()
    answers = torch.tensor(words)[torch.randint(len(words), mask.shape, generator=draw)] * mask
    return {
        "input_ids": torch.cat([made["input_ids"], answers], 1),
        "attention_mask": torch.cat([made["attention_mask"], mask], 1),
        "mm_token_type_ids": torch.cat([made["mm_token_type_ids"], torch.zeros_like(answers)], 1),
        "pixel_values": made["pixel_values"],
        "image_grid_thw": made["image_grid_thw"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("tiny", "3B"), default="tiny")
    parser.add_argument("--groups", type=int, help="prompts in all; default 16 (3B: 12)")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    small, (device, dtype) = options.size == "tiny", sized.placed(options.size)
    cuda = device == "cuda"
    groups, answer = options.groups or (16 if small else 12), 35 if small else 80
    say = baseline.Log(f"grpo_update_{options.size}")
    with tempfile.TemporaryDirectory() as folder:
        processor = sized.write_processor(Path(folder) / "processor", options.size)
    processor.tokenizer.padding_side = "left"
    model = sized.make_model(options.size, device, dtype)
    model.model.visual.requires_grad_(False)
    shown = Screenshots(processor)
    Tower(model, shown, VisualStore())
    if cuda:
        fast_vision(model)
        half_activations(model)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    add_fused_lm_head(model.train(), temperature=0.9)
    batch = {n: t.to(device) for n, t in rollouts(processor, options.size, groups, answer, shown).items()}
    weights = torch.randn(groups * GROUP, answer, generator=torch.Generator().manual_seed(1)).to(device)

    def rows(part: dict[str, Any]) -> torch.Tensor:
        labels = part["input_ids"].masked_fill(part["attention_mask"] == 0, -100)
        labels[:, :-answer] = -100
        logps: torch.Tensor = model(**part, labels=labels, fused_lm_head=True).log_probs[:, -answer:]
        return logps

    def packed(part: dict[str, Any]) -> torch.Tensor:
        of_groups = pack(model, completion=answer, **part)
        output = model(**of_groups.inputs, labels=of_groups.labels, fused_lm_head=True)
        return of_groups.unpack(output.log_probs)

    def update(compute: Callable[[dict[str, Any]], torch.Tensor], each: int) -> tuple[float, torch.Tensor]:
        """(seconds, log-probabilities) of all rollouts, `each` per pass."""
        model.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
        began, parts = time.perf_counter(), []
        for start in range(0, len(weights), each):
            chosen = range(start, min(len(weights), start + each))
            with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
                logps = compute(select_rows(batch, chosen))
            (logps * weights[start : start + each]).sum().backward()
            parts.append(logps.detach())
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began, torch.cat(parts)

    sizes = {"rows": [64] if small else [8, 16], "groups": [64] if small else [8, 16, 32, 48]}
    kinds = {"rows": rows, "groups": packed}
    taken: dict[str, list[float]] = {f"{kind}, {n} rollouts a pass": [] for kind in kinds for n in sizes[kind]}
    logps: dict[str, torch.Tensor] = {}
    memory: dict[str, float] = {}
    for repetition in range(options.repetitions + 1):
        for kind, compute in kinds.items():
            for n in sizes[kind]:
                name = f"{kind}, {n} rollouts a pass"
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                seconds, logps[kind] = update(compute, n)
                memory[name] = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
                if repetition:  # the first warms up, and encodes the screenshots
                    taken[name].append(seconds)
    apart = float((logps["rows"] - logps["groups"]).abs().max())
    medians = {name: baseline.median(seconds) for name, seconds in taken.items()}
    best = {kind: min(s for name, s in medians.items() if name.startswith(kind)) for kind in kinds}
    for name, seconds in medians.items():
        say(f"{name}: {1000 * seconds / groups:.0f} ms a group, {memory[name]:.1f} GB")
    say(
        f"groups {best['groups']:.2f} s, rows {best['rows']:.2f} s: {best['rows'] / best['groups']:.2f} times; "
        f"{apart:.1e} nats apart"
    )
    baseline.write(
        f"grpo_update_{options.size}",
        command=baseline.command_line(),
        value=round(best["groups"], 4),
        against=round(best["rows"], 4),
        ratio=round(best["rows"] / best["groups"], 3),
        unit="s, forward and backward passes of an update",
        against_what="the same rollouts, a row each",
        repetitions=taken,
        device=None if cuda else baseline.cpu_name(),
        tokens={"prompt": int(batch["attention_mask"][:, :-answer].sum(1).max()), "completion": answer},
        prompts=groups,
        group_size=GROUP,
        logps_apart=apart,
        memory_gb=memory,
    )


if __name__ == "__main__":
    main()
