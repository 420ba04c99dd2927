"""What `coepg gc` takes, and what it never takes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.auditing.archive import Archive, NotFound, place_of
from coepg_dagster.auditing.cleaning import VISUAL_SECONDS, leftovers, needed
from coepg_dagster.provenance import Record, Ref
from tests.auditing.loop import Hand

MADE = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.lists(st.integers(0, 30), max_size=3)), max_size=14)
"""What was made, in order: in which place, with which content (0..3), from which of the things before."""


def random_store(root: Path, made: list[tuple[int, int, list[int]]]) -> Archive:
    records: list[Record] = []
    for run, (place, content, inputs) in enumerate(made):
        folder = f"exp/s1/dataset/{place}/{content}"
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "rows").write_text("12345")
        read = [records[i % len(records)] for i in inputs] if records else []
        records.append(
            Record(
                asset="dataset",
                iteration=place,
                data_version=str(content),
                run_id=str(run),
                folder=folder,
                inputs=[record.as_input() for record in read],
                code_version="1",
                config={},
                seed=1,
                seconds=1,
                device="cpu",
                figures={},
            )
        )
    return Archive(records, root, root)


def ancestors(records: dict[str, Record], record: Record) -> set[str]:
    """The folders of a record and of all that it was made from, by recursion."""
    return {record.folder}.union(*(ancestors(records, records[used.run_id]) for used in record.inputs))


@given(MADE, st.integers(1, 3))
def test_nothing_that_a_kept_version_was_made_from_goes(made: list[tuple[int, int, list[int]]], keep: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        archive = random_store(root, made)
        runs = {record.run_id: record for record in archive.records}
        places: dict[str, list[Record]] = {}
        for record in archive.records:
            places.setdefault(place_of(record), []).append(record)
        stay: set[str] = set()
        for records in places.values():
            newest: dict[str, Record] = {}
            for record in reversed(records):
                newest.setdefault(record.folder, record)
            for record in list(newest.values())[:keep]:
                stay |= ancestors(runs, record)
        assert needed(archive, keep) == stay
        for leftover in leftovers(archive, set(), keep):
            assert (leftover.kind, leftover.size) == ("version", 5)
            leftover.remove()
        left = {str(path.parent.relative_to(root)) for path in root.rglob("rows")}
        assert left == stay and leftovers(archive, set(), keep) == []


def test_an_older_version_goes_when_nothing_current_was_made_from_it(hand: Hand) -> None:
    assert leftovers(hand.archive, set()) == []
    old = hand.newest[Ref("grounder", 1)]
    hand.model("grounder", 1, "trained otherwise")
    assert leftovers(hand.archive, set()) == []  # D_1 and π'_1 were made from the older one
    hand.model("planner", 1, "trained otherwise")
    hand.data(1)
    gone = {str(leftover.folder.relative_to(hand.store.root)) for leftover in leftovers(hand.archive, set())}
    assert old.folder in gone and not gone & needed(hand.archive)
    assert old.folder not in {
        str(one.folder.relative_to(hand.store.root)) for one in leftovers(hand.archive, set(), keep=2)
    }


def test_scratch_drafts_and_plays(hand: Hand) -> None:
    root = hand.store.root
    done, going_on = (
        root / ".scratch" / f"hand-s1-verdicts-1-{12 * 'a'}",
        root / ".scratch" / f"hand-s1-planner-2-{12 * 'b'}",
    )
    killed, damaged = root / ".drafts" / "killed", root / ".damaged" / "hand-s1-verdicts-1"
    plays = [root / "hand" / "s1" / "play" / "1" / name for name in ("first", "second")]
    unknown = root / "gone" / "s1" / "dataset" / "0" / "v"
    now = 1_900_000_000.0
    for age, folder in enumerate((done, going_on, killed, damaged, *plays, unknown)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "file").write_text("x")
        for path in (folder / "file", folder):
            os.utime(path, (now - 1000 + age,) * 2)
    idle, recent = root / ".visual" / "idle", root / ".visual" / "recent"
    for age, folder in ((VISUAL_SECONDS + 60, idle), (VISUAL_SECONDS - 60, recent)):
        file = folder / "ab" / "screenshot.safetensors"
        file.parent.mkdir(parents=True)
        file.write_text("x")
        for path in (file, file.parent, folder):
            os.utime(path, (now - age,) * 2)
    with hand.store.draft("alive"):
        result = leftovers(hand.archive, {"hand-s1-verdicts-1"}, now=now)
    assert not killed.exists(), "whoever makes a draft deletes those of the dead"
    killed.mkdir()
    result = leftovers(hand.archive, {"hand-s1-verdicts-1"}, now=now)
    assert {(leftover.folder, leftover.kind) for leftover in result} == {
        (done, "scratch"),
        (killed, "draft"),
        (damaged, "damaged"),
        (plays[0], "play"),
        (idle, "visual"),
    }
    assert leftovers(hand.archive, {"hand-s1-verdicts-1"}, keep=2, now=now) == [f for f in result if f.kind != "play"]


def test_what_the_log_does_not_know_all_about_is_not_touched(hand: Hand) -> None:
    """A lost event log must not cost the store, and a lost record not what its artifact was made from."""
    assert leftovers(Archive([], hand.store.root, hand.root), set()) == []
    without = [record for record in hand.records if record.ref != Ref("verdicts", 0)]
    with pytest.raises(NotFound, match=r"the record of verdicts\[0\] .* is not in the event log"):
        leftovers(Archive(without, hand.store.root, hand.root), set())


def test_of_a_symbolic_link_the_link_alone_goes(tmp_path: Path) -> None:
    archive = random_store(tmp_path / "store", [(0, 0, []), (0, 1, [])])
    place, outside = archive.store / "exp/s1/dataset/0", tmp_path / "outside"
    (outside / "precious").mkdir(parents=True)
    (outside / "precious" / "file").write_text("kept")
    (place / "linked").symlink_to(outside)
    (place / "0" / "inner").symlink_to(outside / "precious")
    (archive.store / ".scratch").symlink_to(outside)
    taken = leftovers(archive, finished={"precious"})
    assert {one.folder.name for one in taken} == {"0", "linked"}
    for one in taken:
        one.remove()
    assert (outside / "precious" / "file").read_text() == "kept" and not (place / "linked").is_symlink()
