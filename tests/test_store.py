"""Artifacts are immutable, named by their content, and never half there."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.store import Artifact, Store, digests, version_of

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
    files = digests(tmp_path)
    assert version_of(files, ["a", "b"]) == version_of(files, ["b", "a"])
    assert version_of(files, ["a"]) != version_of(files, ["b"])


def test_every_file_has_its_hash_whether_it_counts_or_not(tmp_path: Path) -> None:
    made = put(Store(tmp_path), "1", "first")
    assert set(made.files) == {"rows", "note"} and made.files == digests(made.folder)
    again = put(Store(tmp_path), "1", "second")
    assert again.files == made.files  # those of the folder that stayed


@pytest.mark.parametrize("tamper", [lambda file: file.write_text("other"), lambda file: file.unlink()])
def test_what_was_tampered_with_is_made_again(tmp_path: Path, tamper: Callable[[Path], object]) -> None:
    store = Store(tmp_path)
    tamper(put(store, "1").folder / "rows")
    again = put(store, "1")
    assert (again.folder / "rows").read_text() == "1" and again.files == digests(again.folder)


def test_scratch_outlives_a_killed_run(tmp_path: Path) -> None:
    folder = Store(tmp_path).scratch("key")
    (folder / "chunk").write_text("1")
    assert (Store(tmp_path).scratch("key") / "chunk").read_text() == "1"


@given(
    st.dictionaries(
        st.sampled_from([f"{folder}{name}" for folder in ("", "a/", "a/b/") for name in "xyz"]), st.binary()
    )
)
def test_digests_are_of_each_files_content_by_name(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        for file, content in files.items():
            path = Path(name) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        assert digests(Path(name)) == {file: hashlib.sha256(files[file]).hexdigest() for file in sorted(files)}
