"""`coepg play`: runs the models of one iteration live in a browser and keeps the result in the store.

Not an asset, since nothing of the loop reads it. The episodes are played by `coepg_dagster.sandbox.miniwob.play`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import torch
from coepg_dagster.assets.ledger import Loop
from coepg_dagster.assets.shared import checkpoint_of

from coepg_dagster.artifacts import STEPS, all_steps
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.progress import Report
from coepg_dagster.project import Project
from coepg_dagster.provenance import NotUsable, Record, Ref
from coepg_dagster.sandbox.miniwob.browser import Browser, find_pages, find_programs
from coepg_dagster.sandbox.miniwob.play import CONTENT, PAGE_FILE, Agent, fresh_games, games_of, play, write_play
from coepg_dagster.store import Store


@dataclass(frozen=True)
class Games:
    """Which episodes are played, and on which device the models run.

    The first `per_family` episodes of each family of `split`, as scored offline; with `first_seed`: fresh episodes of the same
    families, from this seed on. `families`: only these. The page shows `shown` episodes of each.
    """

    split: str
    per_family: int
    families: Sequence[str] | None
    first_seed: int | None
    max_steps: int
    shown: int
    device: str
    threads: int


def play_iteration(
    loop: Loop, instance: dg.DagsterInstance, k: int, games: Games, out: Path | None, report: Report
) -> dict[str, Any]:
    """Plays with M_k and writes the result to `out` (None: below the store); returns its summary.

    Raises NotUsable if the models, the split or the family do not exist, and BrowserMissing.
    """
    project = Project(loop.root)
    if loop.experiment.benchmark.reader != "miniwob":
        raise NotUsable(f"{loop.name} is not about MiniWoB++: choose another experiment, its agents cannot act live")
    if loop.experiment.agent != "decoupled":
        raise NotUsable(
            f"{loop.name} is an end-to-end agent, which has no planner to act live: choose another experiment"
        )
    find_programs()
    find_pages()
    records = loop.records(instance)
    planner, grounder, steps = (
        records.get(ref) for ref in (Ref("planner", k), Ref(loop.experiment.phi, k), Ref("benchmark_steps"))
    )
    if planner is None or grounder is None or steps is None:
        raise NotUsable(f"{loop.name}@{k} has no models yet: run `coepg evolve {loop.name} --through {k}` first")
    for record in (planner, grounder, steps):
        if record.ref in records.lost:
            raise NotUsable(
                f"{record.ref}: {records.lost[record.ref]}: run `coepg evolve {loop.name} --through {k}` first"
            )
    tasks = games_of(all_steps(project.store / steps.folder / STEPS), games.split, games.per_family, games.families)
    if games.first_seed is not None:
        tasks = fresh_games([family for family, _ in tasks], games.first_seed, games.per_family)

    def engine(record: Record) -> TransformersEngine:
        checkpoint = checkpoint_of(project.root, project.store / record.folder)
        local = project.root / checkpoint
        path = local if local.is_dir() else checkpoint
        return TransformersEngine(path, dtype=loop.experiment.models.dtype, device=games.device, batch_size=1)

    torch.set_num_threads(games.threads)
    limits = loop.experiment.regeneration
    agent = Agent(
        engine(planner), engine(grounder), loop.experiment.models, limits.max_plan_tokens, limits.max_point_tokens
    )
    with Browser() as browser:
        started = time.monotonic()
        table = play(browser, agent, tasks, report, games.max_steps)
        seconds = time.monotonic() - started
        made_from: dict[str, str | int] = {
            "experiment": loop.name,
            "iteration": k,
            "planner": planner.data_version,
            "grounder": grounder.data_version,
            "families of": games.split,
            "episodes": f"of benchmark_steps {steps.data_version}"
            if games.first_seed is None
            else f"from seed {games.first_seed}",
            "step limit": games.max_steps,
            "Chromium": browser.version,
        }
    title = f"{loop.name}@{k}, live on MiniWoB++"
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        about = write_play(table, made_from, title, games.shown, out)
    else:
        store, place = Store(project.store), (loop.experiment.name, f"s{loop.seed}", "play", str(k))
        with store.draft(*place) as draft:
            about = write_play(table, made_from, title, games.shown, draft)
            out = store.commit(draft, place, list(CONTENT)).folder
    stale = {str(ref): str(why) for ref, why in loop.stale(records).items() if ref in (planner.ref, grounder.ref)}
    return about | {"stale": stale, "seconds_per_step": seconds / table.num_rows, "page": str(out / PAGE_FILE)}
