"""Where rows and dropped candidates came from, and what of that was tampered with."""

from __future__ import annotations

import math
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coepg_dagster.artifacts import CURATION, DATASET, STEPS, all_steps, write_steps, write_table
from coepg_dagster.auditing.archive import Archive, NotFound
from coepg_dagster.auditing.text import trace_text
from coepg_dagster.auditing.trace import Place, find_row, parse_place, trace, trace_row
from coepg_dagster.provenance import Asset, Ref
from coepg_dagster.steps import CURATION_SCHEMA
from tests.auditing.loop import LOOP_NAME, Hand
from tests.pools.tables import verdicts

KEYS = ["row", "step", "plan", "planner", "verdicts", "rule", "marks", "dropped", "trained", "parents"]
ABOVE_D0 = ["verdicts[0]", "candidate_plans[0]", "benchmark_steps", "open_models"]
ABOVE_D1 = ["verdicts[1]", "candidate_plans[1]", "planner[1]", "grounder[1]", "planner_sft[1]", "dataset[0]", *ABOVE_D0]


def names(entries: list[dict[str, object]]) -> list[str]:
    return [str(Ref(one["asset"], one["iteration"])) for one in entries]  # type: ignore[arg-type]


def test_a_row_by_its_number(hand: Hand) -> None:
    traced = trace(hand.archive, LOOP_NAME, 1, "0")
    assert list(traced) == KEYS
    assert (traced["row"]["made_in"], traced["row"]["decision"], traced["row"]["tampered"]) == (1, "kept", [])
    assert (traced["step"]["step_id"], traced["plan"]["plan"]) == ("s", "one more")
    planner = traced["planner"]
    weights = hand.newest[Ref("planner", 1)].data_version
    assert (planner["name"], planner["iteration"], planner["weights"], planner["seed"]) == ("planner_1", 1, weights, 1)
    by_judge, by_grounder = traced["verdicts"]
    assert (by_judge["name"], by_judge["weights"], by_judge["iteration"]) == ("judge", "of judge", None)
    assert by_grounder["weights"] == hand.newest[Ref("grounder", 1)].data_version
    assert by_judge["point"] == [15.0, 15.0] and by_judge["confidence"] == pytest.approx(math.exp(-0.1))
    assert (traced["rule"]["rule"], traced["rule"]["hits"], traced["rule"]["answered"]) == ("any", 2, 2)
    assert [(one["candidate_id"], one["reason"]) for one in traced["dropped"]] == [("s#planner_1#1", "not_verified")]
    assert traced["trained"] == []  # nothing of iteration 2 is there
    assert names(traced["parents"]) == ABOVE_D1
    assert traced["parents"][-1]["models"]["verifiers/judge"] == {"checkpoint": "models/judge", "version": "of judge"}


def test_a_carried_row_keeps_its_id_and_leads_to_where_it_was_made(hand: Hand) -> None:
    first = trace(hand.archive, LOOP_NAME, 0, "1")
    carried = trace(hand.archive, LOOP_NAME, 1, "1")
    assert carried == first == trace(hand.archive, LOOP_NAME, 1, first["row"]["id"])
    assert trace_row(hand.archive, *find_row(hand.archive, first["row"]["id"])) == first
    assert (first["step"]["step_id"], first["row"]["made_in"]) == ("t", 0)
    datasets = [(one["iteration"], one["number"], one["carried_over"]) for one in first["row"]["datasets"]]
    assert datasets == [(0, 1, False), (1, 1, True)]
    assert names(first["trained"]) == ["planner_sft[1]", "grounder[1]", "planner[1]"]
    assert names(first["parents"]) == ABOVE_D0


def test_a_row_that_a_data_strategy_left_out_says_so(hand: Hand) -> None:
    row = trace(hand.archive, LOOP_NAME, 0, "1")["row"]
    for asset, row_id, step_id in (
        ("grounder", row["id"], "t"),
        ("planner", None, "t"),
        ("planner_sft", "r-other", "t"),
    ):
        table = [{"row_id": row_id, "step_id": step_id, "strategy": "seed_rules", "reason": "generic_plan"}]
        folder = hand.store.root / hand.newest[Ref(asset, 1)].folder  # type: ignore[arg-type]
        write_table(pa.Table.from_pylist(table, CURATION_SCHEMA), folder / CURATION)
    traced = trace(hand.archive, LOOP_NAME, 0, "1")
    assert [one["how"] for one in traced["trained"]] == [
        "plans and actions (SFT)",
        "left out by seed_rules: generic_plan",
        "left out by seed_rules: generic_plan",
    ]
    assert "grounder[1]" in trace_text(traced) and "left out by seed_rules: generic_plan" in trace_text(traced)


