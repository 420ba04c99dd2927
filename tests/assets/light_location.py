"""The code location of tests with a real daemon and web server; COEPG_ROOT names the project.

Sensors look every three seconds once they are turned on, and cron ticks pass every second minute. Runs are processes forked
from one that has Dagster, its storage and our definitions imported, where Dagster's code server starts each from nothing:
the half of what a light run costs.
"""

import multiprocessing
from multiprocessing.context import ForkServerProcess, SpawnContext

from coepg_dagster.resources import warm

from coepg_dagster.project import find_project
from tests.assets.light import light_definitions

multiprocessing.set_forkserver_preload(
    ["dagster._grpc.impl", "dagster._cli.api", "dagster._core.storage.sqlite_storage", "coepg_dagster.definitions"]
)
SpawnContext.Process = ForkServerProcess  # type: ignore[assignment,misc]

warm.IMPORTED.clear()  # workers here hang, and need nothing for that

defs = light_definitions(find_project(), nightly="*/2 * * * *", weekly="*/2 * * * *", seconds=3)
