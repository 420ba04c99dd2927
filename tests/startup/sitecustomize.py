"""Every Python process of the tests imports this as it starts: SQLite does not wait until what it writes is on the disk.

Dagster opens its databases anew for each of the hundred and fifty events of a run, and light steps waited for the disk more than
they worked. A killed process leaves behind what it had written all the same: only a machine that loses its power would not.
"""

import sqlite3
import sqlite3.dbapi2

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