def test_a_planner_that_was_asked_about_other_steps_was_not_trained_on_the_row(hand: Hand) -> None:
    records = hand.archive.records
    unseen = [
        record.model_copy(update={"config": {"prompts": "unseen"}}) if record.asset == "planner" else record
        for record in records
    ]
    archive = Archive(unseen, hand.archive.store, hand.archive.root)
    assert names(trace(archive, LOOP_NAME, 0, "1")["trained"]) == ["planner_sft[1]", "grounder[1]"]


def test_a_model_of_another_loop_that_was_trained_on_the_row_is_named_with_its_loop(hand: Hand) -> None:
    records = [
        record.model_copy(update={"folder": f"overlay/s1/grounder/1/{record.data_version}"})
        if record.ref == Ref("grounder", 1)
        else record
        for record in hand.archive.records
    ]
    traced = trace(Archive(records, hand.archive.store, hand.archive.root), LOOP_NAME, 0, "1")
    assert {one["asset"]: one["loop"] for one in traced["trained"]} == {
        "planner_sft": LOOP_NAME,
        "planner": LOOP_NAME,
        "grounder": "overlay/s1",
    }
    of_another = [line for line in trace_text(traced).splitlines() if line.startswith("trained") and " of " in line]
    assert len(of_another) == 1 and "of overlay/s1: plans and boxes" in of_another[0]


def test_ids_last_when_the_same_is_made_again(hand: Hand) -> None:
    before = [trace(hand.archive, LOOP_NAME, 1, str(n))["row"]["id"] for n in range(2)]
    hand.data(1)
    assert [trace(hand.archive, LOOP_NAME, 1, str(n))["row"]["id"] for n in range(2)] == before


def test_an_older_version_is_traced_to_what_it_was_made_from(hand: Hand) -> None:
    old = trace(hand.archive, LOOP_NAME, 1, "0")
    hand.model("grounder", 1, "trained otherwise")
    hand.data(1, given=hand_verdicts(hand, "s#planner_1#0", False))
    assert trace(hand.archive, LOOP_NAME, 1, "0")["row"]["id"] != old["row"]["id"]
    again = trace(hand.archive, LOOP_NAME, 1, old["row"]["id"])
    assert again["verdicts"][1]["weights"] == old["verdicts"][1]["weights"]
    assert again["row"]["datasets"][0]["current"] is False and old["row"]["datasets"][0]["current"] is True


def hand_verdicts(hand: Hand, candidate_id: str, hit: bool) -> pa.Table:
    """The verdicts of iteration 1 with others on one candidate."""
    rows = pq.read_table(hand.store.root / hand.newest[Ref("verdicts", 1)].folder / "verdicts.parquet").to_pylist()
    changed = [row | {"hit": hit} if row["candidate_id"] == candidate_id else row for row in rows]
    return verdicts(*changed)


def test_dropped_candidates_say_why(hand: Hand) -> None:
    duplicate = trace(hand.archive, LOOP_NAME, 0, "s#open#1")
    row = trace(hand.archive, LOOP_NAME, 0, "0")
    assert (duplicate["row"]["id"], duplicate["row"]["decision"]) == (None, "duplicate")
    assert duplicate["verdicts"] == row["verdicts"] and duplicate["trained"] == []
    assert [(one["reason"], one["duplicate_of_row"]) for one in row["dropped"]] == [("duplicate", row["row"]["id"])]
    unread = trace(hand.archive, LOOP_NAME, 0, "t#open#1")
    assert (unread["row"]["decision"], unread["plan"]["plan"], unread["verdicts"]) == ("unparsed", None, [])
    failed = trace(hand.archive, LOOP_NAME, 1, "t#planner_1#0")
    assert [(one["hit"], one["failure"]) for one in failed["verdicts"]] == [(False, None), (False, "out of memory")]
    assert (failed["rule"]["hits"], failed["rule"]["answered"]) == (0, 1)
    for traced in (duplicate, unread, failed, row):
        text = trace_text(traced)
        assert traced["row"]["decision"] in text and traced["plan"]["text"] in text and "open_models" in text
    assert trace(hand.archive, LOOP_NAME, 0, "s#open#0") == row


