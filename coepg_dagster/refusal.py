"""The base of the exceptions that are for the person at the command line."""


class Refusal(Exception):
    """What was asked for cannot be done: the message says what is wrong, and what to do. `coepg` ends with it and code 2."""
