"""The loop of tests/auditing, written by hand, with what a trainer leaves: log, rollouts; and its pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from coepg_dagster.artifacts import ROLLOUTS, write_table
from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.reports.lineage import LineageView
from coepg_dagster.reports.site import LOG, Site
from coepg_dagster.steps import ROLLOUT_SCHEMA
from tests.assets.light import EXPERIMENT
from tests.auditing.loop import Hand


def rollout(step: int, group: int, reward: float, gate: str = "passed", hits: tuple[bool, ...] = ()) -> dict[str, Any]:
    """A rollout on step `s`; hits lie at (15, 15), misses at (40, 60)."""
    graders = [
        {
            "grounder": name,
            "x": 15.0 if hit else 40.0,
            "y": 15.0 if hit else 60.0,
            "hit": hit,
            "tokens": 2,
            "mean_logprob": -0.1,
            "confidence": 0.905,
            "prior": 2.0 if name == "grounder_1" else 1.0,
            "weight": 0.6 if name == "grounder_1" else 0.4,
            "seconds": 0.01,
            "failure": None,
        }
        for name, hit in zip(("grounder_1", "judge"), hits, strict=False)
    ]
    answer = {"text": "<i>as generated</i>", "plan": None if gate == "unparsed" else f"plan of group {group}"}
    where = {"optimizer_step": step, "group": group, "step_id": "s"}
    return where | answer | {"gate": gate, "graders": graders, "reward": reward, "advantage": reward - 0.5}


ROWS = [
    rollout(0, 0, 1.0, hits=(True, True)),
    rollout(0, 0, 0.6, hits=(True, False)),
    rollout(0, 1, 0.0, "unparsed"),
    rollout(0, 1, 0.0, "wrong_type"),
    rollout(1, 0, 0.4, hits=(False, True)),
    rollout(1, 0, 0.0, "unparsed"),
    rollout(1, 1, 1.0, hits=(True, True)),
    rollout(1, 1, 1.0, hits=(True, True)),
]


def trained(root: Path) -> Hand:
    """The hand-written loop, whose π'_1 was made by GRPO and whose ϕ_1 left a log."""
    hand = Hand(root).whole()

    def write(draft: Path, rows: list[dict[str, Any]], log: list[dict[str, float]]) -> list[str]:
        (draft / "model.safetensors").write_text("weights")
        (draft / LOG).write_text("".join(json.dumps(entry) + "\n" for entry in log))
        if rows:
            write_table(pa.Table.from_pylist(rows, ROLLOUT_SCHEMA), draft / ROLLOUTS)
        return ["model.safetensors"]

    log = [
        {"step": i, "loss": 1 / i, "reward": i / 4, "reward_std": 0.1, "learning_rate": 1e-4} for i in (1.0, 2.0, 3.0)
    ]
    hand.make("planner_sft", 1, lambda draft: write(draft, [], []))
    hand.make("grounder", 1, lambda draft: write(draft, [], log))
    hand.make("planner", 1, lambda draft: write(draft, ROWS, log))
    hand.data(1)
    return hand


def experiment_of(hand: Hand) -> Experiment:
    file = hand.root / "hand.yaml"
    more = "" if hand.phi == "grounder" else f"{hand.phi}: {{enabled: true}}\n"
    file.write_text(EXPERIMENT.replace("iterations: 2", "iterations: 1") + more)
    return load_experiment(file)


def site_of(hand: Hand, folder: Path, **settings: Any) -> Site:
    view = LineageView(experiment_of(hand), 1, dict(hand.newest), {}, dict.fromkeys(hand.newest, 1_900_000_000.0))
    return Site(folder, hand.archive, view, **settings)
