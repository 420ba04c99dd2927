"""The page of one trained model: training curves, rewards, samples, and calibration of the confidences."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from coepg_dagster.evaluation.change import PROBED, change_text
from coepg_dagster.reports.calibration import reliability_figure
from coepg_dagster.reports.figures import dress, figure, png
from coepg_dagster.reports.html import ScreenFiles, render, shown_steps
from coepg_dagster.rewards.calibration import Calibration, of_rollouts, of_verdicts
from coepg_dagster.rewards.cdrem import SPREAD_FLOOR
from coepg_dagster.steps import GATE_PASSED
from coepg_dagster.strategies.curation import curation_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES: Final = (
    ("reward", "reward (mean of the batch)"),
    ("validation_reward", "reward on validation, by ϕ_k alone"),
    ("probe_train_greedy", "greedy, fixed training steps, %"),
    ("probe_train_sampled", "sampled, the same, %"),
    ("probe_validation_greedy", "greedy, fixed validation steps, %"),
    ("probe_validation_sampled", "sampled, the same, %"),
    ("loss", "loss"),
    ("mean_token_accuracy", "token accuracy"),
    ("kl", "KL(π‖π_k)"),
    ("entropy", "entropy"),
    ("gate_passed", "share through the gate"),
    ("frac_reward_zero_std", "share of groups without spread"),
    ("completions/mean_length", "tokens of an answer"),
    ("grad_norm", "gradient norm"),
    ("learning_rate", "learning rate"),
)
"""The curves of a trainer's log: (key, title). Keys that a log lacks are left out."""
SAMPLES: Final = 8
"""Rollouts or verdicts shown with their screenshots."""


@dataclass(frozen=True)
class ModelOf:
    """The heading of the page."""

    name: str  # EXPERIMENT/sSEED
    symbol: str  # π, π′ or ϕ with its index
    what: str
    facts: Sequence[tuple[str, str]]  # (name, value): version, run, seconds …
    config: Mapping[str, Any]
    made_from: Sequence[tuple[str, str, str | None]]  # (artifact, data version, address of its page)
    crumbs: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()  # from `training_notes`


def training_notes(figures: Mapping[str, Any]) -> list[str]:
    """Notes on a training run, from its figures: changes in accuracy, which weights were kept, and warnings."""
    notes = [f"Data: {sentence}." for sentence in curation_text(figures)]
    probe = figures.get("probe") or {}
    for how, changes in (("greedy answers", probe), ("sampled answers", probe.get("sampled") or {})):
        measured = [
            f"{split} {change_text(changes[split])} on {probe['steps'][split]} steps"
            for split in PROBED
            if changes.get(split)
        ]
        if measured:
            notes.append(f"Before and after, {how}, judged by {probe['judge']}, per cent: {'; '.join(measured)}.")
    if "kept_step" in figures:
        notes.append(
            f"Kept: the weights of step {figures['kept_step']}, whose greedy answers did best on the validation split "
            f"(reward {figures['validation_reward_best']:.3f}; {figures['validation_reward_first']:.3f} before GRPO, "
            f"{figures['validation_reward_last']:.3f} at the end)."
        )
    return notes + [f"Warned: {warning}" for warning in figures.get("warnings", ())]


@dataclass(frozen=True)
class Reward:
    """The rewards of a model's rollouts; shares in per cent."""

    rollouts: int
    reward: float
    gates: Mapping[str, float]
    no_target: float
    graders: Sequence[Mapping[str, Any]]  # grounder, asked, hit, confidence, prior, weight, adds; none for an own place
    parts: Mapping[str, float]  # term or part of the reward → mean score; empty where it is Eq. 9
    groups: int
    without_spread: float
    all_zero: float  # of the groups: every reward is 0
    all_best: float  # of the groups: every reward is 1
    fractional: float  # of the groups: all rewards equal, neither 0 nor 1


