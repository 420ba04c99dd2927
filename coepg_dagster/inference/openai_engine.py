"""Any OpenAI-compatible endpoint behind the inference protocol: chat completions with an image and log-probabilities.

Errors that may pass (no connection, 429, 5xx) are retried with growing pauses. A request that fails in the end becomes a
`Failure`. `OpenAIEngine.check` reads the endpoint's effective settings back before the first request.
"""

from __future__ import annotations

import base64
import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, Final

import httpx
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coepg_dagster.inference.endpoint import (
    ATTEMPTS,
    LONGEST_PAUSE_SECONDS,
    Answer,
    AnswerTooLarge,
    Endpoint,
    pause,
    served_model,
    served_version,
    short,
)
from coepg_dagster.inference.engine import EngineChanged, EngineRefused, Failure, Generation, Request, Sampling, Usage
from coepg_dagster.inference.order import grouped
from coepg_dagster.inference.processing import probe, prompt_of, vision_token_ids
from coepg_dagster.inference.screens import resize_of

_OF_THE_REQUEST: Final = frozenset({400, 413, 422})
"""Errors of one prompt, such as one that is too long. Another status is the server's reason, also that of a key or a model that
it knew when the work began: other requests get no answer either."""
PROBE_AT_MOST: Final = 0.05
"""By how much the log-probability of one token may differ between two answers of the same weights."""
_AGAIN: Final = "what it answered meanwhile is not used: run this again once it stays the same"
NEUTRAL: Final = {"repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0}
"""vLLM and SGLang would otherwise take these from the model's generation_config; other servers refuse such keys."""


class _Loose(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _Token(_Loose):
    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]] | None = None


class _Logprobs(_Loose):
    content: list[_Token]


class _Message(_Loose):
    content: str | None = None


class _Choice(_Loose):
    index: int = 0
    message: _Message
    logprobs: _Logprobs
    finish_reason: str | None


class _Cached(_Loose):
    cached_tokens: int | None = None


class _Usage(_Loose):
    prompt_tokens: int
    prompt_tokens_details: _Cached | None = None


class _Answer(_Loose):
    choices: list[_Choice]
    usage: _Usage


class _Unreachable(RuntimeError):
    """No connection, after all attempts."""


