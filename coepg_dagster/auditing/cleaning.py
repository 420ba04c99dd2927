"""`coepg gc`: folders of the store that nothing needs. Whatever a current artifact was made from is needed."""

from __future__ import annotations

import re
import shutil
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coepg_dagster.auditing.archive import Archive, place_of
from coepg_dagster.store import DAMAGED, Store

PLAY: Final = "play"
"""The folder of `coepg play` beside the assets of a loop."""
VISUAL_SECONDS: Final = 7 * 24 * 3600
"""Cached embeddings that were not added to for this long may go; they are computed again on demand."""
_SCRATCH: Final = re.compile(r"(?P<job>.+)-[0-9a-f]{12}")


@dataclass(frozen=True)
class Leftover:
    """A folder of the store that may be removed."""

    folder: Path
    kind: str  # "version", "play", "scratch", "draft", "damaged" or "visual"
    size: int  # bytes

    def remove(self) -> None:
        """Deletes it; of a symbolic link the link alone."""
        if self.folder.is_symlink():
            self.folder.unlink()
        else:
            shutil.rmtree(self.folder)


def needed(archive: Archive, keep: int = 1) -> set[str]:
    """The folders of the newest `keep` versions of every artifact, and of all that these were made from.

    Raises NotFound where the record of one of them is gone, so that its inputs are unknown.
    """
    by_place: dict[str, dict[str, None]] = defaultdict(dict)
    newest = {record.folder: record for record in archive.records}
    for record in reversed(archive.records):
        by_place[place_of(record)].setdefault(record.folder)
    kept = (newest[folder] for versions in by_place.values() for folder in list(versions)[:keep])
    return {record.folder for record in archive.reached(kept)}


def leftovers(archive: Archive, finished: Collection[str], keep: int = 1, now: float | None = None) -> list[Leftover]:
    """Folders that may be removed, in alphabetical order. No other process may write to the store meanwhile.

    - versions that are not `needed`; artifacts that the event log does not know are kept, so that a lost log does not
      cost the store;
    - results of `coepg play`, except the newest `keep` of each iteration;
    - scratch folders of jobs in `finished` (EXPERIMENT-sSEED-ASSET-K of current artifacts): no job resumes from them;
    - drafts of processes that were killed, and artifacts that were set aside because they were damaged;
    - cached visual embeddings of vision towers to which nothing was added for VISUAL_SECONDS.
    """
    stay, known = needed(archive, keep), set(archive.current)
    unneeded: list[tuple[Path, str]] = []
    for place, versions in _places(archive.store):
        name = str(place.relative_to(archive.store))
        if place.parent.name == PLAY:
            old = sorted(versions, key=lambda folder: folder.stat().st_mtime, reverse=True)[keep:]
            unneeded += [(folder, "play") for folder in old]
        elif name in known:
            unneeded += [(folder, "version") for folder in versions if f"{name}/{folder.name}" not in stay]
    for folder in _folders(archive.store / ".scratch"):
        job = _SCRATCH.fullmatch(folder.name)
        if job and job["job"] in finished:
            unneeded.append((folder, "scratch"))
    unneeded += [(folder, "draft") for folder in Store(archive.store).dead_drafts() if folder.is_dir()]
    unneeded += [(folder, "damaged") for folder in _folders(archive.store / DAMAGED)]
    for folder in _folders(archive.store / ".visual"):
        if _last_write(folder) < (time.time() if now is None else now) - VISUAL_SECONDS:
            unneeded.append((folder, "visual"))
    return [Leftover(folder, kind, _size(folder)) for folder, kind in sorted(unneeded)]


def _places(store: Path) -> Iterator[tuple[Path, list[Path]]]:
    """(EXPERIMENT[/sSEED]/ASSET/PARTITION, the folders of its versions)."""
    for experiment in _folders(store):
        if experiment.name.startswith("."):
            continue
        for inner in _folders(experiment):
            assets = _folders(inner) if re.fullmatch(r"s\d+", inner.name) else [inner]
            for asset in assets:
                for place in _folders(asset):
                    yield place, _folders(place)


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _last_write(folder: Path) -> float:
    return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
