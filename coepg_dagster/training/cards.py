"""The model card beside the weights of a trained model, in the format of Hugging Face.

It is not part of a model's data version, which time and device must not change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from huggingface_hub import ModelCardData

from coepg_dagster.evaluation.change import PROBED, change_text
from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.schema import Benchmark
from coepg_dagster.inference.weights import is_local
from coepg_dagster.markdown import table
from coepg_dagster.provenance import Asset, Ref

CARD: Final = "README.md"
LIBRARIES: Final = ("coepg-dagster", "torch", "transformers", "trl")

_CHECKED: Final = ("tensors", "parameters", "logits_apart", "warnings", "probe")

_WHAT: Final[Mapping[Asset, tuple[str, str, str]]] = {
    "planner_sft": (
        "π_k: the planner after supervised fine-tuning on D_{k-1} (Eq. 1)",
        "a plan, an action type and a value, from a screenshot, a goal and the history of actions",
        "planner",
    ),
    "planner": (
        "π'_k: the planner after GRPO with the confidence-weighted reward of its grounders, C-DREM (Eq. 3 to 10)",
        "a plan, an action type and a value, from a screenshot, a goal and the history of actions",
        "planner",
    ),
    "grounder": (
        "ϕ_k: the grounder after supervised fine-tuning on D_{k-1} (Eq. 2)",
        "a point, from a screenshot and a plan",
        "grounder",
    ),
    "grounder_rl": (
        "ϕ_k: the grounder after supervised fine-tuning on D_{k-1} (Eq. 2), then GRPO by its own places",
        "a point, from a screenshot and a plan",
        "grounder",
    ),
    "end_to_end": (
        "the end-to-end agent of Table 3",
        "an action type, a value and a point, from a screenshot, a goal and the history of actions",
        "agent",
    ),
}


@dataclass(frozen=True)
class Trained:
    """The facts on the card of a trained model."""

    loop: str  # EXPERIMENT/sSEED
    ref: Ref
    base: str  # what training started from: a folder, a hub name, or an artifact
    made_from: Sequence[tuple[str, str, str]]  # (what for, name, version), the base first
    benchmark: Benchmark
    models: Models
    settings: Mapping[str, Any]
    figures: Mapping[str, Any]
    seed: int
    device: str
    seconds: float


def write_card(folder: Path, trained: Trained, root: Path) -> Path:
    """Writes the card into `folder`; `root` is the project, from which relative checkpoints start."""
    file = folder / CARD
    file.write_text(card(trained, on_hub=not is_local(root, trained.base)), "utf-8")
    return file


def card(trained: Trained, *, on_hub: bool) -> str:
    """The card in Markdown, with front matter; `on_hub`: the base is a name on the hub."""
    k, models, figures = trained.ref.iteration, trained.models, trained.figures
    what, answers, role = _WHAT[trained.ref.asset]
    front = ModelCardData(
        base_model=trained.base if on_hub else None,
        library_name="transformers",
        pipeline_tag="image-text-to-text",
        tags=["co-epg", "gui-agent", role],
    )
    rounded = f"rounded to {models.dtype}"
    checks = [
        f"{figures['tensors']:,} tensors with {figures['parameters']:,} parameters, all finite.",
        f"Loaded again from these files: none missing, none unexpected, each equal to what was trained, {rounded}.",
        "The first token's logits of the loaded model are those of the trained one on an example of the training data "
        f"(largest difference: {figures['logits_apart']:.1g} of their span).",
    ]
    probe = figures.get("probe") or {}
    checks += [
        f"Before and after, greedy, on {probe['steps'][split]} steps of {split}, judged by {probe['judge']}, per cent: "
        f"{change_text(probe[split])}."
        for split in PROBED
        if probe.get(split)
    ]
    checks += [f"Warning during training: {warning}." for warning in figures["warnings"]]
    shown = {name: value for name, value in figures.items() if name not in _CHECKED}
    facts = {**shown, "seed": trained.seed, "device": trained.device, "seconds": round(trained.seconds, 1)}
    facts |= {name: version(name) for name in LIBRARIES}
    parts = [
        f"---\n{front.to_yaml()}\n---",
        f"# {trained.ref} of {trained.loop}",
        f"Co-EPG (arXiv 2511.10705), k = {k}: {what}. It answers with {answers}.",
        "## Made from",
        table(
            ("", "name", "version"), [(why, f"`{name}`", f"`{version}`") for why, name, version in trained.made_from]
        ),
        "The version of an open model is the hash of its weights (of a hub model, its commit), that of an artifact the hash of "
        "its content.",
        "## Training",
        table(("setting", "value"), _rows(trained.settings)),
        table(("", ""), _rows(facts)),
        "## Checks",
        "\n".join(f"- {check}" for check in checks),
        "## Use and limits",
        f"- Use it with the `{models.prompts}` prompts of this project, on screenshots that its processor resizes. "
        f"Points are in `{models.coordinates.value}` space.\n"
        f"- It learnt from the `{trained.benchmark.train}` split of `{trained.benchmark.path}` (reader "
        f"`{trained.benchmark.reader}`) only. The evaluation of this iteration shows how well it does there; it was not "
        "tested on other interfaces.\n"
        "- For research on GUI agents. Its answers are proposals: let it click and type only where it can do no harm, and "
        "under supervision.\n"
        "- The licences of the base model and of the data apply to it.",
    ]
    return "\n\n".join(parts) + "\n"


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (name, f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value))
        for name, value in values.items()
    ]
