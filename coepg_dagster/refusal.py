"""The base of every error that a user is to read, and what to do where disk or memory are the reason of another."""

from __future__ import annotations

import re
from typing import Final


class Refusal(Exception):
    """A request that cannot be carried out. The message says what is wrong and what to do; no traceback is needed.

    It is caught in three places. `coepg` prints the message and ends with exit status 1; the worker of a job ends with the
    message; a Dagster step fails with it.
    """


def without_credentials(text: str) -> str:
    """An error text of another library with `…` in place of what stands before the @ of its addresses: user and password."""
    return re.sub(r"(?<=://)[^/\s@'\"]*@", "…@", text)


_TROUBLES: Final = (
    (r"No space left on device|StorageFull|disk is full|Disk quota exceeded", "free space on that disk"),
    (r"Read-only file system|readonly database", "make it writable"),
    (r"Permission denied|unable to open database file", "let this user read and write there"),
    (r"enforce fail at inline_container|disk I/O error|Input/output error", "look whether the disk is full or damaged"),
    (
        r"database disk image is malformed|file is not a database|Could not decode to UTF-8 column",
        "Dagster's database is damaged: stop `coepg ui`, move the folder `.dagster` away, and run `coepg recover`",
    ),
    (
        r"out of memory|can't allocate memory|Cannot allocate memory|malloc of size|bad_alloc|MemoryError",
        "lower `micro_batch_size` or `batch_size`, use fewer processes, or set `lora`",
    ),
)
"""What Python, Arrow, safetensors, torch and SQLite say of a disk and of memory, and what to do."""


def machine_trouble(error: BaseException) -> str | None:
    """What to tell a user where disk or memory are the reason of an error; None: they are not."""
    text = " ".join(str(error).partition("\n[SQL:")[0].split()) or type(error).__name__
    remedy = next((remedy for pattern, remedy in _TROUBLES if re.search(pattern, text)), None)
    if remedy is None:
        return None
    return f"{text[:300]}: {remedy}, then run this again: what was finished is kept"
