"""The numbers of a loop, from the records of its artifacts: `coepg results`, the report and the tables read this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from coepg_dagster.evaluation.change import PROBED, change_text
from coepg_dagster.evaluation.result import LOST
from coepg_dagster.experiment import Experiment
from coepg_dagster.provenance import ORDER, Asset, Record, Ref, Stale

HEADLINES: Final = {"step_sr": "Step SR", "step_acc": "step accuracy", "acc": "accuracy"}
"""The metric that a protocol is known by: metric → what people call it; a protocol has exactly one of them."""


LEARNED: Final[Mapping[str, tuple[Asset, ...]]] = {
    "sft_planner": ("planner_sft",),
    "sft_grounder": ("grounder",),
    "grpo": ("planner", "end_to_end"),
}
"""What training did better than what it began with, on the same steps: key of an iteration → assets that were trained so."""
LEARNED_AS: Final = {"sft_planner": "SFT of the planner", "sft_grounder": "SFT of the grounder", "grpo": "GRPO"}


def headline(metrics: Mapping[str, Any]) -> str:
    """The name of the metric that stands for a protocol, among its `metrics`."""
    return next(name for name in HEADLINES if name in metrics)


def results(
    experiment: Experiment, seed: int, records: Mapping[Ref, Record], stale: Mapping[Ref, Stale]
) -> dict[str, Any]:
    """Per iteration: metrics of each test split and of validation, data quality, what training changed, seconds, what is stale.

    Rates are in per cent, intervals are of the macro value, None stands for what was not computed. Asset names have no
    prefix.
    """
    return {
        "experiment": experiment.name,
        "seed": seed,
        "iterations": [
            _iteration(experiment, k, records, stale)
            for k in range(experiment.iterations + 1)
            if any(Ref(asset, k) in records for asset in experiment.made)
        ],
    }


def _iteration(
    experiment: Experiment, k: int, records: Mapping[Ref, Record], stale: Mapping[Ref, Stale]
) -> dict[str, Any]:
    evaluation = records.get(Ref("evaluation", k))
    quality = records.get(Ref("data_quality", k))
    scores = evaluation.figures if evaluation else {}
    return {
        "iteration": k,
        "splits": {split: _split(scores.get(split)) for split in experiment.benchmark.test},
        "validation": _split(scores.get(experiment.benchmark.validation)),
        **{name: quality.figures.get(name) if quality else None for name in ("purity", "diversity", "coverage")},
        **{name: _learned(records, k, assets) for name, assets in LEARNED.items()},
        "seconds": {asset: record.seconds for asset in experiment.made if (record := records.get(Ref(asset, k)))},
        "stale": {asset: str(stale[Ref(asset, k)]) for asset in ORDER if Ref(asset, k) in stale},
    }


def _learned(records: Mapping[Ref, Record], k: int, assets: tuple[Asset, ...]) -> dict[str, Any] | None:
    """The Change of each split, of the asset that is there; None where nobody asked."""
    probes = (records[Ref(asset, k)].figures.get("probe") for asset in assets if Ref(asset, k) in records)
    return next(({split: probe[split] for split in PROBED} for probe in probes if probe), None)


def learned_text(iteration: Mapping[str, Any]) -> list[str]:
    """What training changed in an iteration of `results`, a line for each training."""
    lines = []
    for name, what in LEARNED_AS.items():
        found = [f"{split} {change_text(change)}" for split, change in (iteration[name] or {}).items() if change]
        if found:
            lines.append(f"k = {iteration['iteration']}, {what}: {', '.join(found)}")
    return lines


def _split(score: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if score is None:
        return None
    values = {
        name: {key: metric[key] for key in ("macro", "micro", "ci95")} for name, metric in score["metrics"].items()
    }
    lost = score.get("notes", {}).get(LOST)
    return {"steps": score["rows"], **({LOST: lost} if lost else {}), **values}


def short_splits(iterations: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each test split that has fewer steps than the published one; `iterations` as of `results`."""
    lines = (f"{k}: {of[LOST]}" for row in iterations for k, of in row["splits"].items() if of and LOST in of)
    return list(dict.fromkeys(lines))
