"""Every Python process of the tests imports this as it starts: what changes no result, and costs the tests much of their time.

SQLite does not wait until what it writes is on the disk. For a run of eight light steps Dagster opens its databases eleven
hundred times. To open one, write and close it takes 22 ms on the disk of two busy cores, and a third of a millisecond without
the waiting. A killed process leaves behind what it had written all the same: only a machine that loses its power would not.

Garbage is looked for less often, as in `coepg` itself: of the CPU that imports of Dagster or of torch take it is a fifth.
"""

import gc
import sqlite3
import sqlite3.dbapi2

gc.set_threshold(100_000, 50, 100)

_connect = sqlite3.dbapi2.connect


def connect(*arguments: object, **more: object) -> sqlite3.Connection:
    """`sqlite3.connect`. A database that cannot be read says so when it is used, as ever."""
    connection: sqlite3.Connection = _connect(*arguments, **more)  # type: ignore[call-overload]
    try:
        connection.execute("PRAGMA synchronous = OFF")
    except sqlite3.Error:
        return connection
    return connection


sqlite3.connect = sqlite3.dbapi2.connect = connect
