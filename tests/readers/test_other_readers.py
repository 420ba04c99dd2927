"""ScreenSpot in its forms, UGround's blocks, and a user's data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coepg_dagster.evaluation.score import score_steps
from coepg_dagster.readers.importing import Options, ReaderError, check_data, import_dataset, rejects

from .samples import IMAGE, load, picture, user_row, write_user_rows

LENIENT = Options(max_bad_share=1.0)
ITEM = {
    "img_filename": "a.png",
    "bbox": [10, 10, 20, 10],
    "instruction": "close",
    "data_type": "icon",
    "data_source": "ios",
}
PRO = {
    "img_filename": "a.png",
    "bbox": [10, 10, 30, 20],
    "instruction": "close",
    "application": "vivado",
    "id": "vivado_1",
    "platform": "windows",
    "img_size": [200, 100],
    "ui_type": "icon",
    "group": "CAD",
}


def folder_of(tmp_path: Path, name: str, entries: list[Any]) -> Path:
    (tmp_path / "images").mkdir(parents=True)
    (tmp_path / "images/a.png").write_bytes(picture(200, 100))
    lines = name.endswith(".jsonl")
    (tmp_path / name).write_text("\n".join(map(json.dumps, entries)) if lines else json.dumps(entries))
    return tmp_path / name


@pytest.mark.parametrize(
    ("name", "entry", "family", "step_id"),
    [
        ("screenspot_mobile.json", ITEM, "mobile_icon", "screenspot_mobile_00000"),
        ("screenspot_web_v2.json", ITEM, "web_icon", "screenspot_web_v2_00000"),
        (
            "re_gpt-4o.jsonl",
            {**ITEM, "platform": "desktop", "image": "a.png", "scale": 1.4},
            "desktop_icon",
            "re_gpt-4o_00000",
        ),
        ("vivado_windows.json", PRO, "CAD_icon", "vivado_1"),
    ],
)
def test_screenspot_in_its_forms(tmp_path: Path, name: str, entry: dict[str, Any], family: str, step_id: str) -> None:
    path = folder_of(tmp_path, name, [entry])
    import_dataset("screenspot", path, tmp_path / "out", Options(images=str(tmp_path / "images")))
    (step,) = load(tmp_path / "out").to_pylist()
    assert (step["family"], step["step_id"], step["boxes"]) == (family, step_id, [[10, 10, 30, 20]])
    assert (step["action_type"], step["goal"], step["episode_id"]) == ("CLICK", "close", "a.png")


def test_screenspot_of_the_hub_and_its_score(tmp_path: Path) -> None:
    sources = [
        ("ios", "text"),
        ("android", "icon"),
        ("windows", "text"),
        ("macos", "icon"),
        ("gitlab", "text"),
        ("shop", "icon"),
    ]
    rows = [
        {
            "file_name": f"{i}.png",
            "bbox": [0.1, 0.1, 0.3, 0.2],
            "instruction": "close",
            "data_type": kind,
            "data_source": source,
            "image": {"bytes": picture(200, 100), "path": None},
        }
        for i, (source, kind) in enumerate(sources)
    ]
    (tmp_path / "data").mkdir()
    schema = pa.schema([("file_name", pa.string()), ("bbox", pa.list_(pa.float64())), ("image", IMAGE)])
    schema = pa.unify_schemas(
        [schema, pa.schema([(k, pa.string()) for k in ("instruction", "data_type", "data_source")])]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "data/test-0.parquet")
    import_dataset("screenspot", tmp_path / "data", tmp_path / "out")
    steps = load(tmp_path / "out")
    assert steps["boxes"][0].as_py()[0] == pytest.approx([20, 10, 60, 20])
    points = {"x": [20.0, 21, 21, 21, 21, 0], "y": [10.0, 15, 15, 15, 15, 0]}
    predictions = pa.table({"step_id": steps["step_id"], "action_type": ["CLICK"] * 6, "value": [""] * 6, **points})
    strict = score_steps("screenspot/gui_r1", steps, predictions).metrics["acc"]
    laxer = score_steps("screenspot/uground", steps, predictions).metrics["acc"]
    assert (strict.micro, laxer.micro, laxer.macro) == pytest.approx((400 / 6, 500 / 6, 500 / 6))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"img_filename": "../x.png"}, "bad_path"),
        ({"img_filename": "missing.png"}, "bad_path"),
        ({"bbox": [10, 10, 20]}, "bad_field"),
        ({"instruction": None}, "bad_field"),
    ],
)
def test_bad_annotations(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = folder_of(tmp_path, "screenspot_mobile.json", [{**ITEM, **change}, ITEM])
    counts = import_dataset(
        "screenspot", path, tmp_path / "out", Options(images=str(tmp_path / "images"), max_bad_share=1)
    )
    assert dict(counts.rejected) == {reason: 1} and counts.steps["test"] == 1


def test_uground_blocks(tmp_path: Path) -> None:
    row = {
        "annotation_id": "t",
        "action_uid": "a",
        "task": "Rent a truck",
        "website": "budget",
        "operation": "CLICK",
        "value": "",
        "bbox": [[10, 900, 50, 20]],
        "previous_actions": ["[button]  Reservations -> HOVER"],
        "step": 1,
        "total_steps": 14,
        "split": "task",
        "blocks_path": "t_a",
        "target_blocks": {"1": [[10.0, 100.0, 50.0, 20.0]]},
    }
    (tmp_path / "blocks/t_a").mkdir(parents=True)
    (tmp_path / "blocks/t_a/1.png").write_bytes(picture(1280, 1000))
    lost = {**row, "action_uid": "b", "blocks_path": "t_b"}
    (tmp_path / "cross_task_blocks.jsonl").write_text("\n".join(map(json.dumps, [row, lost])))
    options = Options(images=str(tmp_path / "blocks"), max_bad_share=1.0)
    counts = import_dataset("mind2web_blocks", tmp_path, tmp_path / "out", options)
    (step,) = load(tmp_path / "out").to_pylist()
    assert (step["split"], step["view_rule"], step["boxes"]) == ("test_task", "block 1", [[10, 100, 60, 120]])
    assert dict(counts.rejected) == {"bad_path": 1}
    predictions = pa.table({"step_id": ["t_a"], "action_type": ["CLICK"], "value": [""], "x": [20.0], "y": [110.0]})
    result = score_steps("mind2web/uground", load(tmp_path / "out"), predictions)
    assert (result.rows, result.notes["padded"]) == (14, 13)
    assert result.metrics["step_sr"].micro == pytest.approx(100 / 14)


def test_user_data_is_read(tmp_path: Path) -> None:
    write_user_rows(tmp_path, [user_row(), user_row("s1", boxes=[], action_type="WAIT", point=[1, 2], episode_steps=2)])
    import_dataset("jsonl", tmp_path, tmp_path / "out")
    first, second = load(tmp_path / "out").to_pylist()
    assert (first["boxes"], first["point"], first["width"]) == ([[10, 10, 50, 30]], None, 100)
    assert (second["boxes"], second["point"], second["episode_steps"]) == ([], [1, 2], 2)
    report = check_data(tmp_path)
    assert report.ok and "2 steps in split train" in report.text()


def test_check_data_names_every_bad_line(tmp_path: Path) -> None:
    bad: list[tuple[Any, str]] = [
        ("{", "bad_json"),
        ("[]", "bad_field"),
        (user_row(), "duplicate_id"),
        (user_row("a", action_type="JUMP"), "unknown_action"),
        (user_row("b", boxes=[[50, 10, 10, 30]]), "box_without_area"),
        (user_row("c", boxes=[[0, 0, 500, 30]]), "box_outside_image"),
        (user_row("d", image="../secret.png"), "bad_path"),
        (user_row("e", surprise=1), "bad_field"),
        (user_row("f", step_index=True), "bad_field"),
        ({k: v for k, v in user_row("g").items() if k != "goal"}, "missing_column"),
    ]
    write_user_rows(tmp_path, [user_row(), *(row for row, _ in bad), user_row("z", split="test")])
    report = check_data(tmp_path)
    assert [(r["row"], r["reason"]) for r in report.rejects.to_pylist()] == [
        (str(i + 2), why) for i, (_, why) in enumerate(bad)
    ]
    assert not report.ok and "1 tasks are in more than one split" in report.text()
    assert f"{tmp_path / 'steps.jsonl'}: line 4: duplicate_id" in report.text()


def test_sources_that_are_none_are_named(tmp_path: Path) -> None:
    assert "no files" in check_data(tmp_path).text()
    with pytest.raises(ReaderError, match="no such file or folder"):
        import_dataset("android_control", tmp_path / "nowhere", tmp_path / "out")
    assert rejects(tmp_path).num_rows == 0
