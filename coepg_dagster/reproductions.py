"""The second code location: the variants of `experiments/ablations/`, kept apart so that the first stays readable."""

import dagster as dg

from coepg_dagster.definitions import build
from coepg_dagster.experiment.files import ABLATIONS
from coepg_dagster.project import find_project


@dg.definitions
def defs() -> dg.Definitions:
    """What Dagster loads."""
    return build(find_project(), ABLATIONS)
