"""Damage to files, as disks and people do it."""

from __future__ import annotations

import os
import random
from pathlib import Path


def flip_a_bit(file: Path, seed: int = 0) -> None:
    """Changes one bit of a file, somewhere; size and times stay."""
    about, content = file.stat(), bytearray(file.read_bytes())
    at = random.Random(seed).randrange(8 * len(content))
    content[at // 8] ^= 1 << at % 8
    file.write_bytes(content)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


def cut_off(file: Path, seed: int = 0) -> None:
    """Keeps the beginning of a file."""
    content = file.read_bytes()
    file.write_bytes(content[: random.Random(seed).randrange(len(content))])
