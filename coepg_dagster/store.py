"""The store of artifacts: immutable folders named by the hash of their content.

`ROOT/EXPERIMENT/sSEED/ASSET/PARTITION/VERSION/`. Materializing a partition again writes another version beside the old
one; the Dagster instance knows which version is current, the store does not. Unpartitioned assets have partition "all".
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import FileLock

UNPARTITIONED = "all"
CLAIMS: Final = ".claims"
"""The folder of who writes what."""
DRAFTS: Final = ".drafts"
DAMAGED: Final = ".damaged"
"""The folder of artifacts whose files had other content than was recorded."""


@dataclass(frozen=True)
class Artifact:
    """A stored artifact: its content hash, its folder, and the SHA-256 of every file there."""

    version: str
    folder: Path
    files: Mapping[str, str]

    @property
    def sizes(self) -> dict[str, int]:
        """Relative name → bytes of every file."""
        return {name: (self.folder / name).stat().st_size for name in self.files}


def digests(folder: Path) -> dict[str, str]:
    """Relative name → SHA-256 of every file below `folder`, in alphabetical order; files are read side by side."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return dict(zip((str(path.relative_to(folder)) for path in files), hashed(files), strict=True))


def hashed(files: Sequence[Path]) -> list[str]:
    """SHA-256 of each file; they are read side by side, since hashing does not hold the interpreter's lock."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(_sha256, files))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def version_of(files: Mapping[str, str], content: list[str]) -> str:
    """The data version of an artifact: a hash of the files `content` and their names, in any order.

    `files` are the digests of its folder. Raises FileNotFoundError if one is missing.
    """
    version = hashlib.sha256()
    for name in sorted(content):
        if name not in files:
            raise FileNotFoundError(f"the artifact has no file {name}")
        version.update(name.encode() + b"\0" + bytes.fromhex(files[name]))
    return version.hexdigest()[:16]


def changes(recorded: Mapping[str, str], folder: Path, name: str = "", *, added: bool = True) -> list[str]:
    """How the files of a folder differ from the recorded ones (name → SHA-256), one line for each file.

    `added`: whether a file that was added later counts.
    """
    now = digests(folder) if folder.is_dir() else {}
    where = f"{name}/" if name else ""
    lines = [f"{where}{file} is gone" for file in sorted(recorded.keys() - now.keys())]
    lines += [f"{where}{file} was added later" for file in sorted(now.keys() - recorded.keys()) if added]
    lines += [
        f"{where}{file} has other content than when it was made"
        for file in sorted(recorded.keys() & now.keys())
        if recorded[file] != now[file]
    ]
    return lines


_LOCK: Final = ".lock"


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + _LOCK)


def _is_held(path: Path) -> bool:
    try:
        with FileLock(_lock_of(path), timeout=0):
            return False
    except OSError:  # a Timeout; or the store is read-only
        return True


@dataclass(frozen=True)
class Store:
    """All artifacts below one root folder."""

    root: Path

    @contextmanager
    def draft(self, *place: str) -> Iterator[Path]:
        """Yields an empty folder to fill, on the disk of the store; it is deleted afterwards unless it was committed.

        Drafts of processes that were killed are deleted first: what is filled is locked, and a lock ends with its process.
        """
        for dead in self.dead_drafts():
            self.delete_draft(dead)
        folder = self.root / DRAFTS / f"{'-'.join(place)}-{uuid.uuid4().hex[:8]}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(_lock_of(folder)):
                folder.mkdir()
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
        finally:
            _lock_of(folder).unlink(missing_ok=True)

    def dead_drafts(self) -> list[Path]:
        """The drafts that no process fills any more."""
        place = self.root / DRAFTS
        names = {path.name.removesuffix(_LOCK) for path in place.iterdir()} if place.is_dir() else set()
        return [place / name for name in sorted(names) if not _is_held(place / name)]

    def delete_draft(self, folder: Path) -> None:
        """Deletes a draft that no process fills, and its lock."""
        shutil.rmtree(folder, ignore_errors=True)
        _lock_of(folder).unlink(missing_ok=True)

    def commit(self, draft: Path, place: tuple[str, ...], content: list[str], replace: bool = False) -> Artifact:
        """Moves a filled draft to its place in one rename. If a folder with the same content exists, it is kept.

        The draft replaces an existing folder whose content does not match its name. With `replace` it always does, for a folder
        that lost files which are not part of its content. One process at a time commits to a place.
        """
        files = digests(draft)
        version = version_of(files, content)
        folder = self.root.joinpath(*place, version)
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = self.root / CLAIMS / "commit" / "-".join(place)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_lock_of(lock)):
            if folder.exists():
                there = digests(folder)
                if not replace and set(content) <= there.keys() and version_of(there, content) == version:
                    return Artifact(version, folder, there)
                shutil.rmtree(folder)
            draft.rename(folder)
        return Artifact(version, folder, files)

    def set_aside(self, folder: str) -> Path | None:
        """Moves a damaged artifact out of its place, so that it counts as lost and is made again; returns where it is.

        None: it could not be moved, as in a store that is read-only.
        """
        aside = self.root / DAMAGED / f"{folder.replace('/', '-')}-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError):
            aside.parent.mkdir(exist_ok=True)
            (self.root / folder).rename(aside)
            return aside
        return None

    def lost(self, folder: str, files: Mapping[str, str], sizes: Mapping[str, int]) -> str | None:
        """The first missing file of the artifact in `folder` (relative to the root), by names and sizes, not by content.

        `files` has the recorded names, `sizes` their bytes if these were recorded. None: nothing is missing.
        """
        if not (self.root / folder).is_dir():
            return folder
        for name in sorted(files):
            try:
                size = (self.root / folder / name).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return f"{folder}/{name}"
            if size != sizes.get(name, size):
                return f"{folder}/{name} (it has {size:,} bytes, not {sizes[name]:,})"
        return None

    @property
    def visual(self) -> Path:
        """The folder of visual embeddings (see `inference.visual`); deleted ones are computed again."""
        return self.root / ".visual"

    def tracked(self, experiment: str, seed: int, asset: str, k: int) -> Path:
        """The folder of the log of a training for TensorBoard; nothing reads it but people."""
        return self.root / ".tracking" / f"{experiment}-s{seed}-{asset}-{k}"

    def scratch(self, key: str) -> Path:
        """A folder that outlives a killed run, for work whose inputs and configuration have the hash `key`."""
        folder = self.root / ".scratch" / key
        folder.mkdir(parents=True, exist_ok=True)
        return folder