class OpenAIEngine:
    """A model behind an OpenAI-compatible endpoint.

    Args:
        processor: of the model that is served. It gives the size of images, special tokens and prompt lengths.
        weights: the version to keep with answers; by default a hash of what the server reports of its model.
        exit_report: called when no connection could be made; returns why the server ended, if it did.
        ahead: as in `grouped`; by default as many as are in flight, which is safe whatever the server's settings.
    """

    remote = True

    def __init__(
        self,
        endpoint: Endpoint,
        processor: Any,
        *,
        weights: str | None = None,
        exit_report: Callable[[], str] = lambda: "",
        ahead: int | None = None,
    ) -> None:
        self._endpoint, self._processor, self._exit_report = endpoint, processor, exit_report
        self._ahead = endpoint.in_flight if ahead is None else ahead
        reported = served_model(endpoint)
        self._served = None if weights else served_version(reported)
        self.weights = weights or served_version(reported)
        self._first: tuple[bytes, float] | None = None  # the answer to the probe when the work began
        tokenizer = processor.tokenizer
        self._special = set(tokenizer.all_special_tokens) | {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        }
        self._body = {
            "model": endpoint.model,
            "logprobs": True,
            "logit_bias": {str(token): -100 for token in vision_token_ids(tokenizer)},
        } | (NEUTRAL if reported.get("owned_by") in ("vllm", "sglang") else {})
        self._client, self._closed = endpoint.client(), threading.Event()
        self._pictures = _Pictures(3 * endpoint.in_flight)

    def close(self) -> None:
        """Closes all connections. Requests that other threads have not sent fail; those that they have sent are not retried."""
        self._closed.set()
        self._client.close()

    @property
    def resize(self) -> tuple[int, int, int]:
        return resize_of(self._processor)

    def check(self) -> None:
        """Reads the effective settings back. Raises EngineRefused if the endpoint

        1. gives no answer, no token log-probabilities or no usage,
        2. counts another number of prompt tokens: its image size or chat template is not that of `processor`,
        3. gives log-probabilities that depend on the temperature.
        """
        token, before = self._first = self._probed(0.0)
        again, after = self._probed(0.01)
        if token == again and abs(before - after) > PROBE_AT_MOST:
            raise EngineRefused(
                f"{self._where}: the log-probability of one token is {before:.3f} when greedy and {after:.3f} at "
                "temperature 0.01: start the server so that it gives those of the raw logits "
                "(vLLM: --logprobs-mode raw_logprobs)"
            )

    def check_again(self) -> None:
        """After the work: raises EngineChanged if the server reports another model than at `check`, or answers otherwise."""
        assert self._first is not None
        (token, before), (again, after) = self._first, self._probed(0.0)
        if self._served is not None and (now := served_version(served_model(self._endpoint))) != self._served:
            raise EngineChanged(
                f"{self._where}: it was {self._served} when this work began, and is {now} now: {_AGAIN}"
            )
        if token != again or abs(before - after) > PROBE_AT_MOST:
            raise EngineChanged(
                f"{self._where}: it answered the probe with {token!r} ({before:.3f}) when this work began, and answers "
                f"{again!r} ({after:.3f}) now: were its weights changed? {_AGAIN}"
            )

    def _probed(self, temperature: float) -> tuple[bytes, float]:
        """The first token of the answer to the probe, and its log-probability. Raises EngineRefused."""
        [[answer]] = self.generate([probe(self._processor)], Sampling(1, temperature=temperature))
        if isinstance(answer, Failure):
            at = f" at temperature {temperature:g}" if temperature else ""
            raise EngineRefused(f"{self._where}: the probe got no answer{at}: {answer.reason}")
        return b"".join(answer.pieces), (answer.logprobs or (answer.stop_logprob or 0.0,))[0]

    @property
    def _where(self) -> str:
        return f"{self._endpoint.base_url}, model {self._endpoint.model}"

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Generation | Failure]]:
        unreachable: list[str] = []  # why no connection can be made: the remaining requests then fail at once

        def answer(numbered: tuple[int, Request]) -> list[Generation | Failure]:
            position, request = numbered
            if unreachable:
                return [Failure(unreachable[0], passing=True)] * sampling.samples
            prompt = prompt_of(self._processor, request)
            body = self._body | {
                "messages": _with_picture(request, self._pictures),
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "n": sampling.samples,
                "seed": sampling.seed + position,
            }
            try:
                answers = self._read(self._post(body), prompt.tokens, sampling.samples)
            except _Unreachable as error:
                unreachable.append(str(error))
                answers = Failure(str(error), passing=True)
            return [answers] * sampling.samples if isinstance(answers, Failure) else answers

        order = grouped([id(request.image) for request in requests], self._ahead)
        answers: list[list[Generation | Failure]] = [[] for _ in requests]
        with ThreadPoolExecutor(self._endpoint.in_flight) as pool:
            for i, each in zip(order, pool.map(answer, ((i, requests[i]) for i in order)), strict=True):
                answers[i] = each
        return answers

    def _post(self, body: dict[str, Any]) -> Answer | Failure:
        for attempt in range(1, ATTEMPTS + 1):
            if self._closed.is_set():
                return Failure("the engine was closed")
            answer = None
            try:
                answer = self._endpoint.ask(self._client, "POST", "chat/completions", body)
            except httpx.PoolTimeout:
                raise  # cannot happen: there are as many connections as threads
            except (httpx.ReadTimeout, httpx.WriteTimeout):
                # the server may still be computing the answer: a retry would only add to its load
                return Failure(
                    f"no answer within {self._endpoint.timeout_seconds:g} s (`timeout_seconds`)", passing=True
                )
            except AnswerTooLarge as error:
                return Failure(str(error))
            except httpx.TransportError as error:
                if attempt == ATTEMPTS:
                    raise _Unreachable(
                        f"no connection to {self._endpoint.base_url} in {ATTEMPTS} attempts: {short(error)}"
                        f"{self._exit_report()}"
                    ) from None
            else:
                if not answer.may_pass:
                    return answer
                wait = answer.retry_after
                if attempt == ATTEMPTS or wait > LONGEST_PAUSE_SECONDS:
                    tried = f"after {attempt} attempts" + (f", wait {wait:g} s" if wait else "")
                    return Failure(f"status {answer.status} {tried}: {self._quote(answer)}", passing=True)
            self._wait(pause(attempt, answer))
        raise AssertionError("every attempt returns, raises or is followed by another")

    def _wait(self, seconds: float) -> None:
        self._closed.wait(seconds)

    def _read(self, answer: Answer | Failure, tokens: int, samples: int) -> list[Generation | Failure] | Failure:
        if isinstance(answer, Failure):
            return answer
        if answer.status != 200:
            reason = f"status {answer.status}: {self._quote(answer)}"
            return Failure(reason, passing=answer.status not in _OF_THE_REQUEST)
        read = read_answer(answer.content)
        if isinstance(read, str):
            return Failure(f"malformed answer: {read}", passing=True)
        # JSON can spell each letter in another way
        if self._endpoint.repeats_key(answer.text) or self._endpoint.repeats_key(read.model_dump_json()):
            return Failure("the answer repeats the key")
        if len(read.choices) != samples:
            return Failure(f"{len(read.choices)} answers instead of {samples}: does the server support `n`?")
        if read.usage.prompt_tokens != tokens:
            return Failure(
                f"the server counts {read.usage.prompt_tokens} prompt tokens; by our resize and chat template it must be "
                f"{tokens}: give it the image processor and chat template of `processor`, and no other limits of image size",
                passing=True,  # `check` refuses a server that always does: this is the answer to another request
            )
        details = read.usage.prompt_tokens_details
        cached = (details.cached_tokens if details else None) or 0
        ordered = sorted(read.choices, key=lambda choice: choice.index)
        return [self._generation(choice, tokens, cached) for choice in ordered]

    def _generation(self, choice: _Choice, prompt: int, cached: int) -> Generation | Failure:
        if choice.finish_reason not in ("stop", "length"):
            return Failure(f"the answer ended with {choice.finish_reason!r}")
        text, tokens = choice.message.content or "", choice.logprobs.content
        pieces = [self._piece(token) for token in tokens]
        logprobs = [token.logprob for token in tokens]
        if any(value > 1e-3 for value in logprobs):
            return Failure(f"a log-probability is {max(logprobs):g}, above 0")
        usage, stop = Usage(prompt, cached, len(tokens)), None
        if choice.finish_reason == "stop" and pieces and not pieces[-1]:
            pieces.pop()
            stop = logprobs.pop()
        # ASCII: some servers write the halves of a character as two replacement characters
        if _ascii(b"".join(pieces)) != _ascii(text.encode()):
            return Failure(f"the tokens spell {b''.join(pieces)[:80]!r}, the text is {text[:80]!r}")
        return Generation(
            text, tuple(pieces), tuple(logprobs), "stop" if choice.finish_reason == "stop" else "length", stop, usage,
            self.weights,
        )  # fmt: skip

    def _piece(self, token: _Token) -> bytes:
        if token.token in self._special:
            return b""
        return token.token.encode() if token.bytes is None else bytes(token.bytes)

    def _quote(self, answer: Answer) -> str:
        """The beginning of the server's answer, without the key that some servers repeat."""
        text = answer.text.replace(self._endpoint.api_key, "…") if self._endpoint.api_key else answer.text
        return text[:300].strip() or "no text"


