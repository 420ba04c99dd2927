"""The base of every error that a user is to read."""

from __future__ import annotations

import re


class Refusal(Exception):
    """A request that cannot be carried out. The message says what is wrong and what to do; no traceback is needed.

    It is caught in three places. `coepg` prints the message and ends with exit status 1; the worker of a job ends with the
    message; a Dagster step fails with it.
    """


def without_credentials(text: str) -> str:
    """An error text of another library with `…` in place of what stands before the @ of its addresses: user and password."""
    return re.sub(r"(?<=://)[^/\s@'\"]*@", "…@", text)
