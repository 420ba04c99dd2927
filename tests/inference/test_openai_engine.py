"""The OpenAI engine against a real server on loopback: the same answers as without it, and what servers do wrong."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from coepg_dagster.experiment.models import Member
from coepg_dagster.experiment.training import Grpo
from coepg_dagster.geometry import Space
from coepg_dagster.inference import openai_engine
from coepg_dagster.inference.agents import Grounder
from coepg_dagster.inference.endpoint import Endpoint, endpoint_of, served_model, served_version
from coepg_dagster.inference.engine import EngineRefused, Failure, Generation, Request, Sampling
from coepg_dagster.inference.openai_engine import OpenAIEngine
from coepg_dagster.inference.processing import load_processor, prompt_of
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.prompts import grounder_messages, planner_answer
from coepg_dagster.training.cdrem_reward import CdremReward
from tests.inference.openai_server import OpenAIServer, after, endless, hang_up, reply, says, status
from tests.inference.scripted import untimed

SCREEN = Image.linear_gradient("L").resize((84, 112)).convert("RGB")
KEY = "sk-nobody-may-read-this"


@pytest.fixture(scope="module")
def direct(trained: Callable[[str, int], Path]) -> TransformersEngine:
    return TransformersEngine(trained("grounder", 0), dtype="float32", device="cpu", batch_size=8)


@pytest.fixture(scope="module")
def running(direct: TransformersEngine) -> Iterator[OpenAIServer]:
    server = OpenAIServer(direct, key=KEY).start()
    yield server
    server.stop()


@pytest.fixture
def server(running: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> OpenAIServer:
    monkeypatch.setattr("coepg_dagster.inference.endpoint.PAUSE_SECONDS", 0.01)
    running.faults, running.requests, running.busiest = [], [], 0
    running.change = lambda answer: answer
    return running


@pytest.fixture(scope="module")
def far(running: OpenAIServer, trained: Callable[[str, int], Path]) -> Iterator[OpenAIEngine]:
    """For examples of hypothesis, between which no fixture is made anew."""
    processor = load_processor(str(trained("grounder", 0)))
    with contextlib.closing(OpenAIEngine(Endpoint(running.url, "tiny", KEY), processor)) as opened:
        yield opened


@pytest.fixture
def engine(server: OpenAIServer, trained: Callable[[str, int], Path]) -> Iterator[OpenAIEngine]:
    endpoint = Endpoint(server.url, "tiny", KEY, in_flight=4, timeout_seconds=60.0)
    with contextlib.closing(OpenAIEngine(endpoint, load_processor(str(trained("grounder", 0))))) as opened:
        yield opened


def request(plan: str = "click OK", image: Image.Image = SCREEN) -> Request:
    return Request(image, grounder_messages(plan, "compact"))


def ask(engine: OpenAIEngine) -> Generation | Failure:
    return engine.generate([request()], Sampling(6))[0][0]


def asked(engine: OpenAIEngine, server: OpenAIServer) -> dict[str, Any]:
    """The body of the request that `ask` sends."""
    assert isinstance(ask(engine), Generation)
    return server.requests.pop()


def reason(engine: OpenAIEngine) -> str:
    answer = ask(engine)
    assert isinstance(answer, Failure)
    return answer.reason


# the same answers


def test_tokens_and_log_probabilities_are_those_of_the_engine_behind_it(
    engine: OpenAIEngine, direct: TransformersEngine, server: OpenAIServer
) -> None:
    other = Image.new("RGB", (84, 112), (200, 10, 10))
    requests = [request("click OK"), request("click Search"), request("é漢", other)]
    for there, here in zip(engine.generate(requests, Sampling(6)), direct.generate(requests, Sampling(6)), strict=True):
        assert isinstance(there[0], Generation) and isinstance(here[0], Generation)
        assert (there[0].text, there[0].pieces, there[0].finish_reason) == (
            here[0].text,
            here[0].pieces,
            here[0].finish_reason,
        )
        assert there[0].logprobs == pytest.approx(here[0].logprobs, abs=1e-4)
        assert there[0].stop_logprob == pytest.approx(here[0].stop_logprob, abs=1e-4)
        assert there[0].usage and here[0].usage
        assert (there[0].usage.prompt, there[0].usage.generated) == (here[0].usage.prompt, here[0].usage.generated)
    # vision tokens are biased out, and no request is sampled as another
    assert all(set(body["logit_bias"].values()) == {-100} and body["logprobs"] for body in server.requests)


def test_rewards_are_those_of_the_engine_behind_it(
    engine: OpenAIEngine, direct: TransformersEngine, steps: pa.Table, dataset: pa.Table
) -> None:
    screens = Screens(steps, engine.resize)
    texts, ids = [], []
    for row in dataset.to_pylist():
        for plan in (row["plan"], "somewhere else"):
            texts.append(json.dumps({"plan": plan, "action_type": row["action_type"], "value": row["value"]}))
            ids.append(row["step_id"])

    def rewards(*engines: Any) -> tuple[list[float], list[dict[str, Any]]]:
        grounders = {
            name: Grounder(one, screens, "compact", Space.RESIZED, 8) for name, one in zip("ab", engines, strict=True)
        }
        reward = CdremReward(grounders, {"a": 2.0, "b": 1.0}, steps, screens, Grpo())
        return reward.score(texts, ids), reward.rows

    here, rows = rewards(direct, direct)
    there, far_rows = rewards(engine, engine)
    mixed, _ = rewards(direct, engine)
    assert len(set(here)) > 1
    assert there == pytest.approx(here, abs=1e-5) and mixed == pytest.approx(here, abs=1e-5)
    hits = [[grader["hit"] for grader in row["graders"]] for row in rows]
    assert hits == [[grader["hit"] for grader in row["graders"]] for row in far_rows]


@settings(max_examples=6)
@given(order=st.permutations(range(4)), cuts=st.lists(st.integers(1, 3), max_size=2))
def test_rewards_are_the_same_when_grounders_are_queried_early(
    running: OpenAIServer,
    direct: TransformersEngine,
    far: OpenAIEngine,
    steps: pa.Table,
    order: list[int],
    cuts: list[int],
) -> None:
    """Exactly: the server answers a request as it would at any other time."""
    running.faults, running.change = [], lambda answer: answer
    screens = Screens(steps, far.resize)
    texts = [planner_answer(plan, "CLICK", "") for plan in ("click OK", "click Cancel", "click OK", "somewhere")]
    ids = ["s0", "s1", "s0", "s0"]

    def scored(early: list[list[int]]) -> tuple[list[float], list[dict[str, Any]], int]:
        grounders = {
            name: Grounder(engine, screens, "compact", Space.RESIZED, 8)
            for name, engine in {"own": direct, "far": far}.items()
        }
        reward = CdremReward(grounders, {"own": 2.0, "far": 1.0}, steps, screens, Grpo())
        running.requests = []
        with reward.pool():
            for part in early:
                reward.ask([texts[i] for i in part], [ids[i] for i in part])
            rewards = reward.score(texts, ids)
        return rewards, untimed(reward.rows), len(running.requests)

    ends = sorted({0, 4, *cuts})
    assert scored([order[a:b] for a, b in itertools.pairwise(ends)]) == scored([])
    assert len(running.requests) == 3, "equal pairs once"


def test_samples_come_back_in_order_and_by_seed(engine: OpenAIEngine, direct: TransformersEngine) -> None:
    sampling = Sampling(4, temperature=1.0, samples=3, seed=5)
    [there], [here] = engine.generate([request()], sampling), direct.generate([request()], sampling)
    assert [answer.text for answer in there if isinstance(answer, Generation)] == [
        answer.text for answer in here if isinstance(answer, Generation)
    ]


def test_requests_in_flight_are_bounded_and_answers_in_order(engine: OpenAIEngine, server: OpenAIServer) -> None:
    server.faults = [after(0.05)] * 12
    plans = ["click OK", "click Name", "click Next"] * 4
    answers = engine.generate([request(plan) for plan in plans], Sampling(6))
    texts = [answer.text for [answer] in answers if isinstance(answer, Generation)]
    assert len(texts) == 12 and texts[:3] * 4 == texts
    assert 1 < server.busiest <= 4


def test_the_weight_version_is_what_the_server_says_and_not_when(engine: OpenAIEngine, server: OpenAIServer) -> None:
    listed = served_model(Endpoint(server.url, "tiny", KEY))
    assert listed == {"id": "tiny", "owned_by": "test"}
    answer = ask(engine)
    assert isinstance(answer, Generation) and answer.weights == served_version(listed)


# what may pass


@pytest.mark.parametrize("faults", [[status(429)], [status(529)], [hang_up], [status(500), hang_up, status(429)]])
def test_a_request_is_sent_again_after_a_temporary_failure(
    engine: OpenAIEngine, server: OpenAIServer, faults: list[Any]
) -> None:
    server.faults = list(faults)
    assert isinstance(ask(engine), Generation)
    assert len(server.requests) == len(faults) + 1


def test_the_pause_is_at_least_what_the_server_asks_for(
    engine: OpenAIEngine, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(OpenAIEngine, "_wait", lambda _, seconds: pauses.append(seconds))
    server.faults = [status(429, Retry_After="7"), status(503)]
    assert isinstance(ask(engine), Generation)
    assert pauses[0] == 7 and 0.01 <= pauses[1] <= 0.02


def test_a_server_that_asks_for_an_hour_has_failed(engine: OpenAIEngine, server: OpenAIServer) -> None:
    server.faults = [status(429, Retry_After="3600")]
    assert "status 429 after 1 attempts, wait 3600 s" in reason(engine)


def test_errors_without_end_are_a_failure_of_the_request(engine: OpenAIEngine, server: OpenAIServer) -> None:
    server.faults = [status(500)] * 5
    assert "status 500 after 5 attempts" in reason(engine)
    assert len(server.requests) == 5
    assert isinstance(ask(engine), Generation)


def test_another_attempt_draws_no_number_that_a_training_would_draw(engine: OpenAIEngine, server: OpenAIServer) -> None:
    server.faults = [status(429)]
    before = random.getstate()
    assert isinstance(ask(engine), Generation)
    assert random.getstate() == before


def test_closing_ends_what_another_thread_still_has_to_ask(engine: OpenAIEngine, server: OpenAIServer) -> None:
    """Also what waits before another attempt; what the server has at hand may still be answered."""
    answer = threading.Event()
    server.faults = [status(503, Retry_After="100")] * 3 + [lambda *_: not answer.wait(20)]
    answers: list[list[Generation | Failure]] = []
    asking = threading.Thread(
        target=lambda: answers.extend(engine.generate([request(f"click {i}") for i in range(40)], Sampling(2)))
    )
    asking.start()
    while len(server.requests) < 4:
        time.sleep(0.01)
    engine.close()
    answer.set()
    asking.join(20)
    assert not asking.is_alive()
    reasons = [one.reason for [one] in answers if isinstance(one, Failure)]
    assert len(answers) == 40 and reasons.count("the engine was closed") >= 39
    assert len(server.requests) == 4


# what may not


@pytest.mark.parametrize("code", [400, 401, 404, 422])
def test_a_refused_request_is_not_sent_again(engine: OpenAIEngine, server: OpenAIServer, code: int) -> None:
    server.faults = [status(code)]
    assert f"status {code}" in reason(engine)
    assert len(server.requests) == 1


def test_a_late_answer_is_a_failure_and_the_request_is_not_sent_again(
    server: OpenAIServer, trained: Callable[[str, int], Path]
) -> None:
    endpoint = Endpoint(server.url, "tiny", KEY, timeout_seconds=0.2)
    server.faults = [after(0.6)]
    with contextlib.closing(OpenAIEngine(endpoint, load_processor(str(trained("grounder", 0))))) as engine:
        assert "no answer within 0.2 s" in reason(engine)
    assert len(server.requests) == 1


def test_an_answer_that_trickles_is_late(server: OpenAIServer, trained: Callable[[str, int], Path]) -> None:
    endpoint = Endpoint(server.url, "tiny", KEY, timeout_seconds=0.5)
    with contextlib.closing(OpenAIEngine(endpoint, load_processor(str(trained("grounder", 0))))) as engine:
        server.faults = [endless(b" ", 0.05)]
        assert "no answer within 0.5 s" in reason(engine)
    assert len(server.requests) == 1


def test_an_endless_answer_is_not_read(engine: OpenAIEngine, server: OpenAIServer) -> None:
    server.faults = [endless(bytes(1 << 20), 0)]
    assert reason(engine) == "the answer has more than 67,108,864 bytes"
    assert len(server.requests) == 1


@cache
def bomb() -> bytes:
    """256 MiB, compressed by the first test that asks: every process of the tests imports this module."""
    return gzip.compress(bytes(1 << 28), 1)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
def test_nothing_that_is_compressed_is_unpacked(engine: OpenAIEngine, server: OpenAIServer, encoding: str) -> None:
    server.faults = [says(bomb(), Content_Encoding=encoding)]
    tracemalloc.start()
    try:
        assert "malformed answer" in reason(engine)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("charset", ["hex", "zlib_codec", "undefined", "rot13", "utf-16", "punycode", "idna"])
def test_an_answer_is_utf_8_whatever_it_calls_itself(engine: OpenAIEngine, server: OpenAIServer, charset: str) -> None:
    whole = json.dumps(server.answer(asked(engine, server))).encode()
    server.faults = [says(whole, Content_Type=f"application/json; charset={charset}")]
    assert isinstance(ask(engine), Generation)
    server.faults = [status(400, Content_Type=f"text/plain; charset={charset}")]
    assert "status 400: {" in reason(engine)


@pytest.mark.parametrize(
    "pause",
    ["\xb2", "-1", "nan", "1e9", "Mon, 01 Jan 0001 00:00:00 -0000", "Fri, 31 Dec 9999 23:59:59 GMT", ".", "9" * 400],
)
def test_any_pause_that_a_server_may_ask_for(engine: OpenAIEngine, server: OpenAIServer, pause: str) -> None:
    server.faults = [status(429, Retry_After=pause)]
    answer = ask(engine)
    assert isinstance(answer, Generation) or "status 429 after 1 attempts, wait" in answer.reason


def test_a_key_that_json_spells_in_another_way_is_found(engine: OpenAIEngine, server: OpenAIServer) -> None:
    answer = server.answer(asked(engine, server))
    [choice] = answer["choices"]
    choice["message"]["content"] = "KEY"
    choice["logprobs"]["content"] = [{"token": "KEY", "logprob": -1.0}]
    choice["finish_reason"] = "length"
    spelt = "".join(f"\\u{ord(letter):04x}" for letter in KEY)
    server.faults = [says(json.dumps(answer).replace("KEY", spelt).encode())]
    assert reason(engine) == "the answer repeats the key"


@pytest.mark.parametrize(
    ("content", "says_why"),
    [
        (b"[" * 100_000, "no list of models"),
        (b'{"data": ' + b"[" * 100_000, "no list of models"),
        (json.dumps({"data": [{"id": "x" * 1_000_000}]}).encode(), "does not serve 'tiny' but xxx"),
        (json.dumps({"data": [{"id": "KEY"}]}).replace("KEY", "".join(f"\\u{ord(c):04x}" for c in KEY)).encode(),
         "repeats the key"),
        (bomb, "no list of models"),
    ],
)  # fmt: skip
def test_a_list_of_models_of_any_form(
    server: OpenAIServer, content: bytes | Callable[[], bytes], says_why: str
) -> None:
    body = content if isinstance(content, bytes) else content()

    def answers(handler: BaseHTTPRequestHandler) -> None:
        reply(handler, 200, None, {"Content-Encoding": "gzip"} if body[:2] == b"\x1f\x8b" else {}, body)

    handler = type("Handler", (BaseHTTPRequestHandler,), {"do_GET": answers, "log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        with pytest.raises(EngineRefused, match=says_why) as refused:
            served_model(Endpoint(f"http://127.0.0.1:{http.server_address[1]}/v1", "tiny", KEY))
        http.shutdown()
    assert len(str(refused.value)) < 1000 and KEY not in str(refused.value)


def test_no_reason_holds_the_key(engine: OpenAIEngine, server: OpenAIServer) -> None:
    server.faults = [status(400)]
    message = reason(engine)
    assert "said with Bearer …" in message and KEY not in message


def test_without_a_connection_the_rest_fails_at_once(
    direct: TransformersEngine, trained: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coepg_dagster.inference.endpoint.PAUSE_SECONDS", 0.01)
    server = OpenAIServer(direct).start()
    exit_report = lambda: "; it ended with code 9"  # noqa: E731
    processor = load_processor(str(trained("grounder", 0)))
    with contextlib.closing(
        OpenAIEngine(Endpoint(server.url, "tiny", in_flight=1), processor, exit_report=exit_report)
    ) as e:
        server.stop()
        pauses: list[float] = []
        monkeypatch.setattr(OpenAIEngine, "_wait", lambda _, seconds: pauses.append(seconds))
        answers = e.generate([request()] * 5, Sampling(2))
    assert all("no connection" in answer.reason for [answer] in answers if isinstance(answer, Failure))
    assert len(answers) == 5 and "it ended with code 9" in answers[4][0].reason  # type: ignore[union-attr]
    assert len(pauses) == 4


# what is no answer


def without(path: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(answer: dict[str, Any]) -> dict[str, Any]:
        place: Any = answer
        *way, last = path.split(".")
        for part in way:
            place = place[int(part)] if part.isdigit() else place[part]
        place.pop(int(last)) if last.isdigit() else place.pop(last)
        return answer

    return change


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("choices.0.logprobs", "the server must give log-probabilities"),
        ("choices.0.logprobs.content", "the server must give log-probabilities"),
        ("usage", "usage"),
        ("choices.0.finish_reason", "finish_reason"),
        ("choices.0", "0 answers instead of 1"),
        ("choices.0.logprobs.content.0", "the tokens spell"),
        ("choices.0.message.content", "the tokens spell"),
    ],
)
def test_an_answer_without_a_part_is_a_failure(
    engine: OpenAIEngine, server: OpenAIServer, path: str, message: str
) -> None:
    server.change = without(path)
    assert message in reason(engine)


@given(st.binary(max_size=30) | st.sampled_from([b"null", b"[]", b"{}", b'{"choices": 3}', b"<html>busy</html>"]))
def test_garbage_is_a_failure(raw: bytes) -> None:
    """No text of a server raises, or counts as an answer."""
    assert isinstance(openai_engine.read_answer(raw), str)


def test_garbage_over_the_wire(engine: OpenAIEngine, server: OpenAIServer) -> None:
    server.faults = [says(b"<html>busy</html>")]
    assert "malformed answer" in reason(engine)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda choice: choice.update(finish_reason="content_filter"), "content_filter"),
        (lambda choice: choice["logprobs"]["content"][0].update(logprob=0.4), "above 0"),
        (lambda choice: choice["logprobs"]["content"][0].update(bytes=[300]), "malformed"),
    ],
)
def test_impossible_answers_are_failures(engine: OpenAIEngine, server: OpenAIServer, edit: Any, message: str) -> None:
    server.change = lambda answer: [edit(choice) for choice in answer["choices"]] and answer
    assert message in reason(engine)


def test_bytes_are_made_of_the_text_where_a_server_gives_none(
    engine: OpenAIEngine, server: OpenAIServer, direct: TransformersEngine
) -> None:
    def change(answer: dict[str, Any]) -> dict[str, Any]:
        for token in answer["choices"][0]["logprobs"]["content"]:
            token["bytes"] = None
        return answer

    server.change = change
    there, [[here]] = ask(engine), direct.generate([request()], Sampling(6))
    assert isinstance(there, Generation) and isinstance(here, Generation)
    assert there.pieces == here.pieces


# settings read back


def test_a_server_as_it_should_be_passes(engine: OpenAIEngine) -> None:
    engine.check()


def test_another_image_grid_is_refused(engine: OpenAIEngine, server: OpenAIServer) -> None:
    """The server has another max_pixels: the prompt is shorter than our resize says."""

    def change(answer: dict[str, Any]) -> dict[str, Any]:
        answer["usage"]["prompt_tokens"] -= 3
        return answer

    server.change = change
    with pytest.raises(EngineRefused, match=r"counts \d+ prompt tokens; by our resize .* it must be \d+"):
        engine.check()


def test_log_probabilities_that_depend_on_the_temperature_are_refused(
    engine: OpenAIEngine, server: OpenAIServer
) -> None:
    def change(answer: dict[str, Any]) -> dict[str, Any]:
        cold = server.requests[-1]["temperature"] > 0
        for token in answer["choices"][0]["logprobs"]["content"]:
            token["logprob"] = -0.001 if cold else -0.8
        return answer

    server.change = change
    with pytest.raises(EngineRefused, match="--logprobs-mode raw_logprobs"):
        engine.check()


def test_what_is_wrong_with_an_endpoint_is_reported(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineRefused, match=r"does not serve 'huge' but tiny: correct `model`"):
        served_model(Endpoint(server.url, "huge", KEY))
    with pytest.raises(EngineRefused, match=r"refused the key.*api_key_env"):
        served_model(Endpoint(server.url, "tiny", "wrong"))
    with pytest.raises(EngineRefused, match=r"cannot be reached.*correct `base_url`"):
        served_model(Endpoint("http://127.0.0.1:9/v1", "tiny"))
    member = Member(model="tiny", engine="openai", base_url=server.url, api_key_env="COEPG_TEST_KEY")
    with pytest.raises(EngineRefused, match=r"COEPG_TEST_KEY .* is not set"):
        endpoint_of(member)
    monkeypatch.setenv("COEPG_TEST_KEY", KEY)
    assert served_model(endpoint_of(member))["id"] == "tiny"


def test_a_server_that_is_unwell_for_a_moment_is_asked_again_what_it_serves(server: OpenAIServer) -> None:
    """A step begins and ends with that question."""
    server.unwell = [503, 429, 500]
    assert served_model(Endpoint(server.url, "tiny", KEY))["id"] == "tiny"
    server.unwell = [529] * 9
    with pytest.raises(
        EngineRefused, match="answered with status 529 after 5 attempts: the server is not well, or busy"
    ):
        served_model(Endpoint(server.url, "tiny", KEY))
    assert len(server.unwell) == 4
    server.unwell = []


# prompts


@pytest.mark.parametrize("size", [(84, 112), (140, 84)])
def test_the_length_of_a_prompt_is_what_the_processor_makes_of_it(
    random_checkpoint: Callable[[int], Path], size: tuple[int, int]
) -> None:
    processor = load_processor(str(random_checkpoint(0)))
    query = request("Enter <|image_pad|> é into Name", Image.new("RGB", size))
    prompt = prompt_of(processor, query)
    made = processor(text=[prompt.text], images=[[query.image]])["input_ids"][0]
    assert prompt.tokens == len(made)


def test_an_image_that_a_model_would_resize_again_is_refused(random_checkpoint: Callable[[int], Path]) -> None:
    processor = load_processor(str(random_checkpoint(0)))
    with pytest.raises(ValueError, match="would resize"):
        prompt_of(processor, request(image=Image.new("RGB", (85, 112))))
