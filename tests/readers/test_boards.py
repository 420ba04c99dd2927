"""Grounding boards in their owners' layouts: labels alone, and with their images as steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.readers.boards import ABILITIES, BOARDS, Board, Label, annotation_files, board_of, label_of, labels
from coepg_dagster.readers.importing import Options, import_dataset
from coepg_dagster.readers.rows import ReaderError, RejectedRow, part_of

from .samples import ASKED, SIZE, load, write_board

BOX = (100, 200, 160, 240)
FIRST: dict[Board, tuple[str, str]] = {
    "screenspot_v1": ("screenspot_mobile_0", "mobile_text"),
    "screenspot_v2": ("screenspot_mobile_v2_0", "mobile_text"),
    "screenspot_pro": ("vscode_macos_0", "Dev"),
    "osworld_g": ("X-0", ""),
    "osworld_g_refined": ("X-0", ""),
    "mmbench_gui": ("os_mac_0", "basic"),
    "ui_vision": ("element_grounding_basic_0", "basic"),
}
"""The item and the group of each board's first label."""


def read(board: Board, folder: Path) -> list[Label]:
    return [label for label in labels(board, folder) if isinstance(label, Label)]


@pytest.mark.parametrize("board", BOARDS)
def test_labels_and_steps_of_each_layout(tmp_path: Path, board: Board) -> None:
    source = write_board(tmp_path / "data", board)
    first, second = read(board, source)
    assert (first.item, first.group) == FIRST[board] and first.instruction == ASKED
    assert first.boxes == second.boxes == (pytest.approx(BOX),) and first.size in (None, SIZE)
    counts = import_dataset(board, source, tmp_path / "out")
    assert counts.steps == {"test": 2} and not counts.rejected
    steps = load(tmp_path / "out").to_pylist()
    assert [step["step_id"] for step in steps] == [first.item, second.item]
    assert steps[0]["goal"] == ASKED and steps[0]["boxes"] == [pytest.approx(BOX)]
    assert (steps[0]["width"], steps[0]["height"], steps[0]["action_type"]) == (*SIZE, "CLICK")


def test_a_polygon_and_a_refusal(tmp_path: Path) -> None:
    source = write_board(tmp_path, "osworld_g", {"id": "X-2", "box_type": "refusal", "box_coordinates": [0, 0, 0, 0]})
    (source / "benchmark" / ABILITIES).write_text(
        json.dumps({"classified": {"text_matching": [{"id": "X-0"}], "layout_understanding": ["X-0", "X-1"]}})
    )
    box, polygon, refusal = read("osworld_g", source)
    assert box.polygon == () and polygon.polygon == ((100, 200), (160, 200), (100, 240)) and refusal.boxes == ()
    assert (box.abilities, refusal.abilities) == (("layout_understanding", "text_matching"), ())
    (source / "benchmark" / ABILITIES).write_text("[]")
    with pytest.raises(ReaderError, match=ABILITIES):
        read("osworld_g", source)


def test_one_file_and_files_of_another_version(tmp_path: Path) -> None:
    one, two = write_board(tmp_path / "one", "screenspot_v1"), write_board(tmp_path / "two", "screenspot_v2")
    file = two / "screenspot_mobile_v2.json"
    assert len(read("screenspot_v2", file)) == 2
    with pytest.raises(ReaderError, match="holds labels of screenspot_v2, not of screenspot_v1"):
        read("screenspot_v1", file)
    with pytest.raises(ReaderError, match="holds no labels of screenspot_v2, whose files are named"):
        read("screenspot_v2", one)
    # any name that is no other board's will do for a single file
    assert len(read("screenspot_v2", file.rename(two / "mine_mobile.json"))) == 2
    file = one / "screenspot_mobile.json"
    file.write_text('[{"a": 1}, {"b"')
    with pytest.raises(ReaderError, match=r"screenspot_mobile.json: cannot be read as a JSON list .*fetch it again"):
        list(labels("screenspot_v1", one))


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[Board, dict[str, Any]]:
    """An entry of each board's labels."""
    folder = tmp_path_factory.mktemp("boards")
    return {
        board: json.loads(annotation_files(board, write_board(folder / board, board))[0].read_text())[0]
        for board in BOARDS
    }


@given(
    st.sampled_from(BOARDS),
    st.sampled_from(
        ["bbox", "box_coordinates", "box_type", "image_size", "img_size", "instruction", "data_type", "id"]
    ),
    st.sampled_from([None, [], [1, 2, 3], [1, 2, 3, float("nan")], "text", 5, True, {}, [0, 0], [[1]] * 4, 10**400]),
)
def test_a_damaged_entry_is_a_label_or_rejected(
    entries: dict[Board, dict[str, Any]], board: Board, key: str, value: Any
) -> None:
    try:
        with part_of("test"):
            assert label_of(board, entries[board] | {key: value}, 0, "screenshots").item
    except RejectedRow as rejected:
        assert rejected.split == "test"


def test_an_item_that_no_model_could_see_is_left_out(tmp_path: Path) -> None:
    source = write_board(
        tmp_path / "data",
        "screenspot_pro",
        {"id": "gone", "img_filename": "gone.png"},
        {"id": "large", "img_size": [9, 9]},
    )
    counts = import_dataset("screenspot_pro", source, tmp_path / "out", Options(max_bad_share=1.0))
    assert counts.steps == {"test": 2} and counts.lost == {"test: bad_path": 1, "test: bad_field": 1}
    assert len(read("screenspot_pro", source)) == 4


def test_screenspot_pros_fields_are_read_for_every_board() -> None:
    entry = {"img_filename": "a.png", "bbox": [0, 0, 0, 0], "instruction": "x", "img_size": [9, 9], "ui_type": "text"}
    assert label_of("osworld_g", entry | {"id": "a"}, 0, "f").boxes == ()
    assert label_of("screenspot_v2", entry | {"bbox": [1, 1, 2, 2]}, 0, "screenspot_web_v2").group == "web_text"
    with pytest.raises(RejectedRow, match="img_size"):
        label_of("screenspot_pro", {"bbox": [1, 2, 3, 4]}, 0, "f")


def test_a_protocol_names_its_board() -> None:
    assert (
        board_of("screenspot/uground") == "screenspot_v1" and board_of("osworld_g_refined/items") == "osworld_g_refined"
    )
    assert board_of("mind2web/uground") is None
