"""The split rule: words, families, seeds, and the assertion that holds them apart."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from coepg_dagster.experiment.schema import Benchmark
from coepg_dagster.sandbox.miniwob.splits import (
    GENERAL_PAGE,
    INTERFACE,
    KNOWN_FAMILIES,
    SEEDS,
    SPLITS,
    UNSEEN_FAMILIES,
    SplitError,
    StepKey,
    assert_disjoint,
    episode_wanted,
    goal_wanted,
    held_out,
    is_held_out_word,
    words,
)

SEEN = "karrie"  # not held out
UNSEEN = "kenda"  # held out


def key(split: str = "train", **changes: object) -> StepKey:
    seed = SEEDS[split].start + 5  # type: ignore[index]
    family = UNSEEN_FAMILIES[0] if split == "test_family" else "click-link"
    name = UNSEEN if split == "test_text" else SEEN
    made = StepKey(
        step_id=f"miniwob/{family}/{seed}/0",
        split=split,
        episode_id=f"miniwob/{family}/{seed}",
        family=family,
        seed=seed,
        step_index=0,
        goal=f'Click on the link "{name}".',
        history=(),
        names=(name,),
        value="",
        page=f"{split}{seed}",
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_the_two_words_of_this_file_are_of_the_two_classes() -> None:
    assert not is_held_out_word(SEEN)
    assert is_held_out_word(UNSEEN)


@given(st.text(alphabet=st.characters(categories=("Ll", "Lu", "Nd")), min_size=3, max_size=12))
def test_case_and_punctuation_do_not_change_the_class(word: str) -> None:
    assert held_out(word) == held_out(f'"{word.lower()}",')


@given(st.lists(st.text(min_size=0, max_size=12), max_size=5))
def test_an_episode_belongs_to_exactly_one_of_test_text_and_the_others(targets: list[str]) -> None:
    in_text = episode_wanted("test_text", targets)
    assert all(episode_wanted(s, targets) != in_text for s in ("pretrain", "train", "validation", "test_seed"))
    assert episode_wanted("test_family", targets)
    assert in_text == any(held_out(text) for text in targets)


@given(st.text(max_size=60))
def test_a_goal_is_wanted_for_training_only_without_held_out_words(goal: str) -> None:
    assert goal_wanted("train", goal) == (not held_out(goal))
    assert goal_wanted("test_text", goal)


def test_about_one_word_in_eight_is_held_out() -> None:
    share = sum(is_held_out_word(f"word{i}") for i in range(4000)) / 4000
    assert 0.1 < share < 0.15


def test_interface_words_and_short_words_are_never_held_out() -> None:
    assert words("Submit OK Tab #3 in ut") == []
    assert not held_out(" ".join(INTERFACE))


def test_seed_ranges_do_not_meet() -> None:
    ranges = sorted(SEEDS.values(), key=lambda r: r.start)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(ranges))
    assert set(SPLITS) | {"pretrain"} == set(SEEDS)
    with pytest.raises(ValidationError, match=f"it has {', '.join(SPLITS)}"):
        Benchmark(reader="miniwob", path=Path("data"), train="pretrain", test=["test_seed"], protocol="miniwob/point")


def test_families_are_apart_and_all_have_an_oracle() -> None:
    pytest.importorskip("selenium")
    from coepg_dagster.sandbox.miniwob.oracles import ORACLES

    assert not set(KNOWN_FAMILIES) & set(UNSEEN_FAMILIES)
    assert {*KNOWN_FAMILIES, *UNSEEN_FAMILIES, GENERAL_PAGE} == set(ORACLES)
    assert len(KNOWN_FAMILIES) >= 20
    assert len(UNSEEN_FAMILIES) >= 6


def test_one_good_step_of_each_split_passes_and_is_counted() -> None:
    counts = assert_disjoint(key(split) for split in ("pretrain", *SPLITS))
    assert counts["test_text"] == {"steps": 1, "episodes": 1, "families": 1}
    assert set(counts) == {"pretrain", *SPLITS}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (key(split="train", family=UNSEEN_FAMILIES[0]), "does not belong in train"),
        (key(split="test_family", family="click-link"), "does not belong in test_family"),
        (key(seed=SEEDS["test_seed"].start), "is not one of train"),
        (key(names=(SEEN, UNSEEN)), f"held-out word '{UNSEEN}'"),
        (key(value=UNSEEN.upper()), f"held-out word '{UNSEEN}'"),
        (key(goal=f"Type {UNSEEN}"), f"held-out word '{UNSEEN}'"),
        (key(history=(f"[link] {UNSEEN} -> CLICK",)), f"held-out word '{UNSEEN}'"),
        (key(split="test_text", names=(SEEN,)), "asks for a held-out word"),
        (dataclasses.replace(key(), split="test"), "unknown split 'test'"),
    ],
)
def test_an_offending_step_is_named(row: StepKey, complaint: str) -> None:
    with pytest.raises(SplitError, match=complaint) as caught:
        assert_disjoint([row])
    assert row.step_id in str(caught.value)


def test_two_steps_that_do_not_go_together_are_named() -> None:
    with pytest.raises(SplitError, match="occurs twice"):
        assert_disjoint([key(), key()])
    with pytest.raises(SplitError, match="its episode is in train and in validation"):
        assert_disjoint([key(), dataclasses.replace(key("validation"), episode_id=key().episode_id)])
    with pytest.raises(SplitError, match="the same goal and screenshot begin"):
        assert_disjoint([key(), key("test_seed", page=key().page)])
    assert_disjoint([key(), key(step_id="miniwob/click-link/6/0", episode_id="miniwob/click-link/6", seed=6)])
