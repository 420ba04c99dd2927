"""Members of the pools as they stand in experiment files."""

from __future__ import annotations

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.schema import Experiment
from tests.experiment.sample import REMOTE, content


def test_a_member_is_written_as_it_was_read() -> None:
    """Plain text stays plain text, in files and in fingerprints."""
    models = Experiment.model_validate(content(models__verifiers__far=REMOTE) | {"name": "exp"}).models
    assert models.model_dump(mode="json")["verifiers"] == {"open_v": "d", "open_w": "e", "far": REMOTE}
    assert Models.model_validate(models.model_dump(mode="json")) == models
    engines = {name: models.engine_of(member) for name, member in models.verifiers.items()}
    assert engines == {"open_v": "transformers", "open_w": "transformers", "far": "openai"}


def test_the_order_of_a_pool_in_its_file_changes_nothing() -> None:
    written = {"b": "models/b", "a": REMOTE, "c": "models/c"}
    read = []
    for pool in (written, dict(reversed(written.items()))):
        changed = content(models__verifiers=pool, models__planners=pool) | {"name": "exp"}
        read.append(Experiment.model_validate(changed).models.model_dump_json())
    assert read[0] == read[1]
