"""The inference protocol: the requests and answers of every engine.

An engine turns (image, chat) pairs into text with the log-probabilities of the *generated* tokens at temperature 1,
whatever temperature they were sampled at. Log-probabilities of prompts are never requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from PIL import Image

from coepg_dagster.prompts import Message
from coepg_dagster.refusal import Refusal


@dataclass(frozen=True)
class Request:
    """One question: an image, already resized for the model (`geometry.smart_resize`), and a chat with one placeholder for it."""

    image: Image.Image
    messages: list[Message]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy; `samples` answers are drawn per request."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("greedy decoding gives one answer: samples must be 1 at temperature 0")


@dataclass(frozen=True)
class Usage:
    """Tokens of an answer."""

    prompt: int
    cached: int  # of the prompt's, those that were not computed for this answer
    generated: int  # the stop token included


@dataclass(frozen=True)
class Generation:
    """One answer. `pieces` are the byte strings of its tokens and `logprobs` their log-probabilities, shape (tokens,) each.

    Neither holds the stop token; `stop_logprob` is its log-probability, if known. `weights` is the version of the weights
    that answered.
    """

    text: str
    pieces: tuple[bytes, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    stop_logprob: float | None = None
    usage: Usage | None = None
    weights: str = ""


@dataclass(frozen=True)
class Failure:
    """A request that got no answer, and why. An empty answer is no failure.

    `passing`: the server is the reason and not the request, which may get its answer another time.
    """

    reason: str
    passing: bool = False


class EngineRefused(Refusal, RuntimeError):
    """An engine that cannot do what the experiment says; the message says what differs, and what to do."""


class EngineChanged(EngineRefused):
    """An engine that is another one than when its work began: its answers since then are not to be used."""


class Engine(Protocol):
    """What the agents need of a model."""

    @property
    def remote(self) -> bool:
        """Whether another process computes the answers, so that several such engines can work at the same time."""
        ...

    @property
    def resize(self) -> tuple[int, int, int]:
        """(factor, min_pixels, max_pixels) of the model's image processor, for `geometry.smart_resize`."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Generation | Failure]]:
        """`sampling.samples` answers for each request, in order: shape (requests, samples)."""
        ...
