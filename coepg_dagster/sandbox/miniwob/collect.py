"""Plays episodes in several browsers and stores their steps as Parquet shards.

This module sets the order of work, and the content of a shard. A shard is one split, one family and one block of seeds.
It is complete or absent (written aside, then renamed), so a run that was killed loses at most the shards it was working
on, and the next run resumes. Its content depends only on split, family, block, and the versions of miniwob, Chromium and
the fonts.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from coepg_dagster.artifacts import whole
from coepg_dagster.sandbox.miniwob.browser import HEIGHT, WIDTH, Browser
from coepg_dagster.sandbox.miniwob.elements import Element
from coepg_dagster.sandbox.miniwob.episodes import Episode, encode_png, play
from coepg_dagster.sandbox.miniwob.splits import (
    SEEDS,
    SPLITS,
    Split,
    episode_wanted,
    families_of,
    goal_wanted,
    held_out,
)
from coepg_dagster.steps import BOX, STEP_SCHEMA

ELEMENT: Final = pa.struct([("kind", pa.string()), ("name", pa.string()), ("color", pa.string()), ("box", BOX)])
SHARD_SCHEMA: Final = pa.schema(
    [
        *STEP_SCHEMA,
        pa.field("elements", pa.list_(ELEMENT), nullable=False),  # what is visible, in document order
        pa.field("target", pa.int32(), nullable=False),  # index in elements of the element that was acted on
        pa.field("targets", pa.list_(pa.int32()), nullable=False),  # indices of all correct elements
    ]
)
"""A labelled step together with everything visible on its screen.

In pretraining shards, elements whose names have held-out words are left out, so that no model trained on them was
asked for such a word.
"""

SEEDS_PER_SHARD: Final = 1_000
TRAIN_BLOCKS: Final = 3
"""Blocks of each family from which the snapshot's training steps are made."""
GENERAL_BLOCKS: Final = 20
"""Blocks of general pages for each block of the families in pretraining."""
TRIES_PER_SHARD: Final = 120
TRIES_IN_VAIN: Final = 80
STEPS_PER_SHARD: Final[dict[Split, int]] = {
    "pretrain": 64,
    "train": 64,
    "validation": 16,
    "test_seed": 20,
    "test_text": 20,
    "test_family": 48,
}
"""A shard ends with the episode that reaches this many steps, after TRIES_PER_SHARD episodes, or after TRIES_IN_VAIN
without one that is kept."""


@dataclass(frozen=True, order=True)
class Shard:
    """One unit of work: a block of SEEDS_PER_SHARD seeds of one family in one split."""

    block: int
    split: Split
    family: str

    def path(self, root: Path) -> Path:
        return root / self.split / self.family / f"{self.block:04d}.parquet"

    @property
    def seeds(self) -> range:
        """The seeds to try, in order. Raises ValueError when the split has no such block."""
        start = SEEDS[self.split].start + self.block * SEEDS_PER_SHARD
        seeds = range(start, start + TRIES_PER_SHARD)
        if seeds.stop > SEEDS[self.split].stop:
            raise ValueError(f"{self.split} has no block {self.block} of {SEEDS_PER_SHARD} seeds")
        return seeds


@dataclass
class Progress:
    """The work done so far, for the progress callback."""

    shards: int = 0
    of_shards: int = 0
    skipped: int = 0
    steps: int = 0
    seconds: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)


def plan(split: Split, blocks: int, families: Sequence[str] | None = None, first_block: int = 0) -> list[Shard]:
    """The shards of `blocks` blocks for each family, all families of a block before the next block."""
    chosen = families_of(split) if families is None else families
    return [Shard(b, split, f) for b in range(first_block, first_block + blocks) for f in chosen]


def benchmark_plan() -> list[Shard]:
    """The shards from which the shipped snapshot is made."""
    return [shard for split in SPLITS for shard in plan(split, TRAIN_BLOCKS if split == "train" else 1)]


