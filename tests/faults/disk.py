"""A small disk: a tmpfs that can be filled, emptied and made read-only."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Disk:
    """A disk that is mounted on `path`."""

    path: Path

    @property
    def room(self) -> int:
        """Bytes that are free."""
        about = os.statvfs(self.path)
        return about.f_bavail * about.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Leaves room for so many bytes."""
        (self.path / "ballast").write_bytes(bytes(max(0, self.room - leave)))

    def fill_with_files(self) -> None:
        """Leaves room for bytes, but for no file."""
        for i in range(os.statvfs(self.path).f_favail):
            (self.path / f"ballast{i}").touch()

    def free(self) -> None:
        for file in self.path.glob("ballast*"):
            file.unlink()

    def read_only(self, yes: bool) -> None:
        subprocess.run(["mount", "-o", "remount,ro" if yes else "remount,rw", str(self.path)], check=True)


@contextlib.contextmanager
def small_disk(path: Path, megabytes: float, files: int = 10_000) -> Iterator[Disk]:
    """A disk on the empty folder `path`, for so many `files` and folders. Skips the test where nothing can be mounted."""
    path.mkdir(parents=True, exist_ok=True)
    size = f"size={int(megabytes * (1 << 20))},nr_inodes={files}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(path)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted ({mounted.stderr.strip()}): run as root, or `unshare -rm make faults`")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
