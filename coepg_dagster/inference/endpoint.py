"""The address of an OpenAI-compatible endpoint, and what it reports of its model. Imports no model library."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

import httpx

from coepg_dagster import jsonlines
from coepg_dagster.experiment.models import Member
from coepg_dagster.experiment.strict import fingerprint
from coepg_dagster.inference.engine import EngineRefused
from coepg_dagster.refusal import without_credentials

SECRET_LENGTH = 12  # characters of the shortest key that is looked for in a server's text
MAX_BYTES: Final = 1 << 26
"""Of an answer; a long one with all its log-probabilities has a thousandth of it."""

ATTEMPTS: Final = 5
PAUSE_SECONDS: Final = 1.0
"""Before the second attempt; doubles with each further one. Up to half of it is left out at random, to spread retries."""
_JITTER: Final = random.Random()
"""A generator for pauses alone: a retry must not change the random numbers of a training in this process."""
LONGEST_PAUSE_SECONDS: Final = 120.0
"""A request whose server asks for a longer pause has failed."""


class AnswerTooLarge(httpx.HTTPError):
    """An answer of more than MAX_BYTES, which is not read to its end."""


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    status: int
    headers: httpx.Headers
    content: bytes

    @property
    def text(self) -> str:
        """The content as UTF-8, whatever the server calls it: a charset may name any codec of Python."""
        return self.content.decode(errors="replace")

    @property
    def may_pass(self) -> bool:
        """Whether it is an error for which the same request is sent again."""
        return self.status == 429 or self.status >= 500

    @property
    def retry_after(self) -> float:
        """The pause, in seconds, that the server asks for in the header Retry-After; 0: none that can be read."""
        value = self.headers.get("Retry-After", "")
        try:
            if value.isascii() and value.replace(".", "", 1).isdigit():
                return float(value)
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        except (ValueError, OverflowError, OSError):  # a year that no clock can show
            return 0.0


def pause(attempt: int, answer: Answer | None) -> float:
    """Seconds between an attempt, counted from 1, and the next one; `answer` is the error that it got, if any."""
    growing = PAUSE_SECONDS * 2.0 ** (attempt - 1) * _JITTER.uniform(0.5, 1)
    return max(growing, answer.retry_after) if answer else growing


@dataclass(frozen=True)
class Endpoint:
    """The address of an endpoint, and its limits."""

    base_url: str  # with /v1
    model: str  # as the endpoint names it
    api_key: str | None = None
    in_flight: int = 16  # requests at a time
    timeout_seconds: float = 120.0

    def repeats_key(self, text: str) -> bool:
        """Whether a server's text holds the key, so that it must not be kept or shown.

        A key shorter than SECRET_LENGTH ("EMPTY", "none") is a placeholder: answers contain such words by chance.
        """
        return self.api_key is not None and len(self.api_key) >= SECRET_LENGTH and self.api_key in text

    def client(self) -> httpx.Client:
        """A client that speaks to this endpoint only: no proxies or credentials from the environment, no redirects."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(
            base_url=self.base_url.rstrip("/") + "/",
            headers={"Accept-Encoding": "identity"} | key,
            timeout=httpx.Timeout(self.timeout_seconds, connect=min(10.0, self.timeout_seconds)),
            limits=httpx.Limits(max_connections=self.in_flight, max_keepalive_connections=self.in_flight),
            trust_env=False,
        )

    def ask(self, client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        """The answer to a request with `body` as JSON. Nothing that a server compresses is unpacked.

        Raises httpx.ReadTimeout also where the whole answer takes `timeout_seconds` after its beginning, and AnswerTooLarge.
        """
        with client.stream(method, path, json=body) as answer:
            content, ends = bytearray(), time.monotonic() + self.timeout_seconds
            for part in answer.iter_raw():
                content += part
                if len(content) > MAX_BYTES:
                    raise AnswerTooLarge(f"the answer has more than {MAX_BYTES:,} bytes")
                if time.monotonic() > ends:
                    raise httpx.ReadTimeout(f"the answer does not end within {self.timeout_seconds:g} s")
            return Answer(answer.status_code, answer.headers, bytes(content))


def endpoint_of(member: Member) -> Endpoint:
    """The endpoint of an `openai` member, with its key from the environment. Raises EngineRefused if the key is missing."""
    assert member.base_url is not None  # Member requires it
    key = None
    if member.api_key_env is not None:
        key = os.environ.get(member.api_key_env)
        if not key:
            raise EngineRefused(
                f"{member.base_url}: the environment variable {member.api_key_env} (`api_key_env`) is not set: export it "
                "where Dagster is started"
            )
    return Endpoint(member.base_url, member.model, key, member.in_flight, member.timeout_seconds)


def served_model(endpoint: Endpoint) -> dict[str, Any]:
    """What the endpoint reports of its model: `id`, and if given `owned_by`, `root`, `parent` and `max_model_len`.

    Raises EngineRefused if it cannot be reached, or does not serve the model.
    """
    with endpoint.client() as client:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = endpoint.ask(client, "GET", "models")
            except httpx.HTTPError as error:
                raise EngineRefused(
                    f"{endpoint.base_url} cannot be reached ({short(error)}): start the server, or correct `base_url`"
                ) from None
            if not answer.may_pass:
                break
            if attempt == ATTEMPTS or answer.retry_after > LONGEST_PAUSE_SECONDS:
                raise EngineRefused(
                    f"{endpoint.base_url}/models answered with status {answer.status} after {attempt} attempts: the server is "
                    "not well, or busy: run this again when it is well"
                )
            time.sleep(pause(attempt, answer))
    if answer.status in (401, 403):
        raise EngineRefused(
            f"{endpoint.base_url} refused the key (status {answer.status}): set `api_key_env` to the name of the "
            "environment variable that holds it"
        )
    if answer.status == 404:  # not every server lists its models
        return {"id": endpoint.model}
    try:
        read = jsonlines.parse(answer.content)
        models = {str(model["id"]): dict(model) for model in read["data"]}
    except (ValueError, KeyError, TypeError):
        raise EngineRefused(
            f"{endpoint.base_url}/models answered with status {answer.status} and no list of models: is it an "
            "OpenAI-compatible server, and does `base_url` end with /v1?"
        ) from None
    # JSON can spell each letter in another way
    if endpoint.repeats_key(answer.text) or endpoint.repeats_key(json.dumps(read)):
        raise EngineRefused(f"{endpoint.base_url}/models repeats the key that it was given: use another server")
    if endpoint.model not in models:
        raise EngineRefused(
            f"{endpoint.base_url} does not serve {endpoint.model!r} but {', '.join(sorted(models)) or 'nothing':.500}: "
            "correct `model`"
        )
    reported = models[endpoint.model]
    keys = ("id", "owned_by", "root", "parent", "max_model_len")
    return {key: reported[key] for key in keys if reported.get(key) is not None}


def served_version(reported: dict[str, Any]) -> str:
    """The version of a model whose weights cannot be read: its name, and a hash of `served_model`."""
    return f"{reported['id']}@{fingerprint(reported)}"


def short(error: Exception) -> str:
    """The type of an error and the beginning of its message, without the user and password of an address."""
    return without_credentials(f"{type(error).__name__}: {error}")[:200]
