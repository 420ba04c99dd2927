from __future__ import annotations

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coepg_dagster import prompts
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.sandbox.pretraining import tokenizer as tokens

TOKENIZER = tokens.fit(['Click on the "previous" button.', "Select Onida from the list.", "previous"] * 3)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
WORD = st.text("abcXYZ0189", min_size=1, max_size=12)


def ids(text: str) -> list[int]:
    encoded: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return encoded


@given(TEXT)
@settings(max_examples=100, deadline=None)
def test_decoding_gives_the_text_back(text: str) -> None:
    assert TOKENIZER.decode(ids(text)) == text


@given(TEXT, WORD, st.sampled_from(["CLICK", "TYPE", "SELECT"]))
@settings(deadline=None)
def test_answers_survive(plan: str, value: str, action_type: str) -> None:
    answer = prompts.planner_answer(plan, action_type, value)
    assert json.loads(TOKENIZER.decode(ids(answer))) == {"plan": plan, "action_type": action_type, "value": value}


@pytest.mark.parametrize("number", [0, 7, 10, 99, 100, 167, 223])
def test_whole_numbers_are_single_tokens(number: int) -> None:
    assert len(ids(str(number))) == 1
    assert len(ids(prompts.grounder_answer(number, 223))) == 5


@given(WORD)
@settings(deadline=None)
def test_a_word_is_spelled_the_same_wherever_it_stands(word: str) -> None:
    assume(word not in tokens.FRAME_WORDS)
    alone = ids(word)
    for before, after in (('Click on "', '" now'), ("Type ", "."), ('", "value": "', '"}')):
        whole = ids(before + word + after)
        start = len(ids(before))
        assert whole[start : start + len(alone)] == alone


def test_scaffold_and_frequent_words_are_short() -> None:
    assert len(ids('{"plan": "previous", "action_type": "CLICK", "value": ""}')) == 6
    assert len(ids("press on the previous button")) == 6


def test_words_of_few_texts_are_spelled() -> None:
    tokenizer = tokens.fit(["seldom often", "often"], least=2)
    assert "often" in tokenizer.get_vocab()
    assert "seldom" not in tokenizer.get_vocab()


def test_a_vocabulary_too_small_is_refused() -> None:
    with pytest.raises(ExperimentError, match="fewer than its fixed part"):
        tokens.fit([], size=300)


def test_chat_puts_the_image_first_and_marks_the_answer() -> None:
    chat = prompts.planner_messages("Click Next", [], "compact") + prompts.assistant("yes")
    text = TOKENIZER.apply_chat_template(chat, tokenize=False)
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Task: Click Next\nDone: none<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n"
    )
    encoded = TOKENIZER.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    kept = [i for i, mark in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mark]
    assert TOKENIZER.decode(kept) == "yes<|im_end|>"
