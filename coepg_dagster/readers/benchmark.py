"""The labelled steps of an experiment: which reader reads what, and whether that is still there as it was."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa

from coepg_dagster.experiment import Benchmark, fingerprint
from coepg_dagster.prompts import Style
from coepg_dagster.readers.importing import Options, load_benchmark, version_now, version_read
from coepg_dagster.sandbox.miniwob.reader import load_snapshot

SOURCE = "source"
"""Figure of an unpartitioned asset: the fingerprint of the files that it was made from."""


def options_of(config: Benchmark, style: Style = "web") -> Options:
    """How a benchmark is read for prompts of `style`."""
    return Options(
        view=config.view,
        level=config.level,
        trained=tuple(sorted((config.train, config.validation))),
        style=style if config.reader == "jsonl" else "web",
        max_bad_share=config.max_bad_share,
    )


def read_benchmark(
    config: Benchmark, root: Path, imports: Path, style: Style = "web"
) -> tuple[pa.Table, dict[str, Any]]:
    """The steps of a benchmark, and figures of its import: what it left out or noticed, and SOURCE.

    Imported files are kept under `imports`. Raises ReaderError.
    """
    if config.reader == "miniwob":
        return load_snapshot(root / config.path), {}
    place, options = _import_of(config, root, imports), options_of(config, style)
    table, counts = load_benchmark(config.reader, *place, options)
    figures = {name: counted for name, counted in counts.to_json().items() if name in ("rejected", "noticed", "lost")}
    return table, figures | {SOURCE: version_read(config.reader, *place, options)}


def benchmark_version(config: Benchmark, root: Path, imports: Path, style: Style = "web") -> str:
    """SOURCE as it would be if the benchmark was read now."""
    if config.reader == "miniwob":
        return files_version(root, [config.path])
    return version_now(config.reader, *_import_of(config, root, imports), options_of(config, style))


def _import_of(config: Benchmark, root: Path, imports: Path) -> tuple[Path, Path]:
    """(what is read, the folder of its import)."""
    out = imports / fingerprint([config.reader, str(config.path), config.view, config.level])
    return root / config.path, out


def files_version(root: Path, paths: list[Path]) -> str:
    """The fingerprint of the files in folders below `root`: names, sizes, times."""
    found = []
    for path in sorted(set(paths)):
        place = root / path
        for file in sorted([place] if place.is_file() else place.rglob("*")):
            if file.is_file():
                about = file.stat()
                found.append([os.path.relpath(file, root), about.st_size, about.st_mtime_ns])
    return fingerprint(found)
