"""The code location of tests with a real daemon and web server; COEPG_ROOT names the project.

Sensors look every three seconds and schedules run every minute, once they are turned on.
"""

from coepg_dagster.project import find_project
from tests.assets.light import light_definitions

defs = light_definitions(find_project(), nightly="* * * * *", weekly="* * * * *", seconds=3)
