"""Artifacts are immutable, named by their content, and never half there."""

from __future__ import annotations

from pathlib import Path

import pytest

from coepg_dagster.store import Artifact, Store, content_version

PLACE = ("sandbox", "s13", "dataset", "1")


def put(store: Store, text: str, note: str = "") -> Artifact:
    with store.draft(*PLACE) as draft:
        (draft / "rows").write_text(text)
        (draft / "note").write_text(note)
        return store.commit(draft, PLACE, ["rows"])


def test_versions_lie_beside_each_other(tmp_path: Path) -> None:
    store = Store(tmp_path)
    one, two = put(store, "1"), put(store, "2")
    assert one.version != two.version and one.folder.parent == two.folder.parent == tmp_path.joinpath(*PLACE)
    assert (one.folder / "rows").read_text() == "1" and (two.folder / "rows").read_text() == "2"


def test_the_same_content_is_the_same_artifact(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert put(store, "1", "first") == put(store, "1", "second")
    assert [path.name for path in tmp_path.joinpath(*PLACE).iterdir()] == [put(store, "1").version]


def test_a_draft_that_was_not_committed_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(RuntimeError), store.draft(*PLACE) as draft:
        (draft / "rows").write_text("half")
        raise RuntimeError
    assert list((tmp_path / ".drafts").iterdir()) == [] and not (tmp_path / "sandbox").exists()


def test_missing_content_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(FileNotFoundError), store.draft(*PLACE) as draft:
        store.commit(draft, PLACE, ["rows"])
    assert not (tmp_path / "sandbox").exists()


def test_names_count_and_order_does_not(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1")
    assert content_version(tmp_path, ["a", "b"]) == content_version(tmp_path, ["b", "a"])
    assert content_version(tmp_path, ["a"]) != content_version(tmp_path, ["b"])


def test_scratch_outlives_a_killed_run(tmp_path: Path) -> None:
    folder = Store(tmp_path).scratch("key")
    (folder / "chunk").write_text("1")
    assert (Store(tmp_path).scratch("key") / "chunk").read_text() == "1"