def read_answer(content: bytes) -> _Answer | str:
    """The chat completion in the body of a response, or what is wrong with it."""
    try:
        return _Answer.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        hint = "; the server must give log-probabilities" if "logprobs" in place else ""
        return f"{place}: {first['msg']}{hint}"


def _ascii(text: bytes) -> bytes:
    return bytes(byte for byte in text if byte < 128)


def _with_picture(request: Request, pictures: _Pictures) -> list[dict[str, Any]]:
    """The chat with the image as a data URI."""

    def part(content: dict[str, Any]) -> dict[str, Any]:
        if content["type"] != "image":
            return content
        return {"type": "image_url", "image_url": {"url": pictures.url(request.image)}}

    return [message | {"content": [part(content) for content in message["content"]]} for message in request.messages]


class _Pictures:
    """Images as data URIs. Each is encoded once, even if several threads need it; the newest are kept."""

    def __init__(self, kept: int) -> None:
        self._kept, self._lock = kept, threading.Lock()
        self._urls: OrderedDict[int, tuple[Image.Image, Future[str]]] = OrderedDict()

    def url(self, image: Image.Image) -> str:
        """`data:image/png;base64,…`: PNG is lossless, and the model must see the same pixels."""
        with self._lock:
            entry = self._urls.get(id(image))
            if entry is None:
                future: Future[str] = Future()
                self._urls[id(image)] = image, future
                while len(self._urls) > self._kept:
                    self._urls.popitem(last=False)
            else:
                future = entry[1]
        if entry is None:
            try:
                out = io.BytesIO()
                image.save(out, "PNG", compress_level=1)
                future.set_result("data:image/png;base64," + base64.b64encode(out.getvalue()).decode())
            except BaseException as error:
                future.set_exception(error)
                raise
        return future.result()
