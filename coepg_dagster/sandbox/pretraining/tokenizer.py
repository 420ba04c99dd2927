"""The tiny models' tokenizer: byte-level, lossless, and with the same segmentation of a word in every context.

A pre-token is one token where the vocabulary holds it, and single bytes otherwise; there are no merges. So frequent
words of pretraining are whole tokens, every other string is spelled, and a random string is spelled the same way
in a goal, in a plan and in a value: copying it is plain token copying. A blank is a token of its own, except before the
few *frame* words of goals and plans ("the", "button", …), which have a second token that includes it. Every whole number
0..223 is one token, so a point "(x,y)" is five.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coepg_dagster.experiment.strict import ExperimentError

END_OF_TEXT: Final = "<|endoftext|>"
IM_START: Final = "<|im_start|>"
IM_END: Final = "<|im_end|>"
VISION_START: Final = "<|vision_start|>"
VISION_END: Final = "<|vision_end|>"
IMAGE_PAD: Final = "<|image_pad|>"
VIDEO_PAD: Final = "<|video_pad|>"
SPECIALS: Final = (END_OF_TEXT, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)

NUMBERS: Final = 224
"""Whole numbers 0..NUMBERS - 1 are single tokens: enough for coordinates on a screen of 168 x 224 px."""

SCAFFOLD: Final = ('{"plan": "', '", "action_type": "', '", "value": "', '"}')
"""The fixed text of `prompts.planner_answer`; one token each."""

_FRAME: Final = """
    a an and any above area at below blue bottom box boxes button by called centre checkbox choose clear click close
    coordinate corner day dialog down drop edge element enter expand field fifth file find first folder following for
    fourth from green grey hyperlink icon image in input into is it item labelled large last left letter line link list
    login lower magenta mark marked menu middle named near next number of on one open option or orange page password
    pick pink press purple radio reading red right row says search second section select shape small square submit
    switch symbol tab text that the then third tick to top toggle tree type upper user username using white widget with
    word yellow black cyan brown"""
FRAME_WORDS: Final = tuple(_FRAME.split())
"""Words of goals and plans that stand after a blank so often that blank and word are one token."""

_OTHER_WORDS: Final = ("CLICK", "TYPE", "SELECT", "Task", "Done", "none", "user", "assistant", "system")

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "<|im_start|>{{ message['role'] }}{{ '\\n' }}"
    "{%- if message['role'] == 'assistant' -%}{% generation %}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{%- else -%}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] in ('image', 'image_url') -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "<|im_end|>{{ '\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}{%- endif -%}"
)
"""Qwen's chat without a system message. The image stands where the message has it: first, as `prompts` builds it."""

_WORD: Final = re.compile("[A-Za-z]+")


def words_of(text: str) -> list[str]:
    """The letter runs of `text`, which are what the vocabulary can hold as whole words."""
    return _WORD.findall(text)


def _byte_alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _in_byte_alphabet(text: str) -> str:
    """`text` as the byte-level alphabet writes it (a blank is Ġ)."""
    [(written, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return written


def _pattern() -> str:
    scaffold = "|".join(re.escape(text) for text in SCAFFOLD)
    frame = "|".join(sorted(FRAME_WORDS))
    return rf"{scaffold}| (?:{frame})(?![A-Za-z0-9])|[A-Za-z]+|[0-9]{{1,3}}|[^A-Za-z0-9]"


def fit(corpus: Iterable[str], size: int = 1472, least: int = 1) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `size` tokens: the fixed ones, and the words that most texts of `corpus` hold.

    A word in fewer than `least` texts is spelled. Deterministic: ties between equally frequent words
    are broken by the alphabet. Raises ExperimentError where `size` has no room for the fixed part.
    """
    counts = Counter(word for text in corpus for word in set(words_of(text)) if len(word) > 1)
    fixed = [*SPECIALS, *_byte_alphabet(), *(str(number) for number in range(NUMBERS))]
    fixed += [_in_byte_alphabet(text) for text in SCAFFOLD]
    fixed += [*_OTHER_WORDS, *(_in_byte_alphabet(f" {word}") for word in FRAME_WORDS), *FRAME_WORDS]
    vocabulary: dict[str, int] = {}
    for token in fixed:
        vocabulary.setdefault(token, len(vocabulary))
    if len(vocabulary) > size:
        raise ExperimentError(f"`vocabulary`: {size} tokens are fewer than its fixed part of {len(vocabulary)}")
    for word in sorted(counts, key=lambda word: (-counts[word], word)):
        if len(vocabulary) == size or counts[word] < least:
            break
        vocabulary.setdefault(word, len(vocabulary))
    return _tokenizer(vocabulary)


def _tokenizer(vocabulary: dict[str, int]) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_pattern()), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIALS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=list(SPECIALS),
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """The id of one token of the vocabulary. Raises KeyError where there is none."""
    number: int = tokenizer.get_vocab()[token]
    return number


def load(directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint made here."""
    return PreTrainedTokenizerFast.from_pretrained(directory)
