"""What is read, what is stale, what must be made, and what may not be used."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.provenance import (
    CONTINUED,
    CROSSING,
    END_TO_END,
    LOOP,
    LOOP_RL,
    MODELS_OF_LOOP,
    SHARED,
    Asset,
    Init,
    NotUsable,
    Record,
    Ref,
    Stale,
    assert_usable,
    in_one_run,
    inputs_of,
    staleness,
    to_make,
)

K = 3
REFS = [*(Ref(asset) for asset in SHARED), *(Ref(asset, k) for k in range(K + 1) for asset in LOOP)]
CODE = dict.fromkeys((*SHARED, *LOOP), "1")


INITS: list[Init] = ["base", "previous"]


def record(ref: Ref, records: dict[Ref, Record], version: str = "a", init: Init = "base", **changes: object) -> Record:
    return Record(
        asset=ref.asset,
        iteration=ref.iteration,
        data_version=version,
        run_id="run",
        folder="folder",
        inputs=[records[used].as_input() for used in inputs_of(ref, init=init)],
        code_version="1",
        config={},
        seed=0,
        seconds=1,
        device="cpu",
        figures={},
    ).model_copy(update=changes)


def whole_loop(init: Init = "base") -> dict[Ref, Record]:
    """Every artifact of iterations 0..K, all of it current."""
    records: dict[Ref, Record] = {}
    for ref in REFS:
        records[ref] = record(ref, records, init=init)
    return records


def followers(of: set[Ref], init: Init = "base") -> set[Ref]:
    """`of` and everything that was made from it."""
    result = set(of)
    for ref in REFS:
        if any(used in result for used in inputs_of(ref, init=init)):
            result.add(ref)
    return result


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("ref", REFS, ids=str)
def test_inputs_come_earlier_and_nothing_before_iteration_0_is_read(ref: Ref, init: Init) -> None:
    place = {other: i for i, other in enumerate(REFS)}
    for used in inputs_of(ref, init=init):
        assert used.iteration is None or used.iteration >= 0
        assert place[used] < place[ref]
        if used.iteration is not None and used.iteration != ref.iteration:
            assert used.iteration == (ref.iteration or 0) - 1 and used.asset in CROSSING


def test_the_pools_of_iterations_0_and_1_hold_no_model_of_iteration_0() -> None:
    assert {str(ref) for ref in inputs_of(Ref("candidate_plans", 0))} == {"benchmark_steps", "open_models"}
    assert Ref("planner", 0) not in inputs_of(Ref("candidate_plans", 1))
    assert Ref("grounder", 0) not in inputs_of(Ref("verdicts", 1))
    assert {Ref("planner", 1), Ref("planner", 2)} <= set(inputs_of(Ref("candidate_plans", 2)))


@pytest.mark.parametrize("agent", ["decoupled", "end_to_end"])
def test_what_goes_on_from_the_models_before_reads_these_too_and_nothing_else_changes(agent: Any) -> None:
    for k in range(K + 1):
        for asset in END_TO_END if agent == "end_to_end" else LOOP:
            ref = Ref(asset, k)
            more = [Ref(CONTINUED[asset], k - 1)] if asset in CONTINUED and k > 1 else []
            assert inputs_of(ref, agent, "previous") == inputs_of(ref, agent) + more


def test_a_whole_loop_is_current() -> None:
    assert staleness(whole_loop(), CODE) == {} and to_make(whole_loop(), {}, K) == {}


@given(st.sets(st.sampled_from(REFS), min_size=1, max_size=3), st.sampled_from(INITS))
def test_what_follows_something_changed_is_stale_and_nothing_else(changed: set[Ref], init: Init) -> None:
    records = whole_loop(init)
    for ref in changed:
        records[ref] = records[ref].model_copy(update={"data_version": "b"})
    stale = staleness(records, CODE)
    direct = {ref for ref in REFS if any(used in changed for used in inputs_of(ref, init=init))}
    assert set(stale) == followers(direct, init)
    for ref, why in stale.items():
        assert why.root in direct and "is now b, it read a" in str(why)
        assert (str(why).startswith(str(why.root))) == (why.root != ref)


@given(st.sets(st.sampled_from(LOOP), min_size=1, max_size=2))
def test_changed_code_makes_it_stale_with_what_follows(assets: set[str]) -> None:
    stale = staleness(whole_loop(), CODE | dict.fromkeys(assets, "2"))
    changed = {ref for ref in REFS if ref.asset in assets and not (ref.iteration == 0 and ref.asset in MODELS_OF_LOOP)}
    assert set(stale) == followers(changed)
    assert all("code or configuration changed (1 → 2)" in stale[ref].cause for ref in changed)


@given(st.sets(st.sampled_from(REFS[len(SHARED) :]), max_size=4), st.integers(0, K), st.sampled_from(INITS))
def test_what_is_to_be_made_is_closed_and_in_order(missing: set[Ref], through: int, init: Init) -> None:
    records = {ref: made for ref, made in whole_loop(init).items() if ref not in missing}
    plan = to_make(records, staleness(records, CODE), through, init=init)
    chosen = {Ref(asset, k) for k, assets in plan.items() for asset in assets}
    assert chosen == {ref for ref in followers(missing, init) if ref.iteration is not None and ref.iteration <= through}
    assert list(plan) == sorted(plan) and all(plan.values())
    for assets in plan.values():
        assert assets == sorted(assets, key=LOOP.index)


@given(st.sets(st.sampled_from(REFS), max_size=4), st.sets(st.sampled_from(LOOP), max_size=1))
def test_lost_files_make_nothing_else_stale(gone: set[Ref], changed: set[str]) -> None:
    records, code = whole_loop(), CODE | dict.fromkeys(changed, "2")
    lost = dict.fromkeys(gone, "its files are gone")
    without, stale = staleness(records, code), staleness(records, code, lost=lost)
    assert set(stale) == set(without) | gone
    assert all(stale[ref] == without[ref] for ref in without)
    plan = to_make(records, stale, K)
    chosen = {Ref(asset, k) for k, assets in plan.items() for asset in assets}
    assert chosen == {ref for ref in stale if ref.iteration is not None}


@given(st.lists(st.sampled_from(LOOP), unique=True, min_size=1), st.integers(0, K))
def test_one_run_makes_nothing_from_what_it_may_make_stale(assets: list[Asset], k: int) -> None:
    assets.sort(key=LOOP.index)
    run = in_one_run(assets, k)
    assert run == assets[: len(run)] and run
    for asset in run:
        others = [used for used in inputs_of(Ref(asset, k)) if used.asset not in run and used.iteration == k]
        assert not followers({Ref(made, k) for made in run}) & set(others)
    assert in_one_run(LOOP, k) == list(LOOP)


def test_a_removed_input_is_a_cause() -> None:
    records = whole_loop()
    del records[Ref("dataset", 1)]
    assert staleness(records, CODE)[Ref("grounder", 2)].cause == "its input dataset[1] is gone"


ref = Ref("dataset", 1)
made = record(ref, whole_loop())
failed = made.model_copy(update={"failed_checks": ["has_rows"]})
old = Stale(ref, Ref("verdicts", 1), "code changed")


@pytest.mark.parametrize(
    ("there", "stale", "failed_in_backfill", "lost", "says"),
    [
        (None, None, None, None, "dataset[1] does not exist: materialize dataset[1] first"),
        (failed, old, "was not made by backfill b", "gone", "blocking check failed: has_rows"),
        (made, old, "was not made by backfill b", "gone", "dataset[1] was not made by backfill b"),
        (made, old, None, "its files are gone", "dataset[1]: its files are gone; materialize dataset[1] again"),
        (made, old, None, None, "dataset[1] is stale (verdicts[1]: code changed): materialize iteration 1 first"),
    ],
)
def test_what_may_not_be_used_says_why_and_what_to_do(
    there: Record | None, stale: Stale | None, failed_in_backfill: str | None, lost: str | None, says: str
) -> None:
    with pytest.raises(NotUsable) as refused:
        assert_usable(ref, there, stale, failed_in_backfill, False, lost)
    assert says in str(refused.value) and "materialize" in str(refused.value)


@given(st.sets(st.sampled_from(REFS), min_size=1, max_size=3), st.sets(st.sampled_from(LOOP), max_size=2))
def test_what_a_refusal_wants_made_first_is_made_of_nothing_stale(changed: set[Ref], assets: set[str]) -> None:
    records = whole_loop()
    for ref in changed:
        records[ref] = records[ref].model_copy(update={"data_version": "b"})
    stale = staleness(records, CODE | dict.fromkeys(assets, "2"))
    for ref, why in stale.items():
        first, k = why.root.iteration, ref.iteration
        assert not any(used in stale and used.iteration != first for used in inputs_of(why.root))
        wanted = f"iteration {k}" if first == k else f"iterations {first} to {k}"
        with pytest.raises(NotUsable, match=f": materialize {wanted} first"):
            assert_usable(ref, records[ref], why, None, False)


@pytest.mark.parametrize("ref", [Ref("open_models"), Ref("grounder", 1)], ids=str)
def test_a_stale_artifact_without_an_iteration_is_named(ref: Ref) -> None:
    records = whole_loop()
    stale = staleness(records, CODE | {"open_models": "2"})
    with pytest.raises(NotUsable, match=": materialize open_models first"):
        assert_usable(ref, records[ref], stale[ref], None, False)


def test_only_staleness_can_be_accepted() -> None:
    assert assert_usable(ref, made, old, None, True) is made
    for there, failed_in_backfill, lost in (
        (None, None, None),
        (failed, None, None),
        (made, "was not made here", None),
        (made, None, "gone"),
    ):
        with pytest.raises(NotUsable):
            assert_usable(ref, there, old, failed_in_backfill, True, lost)


@pytest.mark.parametrize("init", INITS)
def test_where_the_grounder_learns_by_grpo_all_that_reads_phi_reads_that(init: Init) -> None:
    for asset in LOOP_RL:
        for k in range(K + 1):
            plain = inputs_of(Ref(asset if asset != "grounder_rl" else "planner_sft", k), init=init)
            read = inputs_of(Ref(asset, k), init=init, phi="grounder_rl")
            if asset == "grounder_rl":
                before = [Ref("dataset", k - 1)] if k else []
                assert read == [Ref("grounder", k), *before]
            else:
                assert read == [Ref("grounder_rl", one.iteration) if one.asset == "grounder" else one for one in plain]
    assert (Ref("grounder_rl", 1) in inputs_of(Ref("grounder", 2), init=init, phi="grounder_rl")) == (
        init == "previous"
    )


def test_without_its_grpo_the_loop_knows_no_such_asset() -> None:
    read = {used.asset for asset in LOOP for k in range(K + 1) for used in inputs_of(Ref(asset, k))}
    assert "grounder_rl" not in {*LOOP, *read} and set(LOOP_RL) == {*LOOP, "grounder_rl"}


def test_when_the_grpo_of_a_grounder_is_gone_all_that_reads_phi_is_made_again() -> None:
    refs = [*(Ref(asset) for asset in SHARED), *(Ref(asset, k) for k in range(3) for asset in LOOP_RL)]
    records = {ref: record(Ref("benchmark_steps"), {}) for ref in refs if ref != Ref("grounder_rl", 1)}
    todo = to_make(records, {}, 2, LOOP_RL, phi="grounder_rl")
    assert todo == {1: [asset for asset in LOOP_RL if asset not in ("planner_sft", "grounder")], 2: list(LOOP_RL)}
    assert in_one_run(todo[1], 1, LOOP_RL, phi="grounder_rl") == todo[1]
