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
    assert [models.engine_of(member) for member in models.verifiers.values()] == ["transformers"] * 2 + ["openai"]
