"""What auditors mark: what D_k leaves out, what becomes stale, and what a file of marks takes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.artifacts import DATASET, DECISIONS
from coepg_dagster.auditing.marks import (
    MARKS,
    VETOES,
    Mark,
    NotMarked,
    add_mark,
    marking,
    read_marks,
    same_plan,
    shown_marks,
    vetoes,
    vetoes_changed,
)
from coepg_dagster.auditing.text import trace_text
from coepg_dagster.auditing.trace import trace, what_to_mark
from coepg_dagster.provenance import Ref, staleness
from tests.auditing.loop import LOOP_NAME, Hand
from tests.project import REPOSITORY, make_project, tell

SAID = {"mark": "veto", "by": "anna", "reason": "names the wrong button"}


def mark(hand: Hand, k: int, what: str, **said: Any) -> Mark:
    return add_mark(file_of(hand), marking(SAID | said), k, *what_to_mark(hand.archive, LOOP_NAME, k, what))


def file_of(hand: Hand) -> Path:
    return hand.store.root / LOOP_NAME / MARKS


def plans(hand: Hand, k: int) -> list[str]:
    file = hand.store.root / hand.newest[Ref("dataset", k)].folder / DATASET
    return list(pq.read_table(file)["plan"].to_pylist())


def decision(hand: Hand, k: int, candidate: str) -> str:
    file = hand.store.root / hand.newest[Ref("dataset", k)].folder / DECISIONS
    table = pq.read_table(file, filters=[("candidate_id", "==", candidate)])
    return str(table["decision"][0].as_py())


def changed(hand: Hand) -> dict[Ref, str]:
    marks = read_marks(file_of(hand))
    found = {k: vetoes_changed(hand.newest[Ref("dataset", k)], vetoes(marks, k)) for k in (0, 1)}
    return {Ref("dataset", k): why for k, why in found.items() if why is not None}


def test_a_veto_counts_from_its_iteration_on_and_a_withdrawal_restores_the_version(hand: Hand) -> None:
    before = [hand.newest[Ref("dataset", k)].data_version for k in (0, 1)]
    assert plans(hand, 0) == ["one", "two"] and plans(hand, 1) == ["one more", "two"]
    mark(hand, 1, "1")  # a row that D_1 carried over
    assert list(changed(hand)) == [Ref("dataset", 1)]
    assert hand.dataset(0).data_version == before[0] and VETOES not in hand.newest[Ref("dataset", 0)].figures
    hand.dataset(1)
    assert plans(hand, 1) == ["one more"] and changed(hand) == {}
    mark(hand, 1, "0")
    hand.dataset(1)
    assert plans(hand, 1) == ["one"]  # carried over in its place
    assert decision(hand, 1, "s#planner_1#0") == "vetoed"
    assert hand.newest[Ref("dataset", 1)].figures[VETOES]["left_out"] == 1
    mark(hand, 1, "s#planner_1#0", mark="withdraw")
    mark(hand, 0, "t#open#0", mark="flag")  # the last word on that plan, for D_1 too
    assert changed(hand)[Ref("dataset", 1)].endswith("→ none)")
    for version in (0, 1):
        hand.dataset(version)
    assert [hand.newest[Ref("dataset", k)].data_version for k in (0, 1)] == before and changed(hand) == {}


def test_a_vetoed_step_leaves_out_every_plan_that_passed_the_gate(hand: Hand) -> None:
    mark(hand, 0, "t#open#1", whole_step=True)  # its answer is no plan
    hand.dataset(0)
    assert plans(hand, 0) == ["one"]
    assert (decision(hand, 0, "t#open#0"), decision(hand, 0, "t#open#1")) == ("vetoed", "unparsed")
    with pytest.raises(NotMarked, match="only its whole step can be marked"):
        mark(hand, 0, "t#open#1")


def test_what_was_made_from_a_d_k_with_other_vetoes_is_stale(hand: Hand) -> None:
    code = dict.fromkeys(("dataset",), "1")
    assert staleness(hand.newest, code, changed=changed(hand)) == {}  # type: ignore[arg-type]
    mark(hand, 0, "0")
    stale = {str(ref): str(why) for ref, why in staleness(hand.newest, code, changed=changed(hand)).items()}  # type: ignore[arg-type]
    assert stale["dataset[0]"].startswith("its vetoes changed (none → ")
    assert stale["planner_sft[1]"] == f"dataset[0]: {stale['dataset[0]']}" and "verdicts[0]" not in stale
    mark(hand, 0, "0", mark="flag")
    assert changed(hand) == {}


def test_the_trace_says_who_vetoed_what_and_whether_it_counts(hand: Hand) -> None:
    row = trace(hand.archive, LOOP_NAME, 1, "0")["row"]["id"]
    mark(hand, 1, row, reason="<b>x</b>")
    pending = trace(hand.archive, LOOP_NAME, 1, row)
    assert [(one["applied"], one["counts"]) for one in pending["marks"]] == [(False, True)]
    assert "this version was made without it; it counts from D_1 on" in trace_text(pending)
    hand.dataset(1)
    text = trace_text(trace(hand.archive, LOOP_NAME, 1, "s#planner_1#0"))
    assert "none: vetoed" in text and f"by anna, {pending['marks'][0]['at']}, on {row}: <b>x</b>" in text
    assert "parent    vetoes " in text
    mark(hand, 1, "s#planner_1#0", mark="withdraw")
    assert "(withdrawn since this version was made)" in trace_text(trace(hand.archive, LOOP_NAME, 1, "s#planner_1#0"))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["veto", "flag", "withdraw"]),
            st.integers(0, 3),
            st.sampled_from("ab"),
            st.sampled_from(["p", "P", None]),
        ),
        max_size=12,
    )
)
def test_the_last_word_counts_and_a_flag_changes_no_data(said: list[tuple[Any, int, str, str | None]]) -> None:
    marks = [
        Mark(mark=kind, by="x", reason="y", at="2030-01-01T00:00:00Z", iteration=k, step_id=s, plan=plan, of="r")
        for kind, k, s, plan in said
    ]
    for k in range(4):
        read = vetoes(marks, k)
        for step in "ab":
            about = {
                key: [m.mark for m in marks if m.iteration <= k and m.key == (step, key)]
                for key in (None, same_plan("p"))
            }
            expected = any(words[-1:] == ["veto"] for words in about.values())
            assert read.covers(step, "p") == read.covers(step, "P") == expected
        taken_back = [one if one.mark != "flag" else one.model_copy(update={"mark": "withdraw"}) for one in marks]
        assert vetoes(taken_back, k).version == read.version and (read.version is None) == (not read.keys)


@pytest.mark.parametrize(
    "said",
    [
        {"reason": ""},
        {"reason": " "},
        {"reason": "x" * 1001},
        {"reason": "two\nlines"},
        {"reason": "\x1b[31mred"},
        {"reason": "a\u2028b"},
        {"reason": "\ud800"},
        {"by": ""},
        {"by": "x" * 101},
        {"by": 7},
        {"mark": "delete"},
        {"whole_step": "perhaps"},
        {"step_id": "s"},
    ],
)
def test_what_no_mark_can_be(said: dict[str, Any]) -> None:
    with pytest.raises(NotMarked, match=f"the mark is refused: {next(iter(said))}: "):
        marking(SAID | said)


def test_a_file_of_marks_only_grows_whoever_writes(tmp_path: Path) -> None:
    file = tmp_path / "loop" / MARKS
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: add_mark(file, marking(SAID), 0, f"s{i}", "plan", "r"), range(24)))
    assert {one.step_id for one in read_marks(file)} == {f"s{i}" for i in range(24)}
    written = file.read_bytes()
    file.write_bytes(written.removesuffix(b"\n"))  # as some editors leave it
    add_mark(file, marking(SAID | {"mark": "withdraw"}), 3, "s1", "PLAN", "r")
    assert file.read_bytes().startswith(written) and len(read_marks(file)) == 25
    with pytest.raises(NotMarked, match=r"nothing to withdraw; .* take the `row` that `coepg marks` shows"):
        add_mark(file, marking(SAID | {"mark": "withdraw"}), 3, "s1", "plan", "r")


@pytest.mark.parametrize("line", [b"{", b"[]", b"\xff", json.dumps(SAID).encode(), b'{"mark": "veto"}'])
def test_a_damaged_line_is_named_and_takes_no_more(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / MARKS
    add_mark(file, marking(SAID), 0, "s", "plan", "r")
    file.write_bytes(file.read_bytes() + line + b"\n")
    for act in (lambda: read_marks(file), lambda: add_mark(file, marking(SAID), 0, "s", "other", "r")):
        with pytest.raises(NotMarked, match=rf"{MARKS}:2 is no mark .*correct the line"):
            act()


def test_a_version_is_shown_with_the_marks_that_it_read(hand: Hand) -> None:
    mark(hand, 0, "0")
    hand.dataset(0)
    mark(hand, 0, "s#open#0", mark="withdraw")
    mark(hand, 0, "t#open#0", mark="flag")
    mark(hand, 1, "s#planner_1#0")
    shown = shown_marks(read_marks(file_of(hand)), hand.newest[Ref("dataset", 0)], 0)
    assert [(one["plan"], one["mark"], one["applied"], one["counts"]) for one in shown] == [
        ("one", "veto", True, False),
        ("two", "flag", False, True),
    ]


def test_the_command_lists_what_counts(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", REPOSITORY / "experiments" / "sandbox.yaml")
    file = project / "store" / "sandbox" / "s13" / MARKS
    add_mark(file, marking(SAID), 1, "s1", "<CLICK>\nthe \x1b[31mbutton", "row1")
    add_mark(file, marking(SAID | {"mark": "flag", "whole_step": True}), 2, "s2", "a plan", "row2")
    add_mark(file, marking(SAID), 1, "s3", "another plan", "row3")
    add_mark(file, marking(SAID | {"mark": "withdraw"}), 1, "s3", "another plan", "row3")
    code, out, _ = tell(project, "marks", "sandbox", "--json")
    found = json.loads(out)["marks"]
    assert code == 0 and [(one["step_id"], one["mark"], one["iteration"]) for one in found] == [
        ("s1", "veto", 1),
        ("s2", "flag", 2),
    ]
    out = tell(project, "marks", "sandbox")[1]
    assert r"<CLICK>\nthe \u001b[31mbutton" in out and "the whole step" in out and "anna" in out and "s3" not in out
    assert "row1" in out and "row2" in out, "by which a mark is withdrawn, since numbers of rows change"
