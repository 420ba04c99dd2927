"""The records of versions, looked up by what was read."""

from __future__ import annotations

import pytest

from coepg_dagster.auditing.archive import Archive, NotFound, selected_by
from coepg_dagster.provenance import Asset, Ref
from tests.auditing.loop import CONFIG, LOOP_NAME, Hand


def of_another_run(hand: Hand, asset: Asset) -> Archive:
    """The records, in which an artifact of the same content was made by another run than its readers name."""
    records = [
        one.model_copy(update={"run_id": "other"}) if one.asset == asset else one for one in hand.archive.records
    ]
    return Archive(records, hand.archive.store, hand.archive.root)


@pytest.mark.parametrize("asset", ["benchmark_steps", "open_models"])
def test_what_all_seeds_share_is_known_by_its_content(hand: Hand, asset: Asset) -> None:
    """Seeds of two machines, brought together: each made the same inputs by a run of its own, and one of them is left."""
    archive = of_another_run(hand, asset)
    above = archive.lineage(archive.newest(LOOP_NAME, "dataset", 1))
    assert [record.run_id for record in above if record.asset == asset] == ["other"]


def test_what_a_loop_made_is_known_by_its_run(hand: Hand) -> None:
    archive = of_another_run(hand, "verdicts")
    with pytest.raises(NotFound, match=r"the record of verdicts\[1\] .* is not in the event log"):
        archive.lineage(archive.newest(LOOP_NAME, "dataset", 1))


def test_settings_that_another_version_wrote_are_not_guessed_at(hand: Hand) -> None:
    dataset = hand.newest[Ref("dataset", 1)]
    assert selected_by(dataset) == CONFIG
    later = dataset.model_copy(update={"config": dataset.config | {"later": 1}})
    with pytest.raises(
        NotFound, match=r"settings of dataset\[1\] .* \(later: Extra .* another version of coepg-dagster"
    ):
        selected_by(later)