def collect(
    root: Path,
    shards: Iterable[Shard],
    processes: int = 2,
    progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Collects every shard that is missing under `root`, in several processes with a browser each.

    Errors of a worker end the run; finished shards stay. `progress` is called after each shard.
    """
    state = Progress()
    wanted = list(shards)
    missing = [shard for shard in wanted if not shard.path(root).exists()]
    state.of_shards, state.skipped = len(wanted), len(wanted) - len(missing)
    if not missing:
        return state
    start = time.monotonic()
    queue = iter(missing)
    workers = min(processes, len(missing))
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_end_with, initargs=(os.getpid(),)) as pool:
        running: set[Future[tuple[int, Counter[str]]]] = set()
        while True:
            while len(running) < processes and (shard := next(queue, None)) is not None:
                running.add(pool.submit(collect_shard, root, shard))
            if not running:
                return state
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                steps, dropped = future.result()
                state.shards += 1
                state.steps += steps
                state.dropped += dropped
                state.seconds = time.monotonic() - start
                if progress is not None:
                    progress(state)


_browser: Browser | None = None


def _end_with(parent: int) -> None:
    """Makes a worker end, with its browser, when the process that started it is gone (also when it was killed)."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        if _browser is not None:
            _browser.close()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _shared_browser() -> Browser:
    """The browser of this worker process; it ends with the process."""
    global _browser
    if _browser is None:
        _browser = Browser()
        Finalize(_browser, _browser.close, exitpriority=10)
    return _browser


def collect_shard(root: Path, shard: Shard) -> tuple[int, Counter[str]]:
    """Plays one shard and writes it. Returns the number of steps, and why episodes were dropped."""
    rows, dropped = play_shard(_shared_browser(), shard)
    path = shard.path(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as draft:
        pq.write_table(pa.Table.from_pylist(rows, SHARD_SCHEMA), draft, compression="zstd")
    return len(rows), dropped


def play_shard(browser: Browser, shard: Shard) -> tuple[list[dict[str, Any]], Counter[str]]:
    """The rows of a shard (SHARD_SCHEMA), and why episodes were dropped."""
    rows: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    for seed in shard.seeds:
        if len(rows) >= STEPS_PER_SHARD[shard.split]:
            break
        if not rows and sum(dropped.values()) >= TRIES_IN_VAIN:
            break
        episode = play(
            browser, shard.family, seed, lambda goal: goal_wanted(shard.split, goal), reload=seed == shard.seeds.start
        )
        if not episode.reason and not episode_wanted(shard.split, target_texts(episode)):
            dropped[f"{shard.family}: words of another split"] += 1
        elif episode.reason:
            dropped[f"{shard.family}: {episode.reason}"] += 1
        else:
            rows += episode_rows(episode, shard.split)
    return rows, dropped


def target_texts(episode: Episode) -> list[str]:
    """The names of all targets and the values of an episode, which the split rule checks."""
    return [text for step in episode.steps for text in (*(e.name for e in step.move.targets), step.move.value)]


def episode_rows(episode: Episode, split: Split) -> list[dict[str, Any]]:
    """An episode as rows of SHARD_SCHEMA."""
    rows = []
    for index, step in enumerate(episode.steps):
        shown = [e for e in step.elements if split != "pretrain" or not held_out(e.name)]
        rows.append(
            {
                "step_id": f"{episode.episode_id}/{index}",
                "split": split,
                "episode_id": episode.episode_id,
                "step_index": index,
                "family": episode.family,
                "seed": episode.seed,
                "goal": episode.goal,
                "history": list(step.history),
                "screenshot": encode_png(step.image),
                "width": WIDTH,
                "height": HEIGHT,
                "boxes": [list(box) for box in step.boxes],
                "action_type": step.move.action_type,
                "value": step.move.value,
                "elements": [_element_row(e) for e in shown],
                "target": shown.index(step.move.targets[0]),
                "targets": [shown.index(e) for e in step.move.targets],
            }
        )
    return rows


def _element_row(element: Element) -> dict[str, Any]:
    return {"kind": element.kind, "name": element.name, "color": element.color, "box": list(element.box)}


def read_shards(root: Path, split: Split) -> pa.Table:
    """Every finished shard of a split as one table (SHARD_SCHEMA), in the order of family and block.

    Raises FileNotFoundError with the remedy when there is none.
    """
    paths = sorted((root / split).glob("*/*.parquet"))
    if not paths:
        raise FileNotFoundError(f"no shards of {split} under {root}: run `coepg collect miniwob` first")
    return pa.concat_tables([pq.read_table(path, schema=SHARD_SCHEMA) for path in paths])
