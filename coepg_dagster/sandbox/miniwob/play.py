"""Live play: the agent M_k = {π'_k, ϕ_k} acts on MiniWoB++ pages, and the page itself says whether it succeeded.

This module chooses the episodes, plays them, stores their steps and computes success rates. Each frame becomes a table
with one unlabelled step and goes through `inference.predict.predict`, so that prompts and parsing are exactly those of
the offline steps. `coepg_dagster.sandbox.miniwob.play_page` shows episodes.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from coepg_dagster.artifacts import write_table
from coepg_dagster.evaluation.statistics import interval, sampled_averages
from coepg_dagster.experiment.models import Models
from coepg_dagster.geometry import Size
from coepg_dagster.inference.engine import Engine
from coepg_dagster.inference.predict import NOT_REWARDED, PREDICTION_SCHEMA, STEP_LIMIT, obstacle, predict
from coepg_dagster.progress import Report
from coepg_dagster.provenance import NotUsable
from coepg_dagster.sandbox.miniwob.browser import HEIGHT, WIDTH, Browser
from coepg_dagster.sandbox.miniwob.elements import element_at, history_entry
from coepg_dagster.sandbox.miniwob.episodes import MAX_STEPS, encode_png
from coepg_dagster.sandbox.miniwob.play_page import write_page
from coepg_dagster.steps import NO_VALUE, STEP_SCHEMA

EPISODES_FILE, SUMMARY_FILE, PAGE_FILE = "episodes.parquet", "play.json", "play.html"
CONTENT: Final = (EPISODES_FILE, SUMMARY_FILE)
"""The files whose content is the version; the page only shows them."""

_SEEN = ("step_id", "episode_id", "step_index", "family", "seed", "goal", "history", "screenshot", "width", "height")
EPISODE_SCHEMA: Final = pa.schema(
    [
        *(STEP_SCHEMA.field(name) for name in _SEEN),
        *(field for field in PREDICTION_SCHEMA if field.name != "step_id"),
        pa.field("entry", pa.string()),  # the action as in the next step's history; null: none was performed
        pa.field("reward", pa.float64(), nullable=False),  # the page's raw reward after the action
        pa.field("done", pa.bool_(), nullable=False),  # whether the page ended the episode
        pa.field("failure", pa.string()),  # on the last step of an episode that is not solved: the reason
    ]
)
"""One step of live play: the screen, the prediction, and the outcome."""

Game = tuple[str, int]
"""An episode: (family, seed)."""


@dataclass(frozen=True)
class Agent:
    """M_k: both engines and their prompts. Greedy."""

    planner: Engine
    grounder: Engine
    models: Models
    max_plan_tokens: int
    max_point_tokens: int

    def answer(self, frame: pa.Table) -> dict[str, Any]:
        """The prediction (a row of PREDICTION_SCHEMA) for a table with one step."""
        tokens = self.max_plan_tokens, self.max_point_tokens
        answers = predict(self.planner, self.grounder, frame, self.models, *tokens)
        row: dict[str, Any] = answers.to_pylist()[0]
        return row


def games_of(steps: pa.Table, split: str, per_family: int, families: Sequence[str] | None = None) -> list[Game]:
    """The first episodes of each family whose steps a split holds, by family and seed.

    These are the episodes that are scored offline: their goals follow the split's rule, and three actions can solve
    them. Raises NotUsable for a split or family that has none.
    """
    columns = steps.select(["split", "family", "seed"]).to_pydict()
    seeds: dict[str, set[int]] = defaultdict(set)
    for of, family, seed in zip(columns["split"], columns["family"], columns["seed"], strict=True):
        if of == split:
            seeds[family].add(seed)
    if not seeds:
        raise NotUsable(f"no steps in split {split!r} (there are: {', '.join(sorted(set(columns['split'])))})")
    unknown = sorted(set(families or ()) - set(seeds))
    if unknown:
        raise NotUsable(f"split {split!r} has no family {', '.join(unknown)} (it has: {', '.join(sorted(seeds))})")
    return [(f, seed) for f in sorted(set(families or seeds)) for seed in sorted(seeds[f])[:per_family]]


def fresh_games(families: Sequence[str], first_seed: int, per_family: int) -> list[Game]:
    """`per_family` episodes of each family from `first_seed` on, unfiltered: some may not be solvable."""
    return [(family, first_seed + n) for family in sorted(set(families)) for n in range(per_family)]


def play_episode(
    browser: Browser, agent: Agent, family: str, seed: int, max_steps: int = MAX_STEPS
) -> list[dict[str, Any]]:
    """Lets the agent act until the page ends the episode, an answer cannot be executed, or `max_steps` are reached.

    Returns the steps (EPISODE_SCHEMA). Raises ValueError for an unknown family, RuntimeError where a model gives no
    answer at all.
    """
    goal = browser.reset(family, seed)
    rows: list[dict[str, Any]] = []
    while not rows or not (rows[-1]["done"] or rows[-1]["failure"]):
        frame = _frame(browser, family, seed, goal, [row["entry"] for row in rows])
        answer = agent.answer(pa.Table.from_pylist([frame], STEP_SCHEMA))
        row = {name: frame[name] for name in _SEEN} | answer | {"entry": None, "reward": 0.0, "done": False}
        row["failure"] = obstacle(answer, Size(WIDTH, HEIGHT))
        if row["failure"] is None:
            point = (answer["x"], answer["y"])
            touched = element_at(browser.elements(), point)
            row["entry"] = history_entry(touched, answer["action_type"], answer["value"])
            browser.act(answer["action_type"], point, answer["value"])
            row["done"], row["reward"] = browser.outcome()
            if row["done"] and row["reward"] <= 0:
                row["failure"] = NOT_REWARDED
            elif not row["done"] and len(rows) + 1 == max_steps:
                row["failure"] = STEP_LIMIT
        rows.append(row)
    return rows


def _frame(browser: Browser, family: str, seed: int, goal: str, history: list[str]) -> dict[str, Any]:
    """The browser's screen as a row of STEP_SCHEMA without a label, encoded like the offline screens."""
    episode_id = f"miniwob/{family}/{seed}"
    return {
        "step_id": f"{episode_id}/{len(history)}",
        "split": "live",
        "episode_id": episode_id,
        "step_index": len(history),
        "family": family,
        "seed": seed,
        "goal": goal,
        "history": history,
        "screenshot": encode_png(browser.screenshot()),
        "width": WIDTH,
        "height": HEIGHT,
        "boxes": [],
        "action_type": "",
        "value": NO_VALUE,
    }


