"""The store of artifacts: immutable folders named by the hash of their content.

`ROOT/EXPERIMENT/sSEED/ASSET/PARTITION/VERSION/`. Materializing a partition again writes another version beside the old
one; the Dagster instance knows which version is current, the store does not. Unpartitioned assets have partition "all".
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

UNPARTITIONED = "all"


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
    """Relative name → SHA-256 of every file below `folder`, in alphabetical order."""
    by_name = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                by_name[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return by_name


def version_of(files: Mapping[str, str], content: list[str]) -> str:
    """The data version of an artifact: a hash of the files `content` and their names, in any order.

    `files` are the digests of its folder. Raises FileNotFoundError if one is missing.
    """
    digest = hashlib.sha256()
    for name in sorted(content):
        if name not in files:
            raise FileNotFoundError(f"the artifact has no file {name}")
        digest.update(name.encode() + b"\0" + bytes.fromhex(files[name]))
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Store:
    """All artifacts below one root folder."""

    root: Path

    @contextmanager
    def draft(self, *place: str) -> Iterator[Path]:
        """Yields an empty folder to fill, on the disk of the store; it is deleted afterwards unless it was committed."""
        folder = self.root / ".drafts" / f"{'-'.join(place)}-{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def commit(self, draft: Path, place: tuple[str, ...], content: list[str], replace: bool = False) -> Artifact:
        """Moves a filled draft to its place in one rename. If a folder with the same content exists, it is kept.

        The draft replaces an existing folder whose content does not match its name. With `replace` it always does, for a folder
        that lost files which are not part of its content.
        """
        files = digests(draft)
        version = version_of(files, content)
        folder = self.root.joinpath(*place, version)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            there = digests(folder)
            if not replace and set(content) <= there.keys() and version_of(there, content) == version:
                return Artifact(version, folder, there)
            shutil.rmtree(folder)
        draft.rename(folder)
        return Artifact(version, folder, files)

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
