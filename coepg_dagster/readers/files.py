"""The files that an import reads, with a version of each, so that later changes are detected.

Symbolic links are the user's choice and are followed. A file name from the data must stay below its folder.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from coepg_dagster.readers.rows import ReaderError, RejectedRow

MAX_IMAGE_BYTES: Final = 1 << 28
"""Larger image files are not read: 50 million pixels are at most 400 MB before compression."""

Version = tuple[int, int, int, str] | None
"""(size in bytes, mtime and ctime in ns, SHA-256) of a file; None: it cannot be read."""


def files_below(folder: Path, wanted: Callable[[str], bool], deep: bool = True) -> list[Path]:
    """The files of a folder and, if `deep`, its subfolders whose name is `wanted`, sorted. Hidden ones are skipped.

    Raises ReaderError where a folder cannot be read: what it holds would be missing without a word.
    """

    def refuse(error: OSError) -> None:
        why = f"cannot be read ({error.strerror or error}): let this user read it, or give a folder without it"
        raise ReaderError(f"{error.filename}: {why}") from error

    files: list[Path] = []
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        here = os.path.realpath(place)
        folders[:] = [name for name in folders if deep and here not in seen and not name.startswith(".")]
        if here not in seen:
            files += [Path(place, name) for name in names if wanted(name) and not name.startswith(".")]
        seen.add(here)
    try:
        return sorted(path for path in files if path.is_file())
    except OSError as error:  # a folder that can be listed and not entered
        refuse(error)
        raise


class Files:
    """The files that one import reads. `versions` has each by its path: relative to `folder` if below it, else absolute."""

    def __init__(self, folder: Path, images: Path | None = None) -> None:
        self._folder, self.images = folder, images or folder
        self.versions: dict[str, Version] = {}

    def note(self, path: Path) -> None:
        """Records a file that other code reads, or that is missing. Call it before reading, to detect a change meanwhile."""
        self.versions[self._name(path)] = version(path)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._folder) if path.is_relative_to(self._folder) else path.absolute())

    def image(self, name: str) -> bytes:
        """The content of the image file that a row names, relative to the folder of images.

        Raises RejectedRow where the name leaves that folder or the file cannot be read.
        """
        inside = Path(os.path.normpath(name))
        if inside.is_absolute() or os.pardir in inside.parts:
            raise RejectedRow("bad_path", f"{name!r} leaves {self.images}: names are relative to it and stay in it")
        path = self.images / inside
        key = self._name(path)
        try:
            about = path.stat()
            if not stat.S_ISREG(about.st_mode):
                raise RejectedRow("bad_path", f"{name!r} in {self.images} is no file")
            with path.open("rb") as file:
                content = file.read(MAX_IMAGE_BYTES + 1)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            self.versions.setdefault(key, None)
            why = f"cannot be read ({error})"
            if isinstance(error, FileNotFoundError):
                why = f"is not there ({os.path.realpath(path)})"
            raise RejectedRow("bad_path", f"{name!r} in {self.images} {why}") from error
        digest = hashlib.sha256(content).hexdigest()
        self.versions.setdefault(key, (about.st_size, about.st_mtime_ns, about.st_ctime_ns, digest))
        if len(content) > MAX_IMAGE_BYTES:
            raise RejectedRow(
                "image_too_large", f"{name!r} has {about.st_size:,} bytes; at most {MAX_IMAGE_BYTES:,} are read"
            )
        return content


def version(path: Path | str, known: Version = None) -> Version:
    """The version of a file, None where it cannot be read. It is hashed only where its size or a time differs from `known`."""
    try:
        about = os.stat(path)  # noqa: PTH116 (a hundred thousand of them)
        if not stat.S_ISREG(about.st_mode):
            return None
        state = about.st_size, about.st_mtime_ns, about.st_ctime_ns
        if known is not None and known[:3] == state:
            return known
        with Path(path).open("rb") as file:
            return (*state, hashlib.file_digest(file, "sha256").hexdigest())
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None


def versions_now(folder: Path, known: Mapping[str, Version]) -> dict[str, Version]:
    """The present versions of the files of `Files.versions`."""
    return {name: version(os.path.join(folder, name), was) for name, was in known.items()}  # noqa: PTH118


def same_content(one: Mapping[str, Version], other: Mapping[str, Version]) -> bool:
    """Whether the same files are there with the same content, whatever their times."""
    return contents(one) == contents(other)


def contents(versions: Mapping[str, Version]) -> dict[str, str | None]:
    """The SHA-256 of each file, without its times."""
    return {name: version and version[3] for name, version in versions.items()}