def reward_of(rollouts: pa.Table) -> Reward:
    """The breakdown of a rollout table (ROLLOUT_SCHEMA). `adds`: mean of w_j·Acc_j over the plans that j judged."""
    rows = rollouts.to_pylist()
    gates = Counter(row["gate"] for row in rows)
    votes: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in rows:
        for part in row.get("parts") or ():  # older rollouts have none
            parts[part["name"]].append(part["score"])
        groups[row["optimizer_step"], row["group"]].append(row["reward"])
        for grader in row["graders"]:
            votes[grader["grounder"]].append(grader)
    flat = [rewards for rewards in groups.values() if _std(rewards) < SPREAD_FLOOR]
    all_zero = sum(max(rewards) < SPREAD_FLOOR for rewards in flat)
    all_best = sum(min(rewards) > 1 - SPREAD_FLOOR for rewards in flat)
    return Reward(
        rollouts=len(rows),
        reward=fmean(row["reward"] for row in rows),
        gates={gate: 100 * n / len(rows) for gate, n in gates.most_common()},
        no_target=100
        * sum(row["gate"] == GATE_PASSED and not row["graders"] and not row.get("live") for row in rows)
        / len(rows),
        graders=[_grader(name, given) for name, given in votes.items()],
        parts={name: fmean(scores) for name, scores in parts.items()},
        groups=len(groups),
        without_spread=100 * len(flat) / len(groups),
        all_zero=100 * all_zero / len(groups),
        all_best=100 * all_best / len(groups),
        fractional=100 * (len(flat) - all_zero - all_best) / len(groups),
    )


def _std(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))


