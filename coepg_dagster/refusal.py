"""The base of every error that a user is to read."""


class Refusal(Exception):
    """What was asked for cannot be done: the message says what is wrong, and what to do, so that nobody needs a traceback.

    It is caught in three places. `coepg` prints the message and ends with exit status 1; the worker of a job ends with the
    message; a Dagster step fails with it.
    """
