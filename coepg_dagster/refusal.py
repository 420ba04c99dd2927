"""The base of every error that a user is to read."""

from typing import ClassVar


class Refusal(Exception):
    """What was asked for cannot be done: the message says what is wrong, and what to do, so that nobody needs a traceback.

    It is caught in three places. `coepg` prints the message and ends with `code`; the worker of a job ends with the message;
    a Dagster step fails with it.
    """

    code: ClassVar[int] = 2