def _grader(name: str, votes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    answered = [vote for vote in votes if vote["failure"] is None]
    sure = [vote["confidence"] for vote in answered if vote["confidence"] is not None]
    return {
        "grounder": name,
        "asked": len(votes),
        "failed": len(votes) - len(answered),
        "hit": 100 * fmean(vote["hit"] for vote in answered) if answered else None,
        "confidence": fmean(sure) if sure else None,
        "prior": votes[0]["prior"],
        "weight": fmean(vote["weight"] for vote in votes),
        "adds": fmean(vote["weight"] * vote["hit"] for vote in votes),
    }


def curves_figure(log: Sequence[Mapping[str, float]]) -> Figure | None:
    """The curves of a trainer's log, a panel each; None where the log has none of CURVES."""
    shown = [(key, title) for key, title in CURVES if sum(key in entry for entry in log) > 1]
    if not shown:
        return None
    rows = -(-len(shown) // 3)
    drawn = figure(10, 2.3 * rows)
    panels = drawn.subplots(rows, 3, squeeze=False).ravel()
    for axes, (key, title) in zip(panels, shown, strict=False):
        points = [(entry["step"], entry[key]) for entry in log if key in entry]
        x, y = [step for step, _ in points], [value for _, value in points]
        axes.plot(x, y, color="C0")
        if key == "reward" and all("reward_std" in entry for entry in log if key in entry):
            std = [entry["reward_std"] for entry in log if key in entry]
            low, high = [a - b for a, b in zip(y, std, strict=True)], [a + b for a, b in zip(y, std, strict=True)]
            axes.fill_between(x, low, high, alpha=0.15, color="C0")
        axes.set_title(title, fontsize="medium")
        dress(axes, "")
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    drawn.supxlabel("optimizer step", fontsize="medium")
    return drawn


def reward_figure(rollouts: pa.Table) -> Figure:
    """Over the optimizer steps: gate outcomes, hit rate of each grounder, and share of groups without spread."""
    gates: dict[int, Counter[str]] = defaultdict(Counter)
    hits: dict[str, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    groups: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rollouts.to_pylist():
        step = row["optimizer_step"]
        gates[step][row["gate"]] += 1
        groups[step][row["group"]].append(row["reward"])
        for grader in row["graders"]:
            if grader["failure"] is None:
                hits[grader["grounder"]][step].append(grader["hit"])
    steps = sorted(gates)
    drawn = figure(10, 2.8)
    gate, spread, *hit = drawn.subplots(1, 3 if hits else 2)
    names = [name for name, _ in sum(gates.values(), Counter()).most_common()]
    shares = [[100 * gates[step][name] / gates[step].total() for step in steps] for name in names]
    gate.stackplot(steps, shares, labels=[name.replace("_", " ") for name in names], alpha=0.85)
    gate.set_title("gate, % of rollouts", fontsize="medium")
    for axes in hit:
        for name, by_step in hits.items():
            at = sorted(by_step)
            axes.plot(at, [100 * fmean(by_step[step]) for step in at], label=name)
        axes.set_title("hits of each grounder, %", fontsize="medium")
    flat = [100 * fmean(_std(rewards) < SPREAD_FLOOR for rewards in groups[step].values()) for step in steps]
    spread.bar(steps, flat, color="0.6")
    spread.set_title("groups without spread, %", fontsize="medium")
    for axes in (gate, spread, *hit):
        axes.set_ylim(0, 100)
        axes.set_xlabel("optimizer step")
        dress(axes, "")
    return drawn


def sample_rollouts(rollouts: pa.Table) -> list[dict[str, Any]]:
    """The best and the worst rollout of groups whose rewards differ, spread evenly over training.

    A fixed rule, so that samples are not picked by their looks.
    """
    groups: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rollouts.to_pylist():
        groups[row["optimizer_step"], row["group"]].append(row)
    differ = [rows for _, rows in sorted(groups.items()) if _std([row["reward"] for row in rows]) >= SPREAD_FLOOR]
    pairs = SAMPLES // 2
    chosen = [differ[i * len(differ) // pairs] for i in range(pairs)] if len(differ) >= pairs else differ
    samples = []
    for rows in chosen:
        ranked = sorted(rows, key=lambda row: row["reward"])
        samples += [ranked[-1], ranked[0]]
    return samples


def sample_verdicts(verdicts: pa.Table, name: str, count: int = SAMPLES) -> list[dict[str, Any]]:
    """Answers of one grounder, half of them hits and half misses, spread evenly over the table."""
    mine = [row for row in verdicts.to_pylist() if row["verifier"] == name and row["failure"] is None]
    samples = []
    for hit in (True, False):
        of = [row for row in mine if row["hit"] is hit and row["x"] is not None]
        half = min(len(of), count // 2)
        samples += [of[i * len(of) // half] for i in range(half)]
    return samples


@dataclass(frozen=True)
class Votes:
    """The verdicts of the pool in which a grounder was a verifier, candidate id → plan, and its name in the pool."""

    verdicts: pa.Table
    plans: Mapping[str, str]
    member: str


def write_model(
    folder: Path,
    page: str,
    about: ModelOf,
    log: Sequence[Mapping[str, float]],
    steps: pa.Table,
    rollouts: pa.Table | None = None,
    votes: Votes | None = None,
) -> Path:
    """Writes the page of a model into `folder`, and the screenshots that it shows.

    Args:
        log: the trainer's log lines, in order; empty where nothing was trained.
        steps: contains at least the steps of the tables; may be mapped memory.
        rollouts: of GRPO, for π'_k.
        votes: for ϕ_k.
    """
    reward, reward_png, samples = None, None, []
    calibrations: dict[str, Calibration] = {}
    if rollouts is not None and rollouts.num_rows:
        reward, reward_png = reward_of(rollouts), png(reward_figure(rollouts))
        of_steps = pc.is_in(rollouts["step_id"], steps["step_id"].combine_chunks())  # not prompts of two screens
        samples = [_rollout(row) for row in sample_rollouts(rollouts.filter(of_steps))]
        calibrations = of_rollouts(rollouts)
    if votes is not None:
        chosen = sample_verdicts(votes.verdicts, votes.member)
        samples = [_verdict(row, votes.plans[row["candidate_id"]]) for row in chosen]
        calibrations = {
            name: calibration for name, calibration in of_verdicts(votes.verdicts).items() if name == votes.member
        }
    shown = {step["id"]: step for step in shown_steps(steps, {s["step_id"] for s in samples}, ScreenFiles(folder))}
    curves = curves_figure(log)
    file = folder / page
    file.write_text(
        render(
            "model.html",
            about=about,
            crumbs=about.crumbs,
            curves=png(curves) if curves else None,
            steps_logged=len(log),
            reward=reward,
            reward_figure=reward_png,
            samples=[(sample, shown[sample["step_id"]]) for sample in samples],
            judged=votes is not None,
            calibration=png(reliability_figure(calibrations)) if calibrations else None,
        ),
        "utf-8",
    )
    return file


def _rollout(row: Mapping[str, Any]) -> dict[str, Any]:
    points = [
        {**grader, "color": i, "name": grader["grounder"], "sure": grader["confidence"]}
        for i, grader in enumerate(row["graders"])
    ]
    head = f"optimizer step {row['optimizer_step']}, group {row['group']}: reward {row['reward']:.2f}"
    return {**row, "head": f"{head}, advantage {row['advantage']:+.2f}", "points": points, "good": row["advantage"] > 0}


def _verdict(row: Mapping[str, Any], plan: str) -> dict[str, Any]:
    sure = None if row["mean_logprob"] is None else math.exp(min(0.0, row["mean_logprob"]))
    point = {**row, "color": 0, "name": row["verifier"], "sure": sure, "weight": None}
    return {
        "step_id": row["step_id"],
        "plan": plan,
        "text": row["text"],
        "gate": GATE_PASSED,
        "points": [point],
        "head": "hit" if row["hit"] else "miss",
        "good": row["hit"],
    }
