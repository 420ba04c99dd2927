"""Builds the snapshot that ships with the repository from collected shards.

This module chooses the episodes and writes the files, their recipe and contact sheets;
`coepg_dagster.sandbox.miniwob.reader` reads them.
"""

from __future__ import annotations

import io
import platform
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from coepg_dagster.pictures import picture
from coepg_dagster.sandbox.miniwob.browser import HEIGHT, WIDTH, Browser
from coepg_dagster.sandbox.miniwob.collect import read_shards
from coepg_dagster.sandbox.miniwob.reader import TARGETS_FILE, TARGETS_SCHEMA, load_snapshot
from coepg_dagster.sandbox.miniwob.splits import SEEDS, SPLITS, Split, page_hash
from coepg_dagster.steps import STEP_SCHEMA

STEPS_PER_FAMILY: Final[dict[Split, int]] = {
    "train": 192,
    "validation": 16,
    "test_seed": 13,
    "test_text": 16,
    "test_family": 44,
}
"""Of each family, episodes are taken in the order of their seeds until this many steps are reached."""

LARGEST: Final = 8_000_000
"""Bytes that the snapshot may take."""


def build_snapshot(shards: Path, out: Path) -> dict[str, dict[str, int]]:
    """Writes the snapshot from shards under `shards` into the folder `out`; returns {split: {family: steps}}.

    Raises FileNotFoundError when a split has no shards, ValueError when the result is too large, and the
    errors of `load_snapshot` when the result breaks its rules.
    """
    out.mkdir(parents=True, exist_ok=True)
    pages: set[str] = set()
    counts: dict[str, dict[str, int]] = {}
    targets: list[dict[str, Any]] = []
    for split in SPLITS:
        rows = [row for episode in choose(read_shards(shards, split), split, pages) for row in episode]
        counts[split] = dict(sorted(Counter(row["family"] for row in rows).items()))
        targets += [_target_row(row) for row in rows]
        steps = [{name: row[name] for name in STEP_SCHEMA.names} for row in rows]
        for step in steps:
            step["screenshot"] = store_png(step["screenshot"])
        _write(pa.Table.from_pylist(steps, STEP_SCHEMA), out / f"{split}.parquet")
    _write(pa.Table.from_pylist(targets, TARGETS_SCHEMA), out / TARGETS_FILE)
    (out / "LICENSE-miniwob.txt").write_text(miniwob_licence(), "utf-8")
    load_snapshot(out)
    with Browser() as browser:
        (out / "RECIPE.md").write_text(recipe(counts, browser.version), "utf-8")
    size = sum(file.stat().st_size for file in out.iterdir())
    if size > LARGEST:
        raise ValueError(f"{out} takes {size:,} bytes, more than {LARGEST:,}: lower STEPS_PER_FAMILY")
    return counts


def choose(table: pa.Table, split: Split, pages: set[str]) -> Iterator[list[dict[str, Any]]]:
    """Whole episodes of a split, by family name and seed, up to STEPS_PER_FAMILY steps of each family.

    `pages` holds the first pages of episodes chosen so far and is extended; an evaluated episode that begins with one of
    them is skipped.
    """
    families: dict[str, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in table.to_pylist():
        families[row["family"]][row["seed"]].append(row)
    for _, episodes in sorted(families.items()):
        taken = 0
        for _, episode in sorted(episodes.items()):
            if taken >= STEPS_PER_FAMILY[split]:
                break
            page = page_hash(episode[0]["goal"], store_png(episode[0]["screenshot"]))
            if page in pages and split != "train":
                continue
            pages.add(page)
            taken += len(episode)
            yield sorted(episode, key=lambda row: int(row["step_index"]))


def _target_row(row: dict[str, Any]) -> dict[str, Any]:
    elements = row["elements"]
    target = elements[row["target"]]
    names = [elements[index]["name"] for index in row["targets"]]
    return {"step_id": row["step_id"], "kind": target["kind"], "name": target["name"], "names": names}


def store_png(png: bytes) -> bytes:
    """The same palette PNG without its own compression: a Parquet column of these is less than half as large.

    Raises BadPicture.
    """
    buffer = io.BytesIO()
    picture(png).save(buffer, format="PNG", compress_level=0)
    return buffer.getvalue()


def _write(table: pa.Table, path: Path) -> None:
    """Parquet with strong compression; equal tables give equal bytes."""
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=15,
        use_dictionary=[name for name in table.schema.names if name != "screenshot"],
        write_statistics=False,
        store_schema=False,
        data_page_size=1 << 24,
    )


def font_for(name: str) -> str:
    """The font that fontconfig gives for a name, or "unknown" where fontconfig is not installed."""
    program = shutil.which("fc-match")
    if program is None:
        return "unknown"
    return subprocess.run([program, "-f", "%{family}", name], capture_output=True, text=True, check=True).stdout


def miniwob_licence() -> str:
    """The licence text of the installed miniwob package."""
    files = [f for f in metadata.files("miniwob") or [] if f.name == "LICENSE"]
    if not files:
        raise FileNotFoundError("the installed package miniwob has no LICENSE file")
    return files[0].read_text()


def recipe(counts: dict[str, dict[str, int]], chromium: str) -> str:
    """RECIPE.md: how the snapshot was made and what it holds."""
    lines = [
        "# Recipe of the MiniWoB++ snapshot",
        "",
        "Made by `coepg collect miniwob --snapshot data/miniwob`. Pages: miniwob (MIT, see LICENSE-miniwob.txt),",
        "rendered and acted on in headless Chromium; a DOM oracle solved each episode by real mouse and key events,",
        "and the page rewarded it.",
        "The split rule is in `coepg_dagster/sandbox/miniwob/splits.py`, the background in `docs/embedded-benchmark.md`.",
        "",
        "| | |",
        "|---|---|",
        f"| miniwob | {metadata.version('miniwob')} |",
        f"| Chromium | {chromium} |",
        f"| platform | {platform.system()} {platform.machine()}; Arial drawn as {font_for('Arial')} |",
        f"| screenshots | {WIDTH} × {HEIGHT} px, palette PNG without loss, channels in multiples of 17 |",
        f"| row groups | zstd over uncompressed PNGs (pyarrow {pa.__version__}) |",
        "",
        "| split | seeds from | to | steps | families |",
        "|---|---|---|---|---|",
    ]
    for split in SPLITS:
        seeds = SEEDS[split]
        lines.append(
            f"| {split} | {seeds.start} | {seeds.stop - 1} | {sum(counts[split].values())} | {len(counts[split])} |"
        )
    lines += ["", "Steps of each family:", "", f"| family | {' | '.join(SPLITS)} |", f"|---|{'---|' * len(SPLITS)}"]
    for family in sorted({family for by_family in counts.values() for family in by_family}):
        lines.append(f"| {family} | {' | '.join(str(counts[split].get(family, '')) for split in SPLITS)} |")
    return "\n".join(lines) + "\n"
