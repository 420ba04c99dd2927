"""Model cards: what a checkpoint is, what it was made from, and its measured accuracy.

Choices between variants may use `validation` only; the test splits are measured once, for the card.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

from coepg_dagster.markdown import table
from coepg_dagster.sandbox.pretraining import corpus, evaluate, tiny_models
from coepg_dagster.sandbox.pretraining.corpus import Corpus
from coepg_dagster.sandbox.pretraining.evaluate import Rate
from coepg_dagster.sandbox.pretraining.recipe import Checkpoint, Recipe, read
from coepg_dagster.sandbox.pretraining.wordings import WORDINGS

SPLITS: Final = ("validation", "test_seed", "test_text", "test_family")
BASE_PLANNER: Final = "base-planner"
BASE_GROUNDER: Final = "base-grounder"

Results = dict[str, dict[str, Rate]]
"""Row name → column name → rate."""

_EXAMPLES: Final = {
    "A": "button 'previous'",
    "B": "press on the previous button",
    "C": "click the element reading 'previous', a button near the lower left",
    "D": "use the push button marked previous",
}
_TITLES: Final = {"planner": "A tiny planner", "grounder": "A tiny grounder"}


def held_out_results(
    directory: Path, checkpoint: Checkpoint, screens: Corpus, *, cases: int = 600, device: str = "cpu"
) -> Results:
    """Results on held-out pretraining screens: at most `cases` questions or steps per row."""
    model: Any
    model, processor = tiny_models.load(directory)
    model = model.to(device)
    kept = screens.indices(held_out=True)
    if checkpoint.role == "grounder":
        rows = {}
        for wording in WORDINGS:
            rates = evaluate.grounding(model, processor, screens, kept, wording, cases)
            rows[f"wording {wording}"] = {"click in box": rates.pop("all"), **rates}
        return rows
    chosen = sorted(Random(0).sample(kept, min(cases, len(kept))))
    wordings = list(checkpoint.wordings)
    rows = {"greedy": evaluate.planning(model, processor, screens, chosen, wordings)}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rows["sampled at T = 1"] = evaluate.planning(model, processor, screens, chosen, wordings, temperature=1.0)
    return rows


def pair_results(planner: Path, grounder: Path, snapshot: Path, *, device: str = "cpu") -> Results:
    """Step success of a planner and a grounder on every evaluated split of the shipped snapshot (micro averages)."""
    models: list[tuple[Any, Any]] = []
    for directory in (planner, grounder):
        model: Any
        model, processor = tiny_models.load(directory)
        models.append((model.to(device), processor))
    rows: Results = {}
    for split in SPLITS:
        steps = corpus.read([snapshot / f"{split}.parquet"], splits=(split,))
        rows[split] = evaluate.pair(models[0], models[1], steps, range(len(steps)))
    return rows


def _table(rows: Results, columns: Sequence[str]) -> str:
    cells = [
        [name, *(str(rates[column]) if column in rates else "–" for column in columns)] for name, rates in rows.items()
    ]
    return table(["", *columns], cells)


def text(
    name: str,
    recipe: Recipe,
    recipe_file: str,
    parameters: int,
    reports: Mapping[str, Any],
    held_out: Results,
    pairs: Mapping[str, Results],
) -> str:
    """The card in Markdown.

    Args:
        name: name of the checkpoint.
        recipe: the recipe that made it.
        recipe_file: the name of its file.
        parameters: their number.
        reports: what `run` writes to `work/reports.json`: `Corpus.summary()` as "data", the reports of its tower and of its
            own stage among those of "stages".
        held_out: from `held_out_results`.
        pairs: title → `pair_results`.
    """
    data, stages = reports["data"], reports["stages"]
    checkpoint = recipe.checkpoints[name]
    tower = recipe.towers[checkpoint.tower]
    wordings = "\n".join(f"- {w}, weight {weight:g}: `{_EXAMPLES[w]}`" for w, weight in checkpoint.wordings.items())
    verb = "Writes plans in" if checkpoint.role == "planner" else "Trained to understand"
    share = round(100 * checkpoint.data_share)
    families = checkpoint.families or data["families"]
    seen = f"It saw {len(families)} of these families: " if checkpoint.families else "Families: "
    seen += ", ".join(families)
    ran = "\n".join(
        f"| {title} | {stages[key]['steps']} x {size} screens | {stages[key]['seconds']:.0f} s | {stages[key]['device']} |"
        for title, key, size in (
            (f"tower `{checkpoint.tower}`", f"tower {checkpoint.tower}", tower.batch),
            (checkpoint.role, name, checkpoint.batch),
        )
    )
    first = "click in box" if checkpoint.role == "grounder" else "plan"
    kinds = sorted({column for rates in held_out.values() for column in rates} - {first})
    columns = [first, *kinds] if checkpoint.role == "grounder" else ["plan", "vague", "type", "value", "typed value"]
    parts = [
        f"# {name}",
        f"{_TITLES[checkpoint.role]} for the embedded benchmark (MiniWoB++): {checkpoint.use}. A Qwen2.5-VL of "
        f"{parameters / 1e6:.2f} M parameters (preset `{tower.preset}`), trained from scratch by `coepg pretrain sandbox` "
        f"with `{recipe_file}`; bf16 safetensors, own tokenizer. It knows these pages and nothing else.",
        f"{verb}:\n\n{wordings}",
    ]
    vague = checkpoint.vagueness
    if vague.families or vague.seldom:
        parts.append(
            f"Vague on purpose (a kind or a place only): {vague.often:.0%} of the plans on {vague.families:.0%} of the "
            f"families, {vague.seldom:.0%} elsewhere. This is what planner GRPO and verification have to remove."
        )
    parts += [
        f"## Data\n\n{data['screens']} MiniWoB++ screens ({share} % of them used) with {data['elements']} labelled elements "
        f"from {len(data['families'])} families, split `pretrain`, episode seeds {data['seeds'][0]} to {data['seeds'][1]}; "
        f"{data['held_out_screens']} more screens (every sixteenth seed) kept from training. No step of another split, no "
        f"word of the held-out class. {seen}.",
        f"## Training\n\n| stage | steps | time | device |\n|---|---|---|---|\n{ran}\n\nSeveral models shared the device "
        "at that time, so the times are upper bounds.",
        f"## Results\n\nPer cent, number of cases in brackets, greedy unless said otherwise.\n\nHeld-out pretraining screens"
        f"{_legend(checkpoint)}:\n\n{_table(held_out, columns)}",
    ]
    for title, rows in pairs.items():
        parts.append(
            f"{title}, steps of the snapshot (micro averages):\n\n{_table(rows, ['step', 'element', 'operation'])}"
        )
    if checkpoint.notes:
        parts.append(f"## Notes\n\n{checkpoint.notes.strip()}")
    parts.append(
        "MiniWoB++ is MIT-licensed (see `data/miniwob/LICENSE-miniwob.txt`); these weights are under the project's licence."
    )
    return "\n\n".join(parts) + "\n"


def _legend(checkpoint: Checkpoint) -> str:
    if checkpoint.role == "grounder":
        return ", precise element descriptions in each wording, over all and per kind"
    plans = "`plan`: a precise plan of the right element; `vague`: a vague one that fits it"
    return f" ({plans}; `typed value`: steps that have a value)"


def write(
    out: Path,
    recipe_file: Path,
    screens: Corpus,
    snapshot: Path,
    *,
    only: Sequence[str] | None = None,
    cases: int = 600,
    device: str = "cpu",
) -> None:
    """Measure the checkpoints under `out` and write `<name>/README.md`; reads `out/work/reports.json` of `train.run`.

    Every grounder is paired with the base planner, every planner with the base grounder and with the first grounder
    that was trained on its wordings, where those exist.
    """
    recipe = read(recipe_file)
    reports = json.loads((out / "work" / "reports.json").read_text("utf-8"))
    for name in only or recipe.checkpoints:
        checkpoint = recipe.checkpoints[name]
        pairs = {}
        for planner, grounder in _partners(name, recipe):
            if (out / planner).is_dir() and (out / grounder).is_dir():
                results = pair_results(out / planner, out / grounder, snapshot, device=device)
                pairs[f"`{planner}` with `{grounder}`"] = results
        held_out = held_out_results(out / name, checkpoint, screens, cases=cases, device=device)
        parameters = tiny_models.parameter_count(tiny_models.load(out / name)[0])
        card = text(name, recipe, recipe_file.name, parameters, reports, held_out, pairs)
        (out / name / "README.md").write_text(card, "utf-8")


def _partners(name: str, recipe: Recipe) -> list[tuple[str, str]]:
    """The pairs (planner, grounder) by which this checkpoint is judged."""
    checkpoint = recipe.checkpoints[name]
    if checkpoint.role == "grounder":
        return [(BASE_PLANNER, name)]
    fluent = [
        other
        for other, candidate in recipe.checkpoints.items()
        if candidate.role == "grounder" and set(checkpoint.wordings) <= set(candidate.wordings)
    ]
    return [(name, grounder) for grounder in dict.fromkeys([BASE_GROUNDER, *fluent[:1]])]