def test_a_screenshot_that_was_replaced_is_named_with_its_row(hand: Hand) -> None:
    file = hand.store.root / hand.newest[Ref("benchmark_steps")].folder / STEPS
    table = all_steps(file)
    shots = table["screenshot"].to_pylist()
    shots[0] = shots[2]
    at = table.schema.get_field_index("screenshot")
    other = file.with_name("other")  # the table's memory is the file
    write_steps(table.set_column(at, table.schema.field(at), pa.array(shots)), other, ["train", "test_seed"])
    other.rename(file)
    changed = trace(hand.archive, LOOP_NAME, 1, "0")["row"]
    assert any(f"row {changed['id']} (step s): its screenshot was" in line for line in changed["tampered"])
    [only] = trace(hand.archive, LOOP_NAME, 1, "1")["row"][
        "tampered"
    ]  # its own screenshot is as it was, but the file is not
    assert "benchmark_steps" in only and f"{STEPS} has other content than when it was made" in only


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("store/hand/s1/planner/1/*/model.safetensors", "planner[1]"),
        ("store/hand/s1/grounder/1/*/model.safetensors", "grounder[1]"),
        ("models/judge/model.safetensors", "verifiers/judge: models/judge/model.safetensors has other content"),
    ],
)
def test_a_model_that_was_changed_by_one_bit_is_named(hand: Hand, place: str, words: str) -> None:
    [file] = hand.root.glob(place)
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)
    [line] = trace(hand.archive, LOOP_NAME, 1, "0")["row"]["tampered"]
    assert words in line and "model.safetensors has other content than when it was made" in line


@pytest.mark.parametrize(("asset", "file"), [("verdicts", "verdicts.parquet"), ("benchmark_steps", STEPS)])
def test_a_table_that_cannot_be_read_any_more_is_named(hand: Hand, asset: Asset, file: str) -> None:
    record = hand.newest[Ref(asset, 1 if asset == "verdicts" else None)]
    (hand.store.root / record.folder / file).write_bytes(b"nonsense")
    with pytest.raises(NotFound, match=f"{file} cannot be read.*{file} has other content than when it was made"):
        trace(hand.archive, LOOP_NAME, 1, "0")


def test_files_that_went_or_came_are_named(hand: Hand) -> None:
    folder = hand.store.root / hand.newest[Ref("planner", 1)].folder
    (folder / "adapter.safetensors").write_text("more")
    (folder / "model.safetensors").unlink()
    tampered = trace(hand.archive, LOOP_NAME, 1, "0")["row"]["tampered"]
    assert any("model.safetensors is gone" in line for line in tampered)
    assert any("adapter.safetensors was added later" in line for line in tampered)


def test_a_row_that_was_rewritten_is_named(hand: Hand) -> None:
    file = hand.store.root / hand.newest[Ref("dataset", 1)].folder / DATASET
    table = pq.read_table(file)
    plans = ["another plan", *table["plan"].to_pylist()[1:]]
    pq.write_table(table.set_column(table.schema.get_field_index("plan"), "plan", pa.array(plans)), file)
    row = trace(hand.archive, LOOP_NAME, 1, "0")["row"]
    assert any(
        f"row {row['id']} (step s): its plan was 'another plan', and is 'one more'" in x for x in row["tampered"]
    )


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("r0123456789abcdef", Place("r0123456789abcdef")),
        ("sandbox@2#7", Place("7", "sandbox@2")),
        ("sandbox/s13@0#miniwob/a/1/0#planner_a#1", Place("miniwob/a/1/0#planner_a#1", "sandbox/s13@0")),
    ],
)
def test_places(text: str, place: Place) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize("text", ["", "sandbox", "sandbox@1", "sandbox@1#", "r12"])
def test_what_names_no_row_is_refused(text: str) -> None:
    with pytest.raises(NotFound, match="names no row: give a row id"):
        parse_place(text)


def test_what_is_not_there_says_so(hand: Hand) -> None:
    with pytest.raises(NotFound, match=r"D_1 of hand/s1 has 2 rows: the last one is hand/s1@1#1"):
        trace(hand.archive, LOOP_NAME, 1, "2")
    with pytest.raises(NotFound, match="neither a row nor a candidate 'nobody'"):
        trace(hand.archive, LOOP_NAME, 1, "nobody")
    with pytest.raises(NotFound, match="run `coepg evolve hand/s1 --through 5` first"):
        trace(hand.archive, LOOP_NAME, 5, "0")
    with pytest.raises(NotFound, match="no D_k in the store holds row"):
        find_row(hand.archive, "r" + 16 * "0")
    shutil.rmtree(hand.store.root / hand.newest[Ref("verdicts", 0)].folder)
    with pytest.raises(NotFound, match=r"verdicts\[0\] .* is not in the store any more"):
        trace(hand.archive, LOOP_NAME, 0, "0")
