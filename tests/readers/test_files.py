"""An import is current as long as every file that it read is as it was: annotations, images, splits."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from coepg_dagster.benchmark import SOURCE, benchmark_version, read_benchmark
from coepg_dagster.experiment.schema import Benchmark
from coepg_dagster.readers import files
from coepg_dagster.readers.images import opened
from coepg_dagster.readers.importing import (
    NAMES,
    Options,
    check_data,
    import_dataset,
    load_benchmark,
    source_files,
    version_now,
    version_read,
)
from coepg_dagster.readers.rows import ReaderError

from .samples import episode, mind2web_row, picture, user_row, write_android_control, write_mind2web, write_user_rows

LENIENT = Options(max_bad_share=1.0)
BLACK = (0, 0, 99, 59)


class Dataset:
    """Two annotation files with an image each, imported as an experiment does; `dark` says what their images show."""

    def __init__(self, folder: Path) -> None:
        self.data, self.out, self.folder = folder / "data", folder / "out", folder
        write_user_rows(self.data, [user_row("a"), user_row("b", image="images/2.png")])
        (self.data / "more.jsonl").write_text(json.dumps(user_row("c", image="images/3.png")))
        for name in "123":
            self.image(name, False)
        self.config = Benchmark(
            reader="jsonl", path=Path("data"), test=["test"], protocol="miniwob/point", max_bad_share=1
        )

    def image(self, name: str, dark: bool) -> Path:
        file = self.data / f"images/{name}.png"
        file.write_bytes(picture(100, 60, "PNG", *([BLACK] if dark else [])))
        return file

    def read(self) -> tuple[dict[str, bool], dict[str, Any]]:
        table, figures = read_benchmark(self.config, self.folder, self.out)
        dark = {
            row["step_id"]: opened(row["screenshot"]).convert("L").getpixel((50, 30)) == 0 for row in table.to_pylist()
        }
        return dark, figures

    def version(self) -> str:
        return benchmark_version(self.config, self.folder, self.out)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return Dataset(tmp_path)


def arrows(out: Path) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in out.rglob("*.arrow")}


def test_a_mended_image_is_read_again_and_nothing_else_is(dataset: Dataset) -> None:
    dark, figures = dataset.read()
    assert dark == {"a": False, "b": False, "c": False} and dataset.version() == figures[SOURCE]
    before = arrows(dataset.out)
    dataset.image("2", True)
    assert dataset.version() != figures[SOURCE]
    dark, figures = dataset.read()
    assert dark == {"a": False, "b": True, "c": False} and dataset.version() == figures[SOURCE]
    after = arrows(dataset.out)
    assert {name for name in before if after[name] != before[name]} == {n for n in before if n.startswith("steps")}
    assert arrows(dataset.out) == after == (dataset.read() and arrows(dataset.out))


def test_the_same_size_and_time_hide_no_change(dataset: Dataset) -> None:
    file = dataset.image("1", True)
    file.write_bytes(file.read_bytes().ljust(4096, b"\0"))
    _, figures = dataset.read()
    size, times = file.stat().st_size, file.stat()
    file.write_bytes(picture(100, 60).ljust(4096, b"\0"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (size, times.st_mtime_ns)
    assert dataset.version() != figures[SOURCE] and dataset.read()[0]["a"] is False


def test_another_time_alone_is_no_change_and_is_hashed_once(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    _, figures = dataset.read()
    before = arrows(dataset.out)
    for file in dataset.data.rglob("*"):
        os.utime(file, ns=(1, 1))
    assert dataset.version() == figures[SOURCE]
    monkeypatch.setattr(files.hashlib, "file_digest", None)  # from now on nothing may be opened
    assert dataset.version() == figures[SOURCE] and dataset.read()[1] == figures
    assert arrows(dataset.out) == before


def test_a_missing_image_that_comes_and_one_that_goes(dataset: Dataset) -> None:
    (dataset.data / "images/3.png").rename(dataset.folder / "3.png")
    dark, figures = dataset.read()
    assert set(dark) == {"a", "b"} and figures["rejected"] == {"bad_path": 1}
    (dataset.folder / "3.png").rename(dataset.data / "images/3.png")
    assert dataset.version() != figures[SOURCE]
    dark, figures = dataset.read()
    assert set(dark) == {"a", "b", "c"}
    (dataset.data / "images/1.png").unlink()
    assert dataset.version() != figures[SOURCE] and set(dataset.read()[0]) == {"b", "c"}


def test_what_no_row_names_changes_nothing(dataset: Dataset) -> None:
    _, figures = dataset.read()
    dataset.image("4", True)
    (dataset.data / "notes.txt").write_text("x")
    assert dataset.version() == figures[SOURCE]
    (dataset.data / "new.jsonl").write_text(json.dumps(user_row("d")))
    assert dataset.version() != figures[SOURCE] and "d" in dataset.read()[0]


def test_linked_folders_of_images_are_read_and_watched(dataset: Dataset) -> None:
    disk = dataset.folder / "disk"
    shutil.move(dataset.data / "images", disk)
    (dataset.data / "images").symlink_to(disk)
    assert check_data(dataset.data).ok
    _, figures = dataset.read()
    (disk / "1.png").write_bytes(picture(100, 60, "PNG", BLACK))
    assert dataset.version() != figures[SOURCE] and dataset.read()[0]["a"] is True
    (dataset.data / "images").unlink()
    (dataset.data / "images").symlink_to(dataset.folder / "nowhere")
    assert f"is not there ({dataset.folder / 'nowhere' / '1.png'})" in check_data(dataset.data).text()


def test_a_separate_folder_of_images_is_watched_behind_a_linked_source_too(dataset: Dataset) -> None:
    separate, link = dataset.folder / "elsewhere", dataset.folder / "deep/link"
    link.parent.mkdir()
    link.symlink_to(dataset.data)
    shutil.move(dataset.data / "images", separate / "images")
    options = Options(images=str(separate))
    load_benchmark("jsonl", link, dataset.out, options)
    read = version_read("jsonl", link, dataset.out, options)
    assert version_now("jsonl", link, dataset.out, options) == read
    (separate / "images/1.png").write_bytes(picture(100, 60, "PNG", BLACK))
    assert version_now("jsonl", link, dataset.out, options) != read
    table, _ = load_benchmark("jsonl", link, dataset.out, options)
    assert opened(table["screenshot"][1].as_py()).convert("L").getpixel((50, 30)) == 0  # more.jsonl comes first


def test_linked_folders_of_annotations_are_read_and_cycles_end(tmp_path: Path) -> None:
    write_mind2web(tmp_path / "disk/train-0.parquet", [mind2web_row("t0")])
    (tmp_path / "data").mkdir()
    (tmp_path / "data/link").symlink_to(tmp_path / "disk")
    (tmp_path / "disk/again").symlink_to(tmp_path / "data")
    assert import_dataset("mind2web", tmp_path / "data", tmp_path / "out", LENIENT).steps == {"train": 1}


FOUND: dict[Any, str] = {
    "mind2web": "train-0.parquet",
    "mind2web_blocks": "task_blocks.jsonl",
    "android_control": "android_control-00000-of-00001",
    "screenspot": "screenspot_web.json",
    "screenspot_v1": "screenspot_web.json",
    "screenspot_v2": "screenspot_web_v2.json",
    "screenspot_pro": "vscode_macos.json",
    "ui_vision": "element_grounding_basic.json",
    "jsonl": "steps.jsonl",
}


@pytest.mark.parametrize("dataset", list(FOUND))
@pytest.mark.parametrize("call", ["scandir", "stat"])
def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, dataset: Any, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path if dataset == "jsonl" else tmp_path / "closed"
    for folder in (tmp_path, tmp_path / "closed"):
        folder.mkdir(exist_ok=True)
        (folder / FOUND[dataset]).write_text("x")
    real = getattr(os, call)

    def refused(path: Any, *args: Any, **more: Any) -> Any:
        inside = call == "stat" and Path(path).parent == closed and Path(path).name == FOUND[dataset]
        if inside or (call == "scandir" and Path(path) == closed):
            raise PermissionError(13, "Permission denied", str(path))  # root may read everything
        return real(path, *args, **more)

    monkeypatch.setattr(os, call, refused)
    with pytest.raises(ReaderError, match=rf"^{closed}.*: cannot be read \(Permission denied\): let this user read it"):
        source_files(dataset, tmp_path)


def test_moved_splits_are_read_again(tmp_path: Path) -> None:
    wait = [{"action_type": "wait"}]
    write_android_control(tmp_path / "data", [episode(0, wait), episode(1, wait)], {"train": [0], "test": [1]})
    config = Benchmark(reader="android_control", path=Path("data"), test=["test"], protocol="android_control/qwen")

    def read() -> tuple[list[str], str]:
        table, figures = read_benchmark(config, tmp_path, tmp_path / "out")
        return table["split"].to_pylist(), figures[SOURCE]

    splits, source = read()
    assert splits == ["train", "test"] and benchmark_version(config, tmp_path, tmp_path / "out") == source
    (tmp_path / "data/splits.json").write_text(json.dumps({"train": [1], "test": [0]}))
    assert benchmark_version(config, tmp_path, tmp_path / "out") != source
    splits, source = read()
    assert splits == ["test", "train"]
    (tmp_path / "data/test_subsplits.json").unlink()
    assert benchmark_version(config, tmp_path, tmp_path / "out") != source


def test_ids_of_files_before_decide_what_a_duplicate_is(tmp_path: Path) -> None:
    def ids(first: str) -> list[str]:
        write_user_rows(tmp_path / "data", [user_row("x")])
        (tmp_path / "data/a.jsonl").write_text(json.dumps(user_row(first)))
        return load_benchmark("jsonl", tmp_path / "data", tmp_path / "out", LENIENT)[0]["step_id"].to_pylist()

    assert ids("a") == ["a", "x"]
    assert ids("x") == ["x"]
    assert ids("a") == ["a", "x"]


def test_an_import_that_stopped_is_tried_again_once_something_changed(dataset: Dataset) -> None:
    dataset.config = dataset.config.model_copy(update={"max_bad_share": 0.0})
    (dataset.data / "images/2.png").write_bytes(b"damaged")
    before = dataset.version()
    with pytest.raises(ValueError, match=r"bad_image.*Rejected rows: .*\.parquet"):
        dataset.read()
    failed = dataset.version()
    assert failed != before and dataset.version() == failed
    dataset.image("2", False)
    assert dataset.version() != failed and set(dataset.read()[0]) == {"a", "b", "c"}


@pytest.mark.parametrize("dataset", NAMES)
@pytest.mark.parametrize("name", ["steps.jsonl.gz", "steps.txt", "STEPS.JSONL", ".hidden.jsonl"])
def test_files_of_other_names_are_named(tmp_path: Path, dataset: Any, name: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text("{}")
    there = "it is empty" if name.startswith(".") else f"there are {name}"
    unpack = "; unpack *.gz first" if name.endswith(".gz") else ""
    with pytest.raises(ReaderError) as refused:
        source_files(dataset, tmp_path / "data")
    assert str(refused.value) == (
        f"{tmp_path / 'data'}: holds no files of a {dataset} dataset, named {NAMES[dataset]}: {there}{unpack}"
    )
    with pytest.raises(ReaderError, match="nowhere: there is no such file or folder"):
        source_files(dataset, tmp_path / "nowhere")
