"""The second code location: the variants of `experiments/ablations/`, kept apart so that the first stays readable."""

from coepg_dagster.definitions import build
from coepg_dagster.experiment import ABLATIONS
from coepg_dagster.project import find_project

defs = build(find_project(), ABLATIONS)