def play(browser: Browser, agent: Agent, tasks: Sequence[Game], report: Report, max_steps: int = MAX_STEPS) -> pa.Table:
    """Plays episodes one after the other (EPISODE_SCHEMA). `report` is called after each, with the number solved so far."""
    rows: list[dict[str, Any]] = []
    solved = 0
    for done, (family, seed) in enumerate(tasks):
        rows += play_episode(browser, agent, family, seed, max_steps)
        solved += rows[-1]["failure"] is None
        report(done + 1, len(tasks), {"solved": solved})
    return pa.Table.from_pylist(rows, EPISODE_SCHEMA)


def summarize(table: pa.Table) -> dict[str, Any]:
    """Success rates of `play`, per cent: over all episodes, macro over families, and for each family.

    An episode is solved if the page rewards it (raw reward > 0, as in collection). 95 % bootstrap intervals: the
    overall rate resamples episodes, the macro average whole families; None below two of them.
    """
    rows = table.select(["episode_id", "family", "failure"]).to_pylist()
    last = {row["episode_id"]: row for row in rows}  # a failure is on the last step
    steps = Counter(row["family"] for row in rows)
    names = sorted(steps)
    solved = np.array([[float(row["failure"] is None)] for row in last.values()])
    of_family = np.array([names.index(row["family"]) for row in last.values()], dtype=np.int64)
    weights = np.ones_like(solved)
    by_episode = sampled_averages(solved, weights, np.arange(len(solved)))
    by_family = sampled_averages(solved, weights, of_family)
    families = {}
    for number, name in enumerate(names):
        mine = solved[of_family == number]
        failures = Counter(row["failure"] for row in last.values() if row["family"] == name and row["failure"])
        families[name] = {
            "episodes": len(mine),
            "solved": int(mine.sum()),
            "success": 100 * float(mine.mean()),
            "steps": steps[name],
            "failures": dict(sorted(failures.items())),
        }
    return {
        "episodes": len(solved),
        "solved": int(solved.sum()),
        "steps": table.num_rows,
        "success": {"rate": 100 * float(by_episode.micro[0]), "ci95": _ci95(by_episode.micros)},
        "macro": {"rate": 100 * float(by_family.macro[0]), "ci95": _ci95(by_family.macros)},
        "failures": dict(sorted(Counter(row["failure"] for row in last.values() if row["failure"]).items())),
        "families": families,
    }


def _ci95(samples: Any) -> list[float] | None:
    return [100 * float(bound) for bound in interval(samples)[:, 0]] if len(samples) else None


def write_play(
    table: pa.Table, made_from: Mapping[str, str | int], title: str, shown: int, folder: Path
) -> dict[str, Any]:
    """Writes episodes, summary and page into a folder; the page shows the first `shown` episodes of each family.

    `made_from`: names and versions of models and pages. Returns the summary: that of `summarize`, with `made_from`.
    """
    about = summarize(table) | {"made_from": dict(made_from)}
    write_table(table, folder / EPISODES_FILE)
    (folder / SUMMARY_FILE).write_text(json.dumps(about, indent=1, sort_keys=True), "utf-8")
    write_page(table, about, title, shown, folder / PAGE_FILE)
    return about
