"""The code location of `experiments/plugins/`: an overlay of each plug-in. The web UI does not load it by itself."""

from coepg_dagster.definitions import build
from coepg_dagster.experiment.files import PLUGINS
from coepg_dagster.project import find_project

defs = build(find_project(), PLUGINS)
