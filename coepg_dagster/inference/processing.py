"""The prompt of a request as text and tokens, its length, and the bytes of tokens, by a Qwen-VL processor.

Each engine must see the same prompt. Its length is computed here, with the visual tokens of our resize, and compared with
the length that an engine reports: a server with another image size or chat template is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from PIL import Image
from transformers import AutoProcessor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from coepg_dagster.geometry import Size, smart_resize
from coepg_dagster.inference.engine import Request
from coepg_dagster.inference.files import IncompleteCheckpoint
from coepg_dagster.inference.screens import resize_of, visual_tokens
from coepg_dagster.inference.weights import local_folder
from coepg_dagster.prompts import grounder_messages

VISION_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")
"""Never sampled: with one in an answer, its image tokens and image features differ in number when it is scored again."""
VISION_END = "<|vision_end|>"


def load_processor(checkpoint: str) -> Any:
    """The processor of a local folder or hub model, without remote code. Raises IncompleteCheckpoint."""
    return AutoProcessor.from_pretrained(local_folder(checkpoint, weights=False), trust_remote_code=False)


def vision_token_ids(tokenizer: Any) -> list[int]:
    """Ids of those VISION_TOKENS that the tokenizer has."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in VISION_TOKENS if token in vocabulary]


def without_vision_tokens(answer: list[int], unwanted: frozenset[int], end: int) -> list[int]:
    """A sampled answer (token ids) up to its first vision token; `end` alone if it starts with one.

    No engine should sample one, see `VISION_TOKENS`. An engine that does must not end a training run.
    """
    for position, token in enumerate(answer):
        if token in unwanted:
            return answer[:position] or [end]
    return answer


_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes that a token of a byte-level BPE tokenizer stands for; empty for special tokens, and for ids without a token.

    Models have more outputs than their tokenizers have tokens: Qwen2.5-VL-3B 271. Where much is sampled, one is drawn at times.
    """
    if token_id in tokenizer.all_special_ids:
        return b""
    token: str | None = tokenizer.convert_ids_to_tokens(token_id)
    if token is None:
        return b""
    if token_id in tokenizer.added_tokens_decoder:
        return token.encode()
    return bytes(_BYTES[character] for character in token)


@dataclass(frozen=True)
class Prompt:
    """A request in the model's chat template."""

    head: str  # up to the end of the image, with one placeholder token for it
    rest: list[int]  # token ids of what follows
    text: str
    tokens: int  # length of the whole prompt, all visual tokens included


def prompt_of(processor: Any, request: Request) -> Prompt:
    """The prompt of a request. Raises ValueError if it does not hold exactly one image, already resized for the model.

    Raises IncompleteCheckpoint where the chat template fails, or leaves out or changes what is said.
    """
    try:
        text: str = processor.apply_chat_template(request.messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, OverflowError, TypeError) as error:  # transformers renders it in a sandbox
        raise IncompleteCheckpoint(
            f"the chat template cannot be used ({error}): copy it from the model that this one was made from"
        ) from None
    said = [part["text"].strip() for message in request.messages for part in message["content"] if "text" in part]
    if lost := [part for part in said if part not in text]:
        raise IncompleteCheckpoint(
            f"the chat template does not hold what is said ({lost[0]!r:.80}): copy it from the model that this one was made from"
        )
    start, end, after = text.partition(VISION_END)
    if not end or VISION_END in after:
        raise ValueError(f"a prompt needs exactly one image, got {text!r}")
    head, tokenizer = start + end, processor.tokenizer
    rest = tokenizer(after, add_special_tokens=False)["input_ids"]
    before = len(tokenizer(head, add_special_tokens=False)["input_ids"])
    return Prompt(head, rest, text, before - 1 + visual_tokens(processor, request.image) + len(rest))


def probe(processor: Any) -> Request:
    """A request that tests how an engine treats images: a full-HD screenshot, resized as ours are."""
    factor, low, high = resize_of(processor)
    size = smart_resize(Size(1920, 1080), factor=factor, min_pixels=low, max_pixels=high)
    return Request(
        Image.linear_gradient("L").resize((size.width, size.height)).convert("RGB"),
        grounder_messages("the darkest place", "compact"),
    )
