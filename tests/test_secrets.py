"""Keys are planted in every place where one can be given, and looked for in everything that is written or printed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from pydantic import ValidationError

from coepg_dagster.experiment.files import find_experiments
from coepg_dagster.experiment.models import Serving
from coepg_dagster.experiment.strict import ExperimentError, checked
from coepg_dagster.inference.endpoint import Endpoint, served_model, short
from coepg_dagster.inference.engine import EngineRefused
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.planning.machine import EndpointSettings, load_machine
from coepg_dagster.refusal import without_credentials
from tests.assets.light import EXPERIMENT
from tests.inference.openai_server import OpenAIServer

KEY = "PLANTED-b6a1"
"""Part of every secret."""

REMOTE = {"model": "tiny", "engine": "openai", "base_url": "http://127.0.0.1:9/v1"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("models.verifiers.v", REMOTE | {"api_key": KEY}),
        ("models.verifiers.v", REMOTE | {"api_key_env": f"sk-{KEY}"}),
        ("models.verifiers.v", REMOTE | {"base_url": f"http://user:{KEY}@127.0.0.1/v1"}),
        ("models.verifiers.v", REMOTE | {"base_url": f"http://127.0.0.1/v1?key={KEY}"}),
        ("models.verifiers.v", REMOTE | {"base_url": f"http://127.0.0.1/v1#{KEY}"}),
        ("models.verifiers.v", REMOTE | {"base_url": f"user:{KEY}@127.0.0.1/v1"}),
        ("models.verifiers.v", [{"api_key": KEY}]),
        ("models.verifiers.v", REMOTE | {"engine": {"api_key": KEY}}),
        ("models.verifiers.v", f"https://user:{KEY}@example.org/owner/name"),
        ("models.base_planner", f"https://user:{KEY}@example.org/owner/name"),
        ("models.hf_token", KEY),
        ("api_key", {"of": [KEY]}),
        ("models.judge", {"model": "x", "processor": f"https://{KEY}@example.org/a/b"}),
    ],
)
def test_an_experiment_file_with_a_key_is_refused_without_repeating_it(tmp_path: Path, key: str, value: Any) -> None:
    experiment = yaml.safe_load(EXPERIMENT)
    *outer, last = key.split(".")
    at = experiment
    for part in outer:
        at = at.setdefault(part, {})
    at[last] = value
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(experiment))
    left_out = find_experiments(tmp_path).left_out["x"]
    assert outer[0] if outer else key in left_out
    assert "PLANTED" not in left_out, left_out


@pytest.mark.parametrize(
    "profile",
    [
        {"endpoints": {"v": {"base_url": f"http://user:{KEY}@127.0.0.1/v1"}}},
        {"endpoints": {"v": {"api_key_env": f"sk-{KEY}"}}},
        {"endpoints": {"v": {"api_key": KEY}}},
        {"vllm": {"arguments": ["--api-key", KEY]}},
        {"vllm": {"arguments": [f"--api_key={KEY}"]}},
        {"vllm": {"arguments": [f"--hf-token={KEY}"]}},
        {"vllm": {"rollout_server": f"http://user:{KEY}@127.0.0.1:8000"}},
        {"vllm": {"api_key": KEY}},
        {"sft": {"ray_address": f"ray://user:{KEY}@127.0.0.1:10001"}},
        {"inference": {"ray_address": f"user:{KEY}@127.0.0.1:6379"}},
        {"grpo_cdrem": {"ray_address": f"ray://127.0.0.1:10001?key={KEY}"}},
        {"sft": {"tracking": {"wandb": KEY}}},
        {"hf_token": KEY},
    ],
)
def test_a_machine_profile_with_a_key_is_refused_without_repeating_it(tmp_path: Path, profile: dict[str, Any]) -> None:
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(profile))
    with pytest.raises(ExperimentError) as refused:
        load_machine(tmp_path / "m.yaml")
    assert "PLANTED" not in str(refused.value), refused.value


def test_the_launchpad_refuses_a_key_without_repeating_it() -> None:
    from coepg_dagster.resources.training import EnginesResource, SftResource

    for use in (
        EnginesResource(vllm_arguments=["--api-key", KEY]).serving,
        EnginesResource(rollout_server=f"http://u:{KEY}@host").serving,
        SftResource(ray_address=f"ray://user:{KEY}@127.0.0.1:10001").settings,
    ):
        with pytest.raises(ExperimentError) as refused:
            use()
        assert "PLANTED" not in str(refused.value)
    with pytest.raises(ValidationError):
        Serving(arguments=["--api-key", KEY])
    with pytest.raises(ExperimentError) as refused:
        checked(EndpointSettings, {"base_url": f"http://:{KEY}@h"}, "endpoints")
    assert "PLANTED" not in str(refused.value)


def test_errors_of_libraries_lose_user_and_password() -> None:
    for address in (f"http://user:{KEY}@host:1/x", f"https://{KEY}@host", f"socks5://u:{KEY}@127.0.0.1:9"):
        assert (
            without_credentials(f"for url '{address}' (x@y)")
            == f"for url '{address.split('//')[0]}//…@{address.split('@')[1]}' (x@y)"
        )
        assert "PLANTED" not in short(httpx.ConnectError(f"cannot reach {address}"))
    assert without_credentials("a@b http://host/a@b") == "a@b http://host/a@b"


@pytest.fixture
def endpoint(random_checkpoint: Any) -> Iterator[OpenAIServer]:
    engine = TransformersEngine(random_checkpoint(0), dtype="float32", device="cpu", batch_size=2)
    server = OpenAIServer(engine, key=KEY).start()
    yield server
    server.stop()


def test_a_server_that_repeats_the_key_is_not_believed(endpoint: OpenAIServer, random_checkpoint: Any) -> None:
    from PIL import Image

    from coepg_dagster.inference.engine import Failure, Request, Sampling
    from coepg_dagster.inference.openai_engine import OpenAIEngine
    from coepg_dagster.inference.processing import load_processor
    from coepg_dagster.prompts import grounder_messages

    engine = OpenAIEngine(Endpoint(endpoint.url, "tiny", KEY), load_processor(str(random_checkpoint(0))))
    request = Request(Image.new("RGB", (84, 112)), grounder_messages("here", "compact"))
    endpoint.change = lambda answer: answer | {"model": KEY}
    [[answer]] = engine.generate([request], Sampling(4))
    engine.close()
    assert isinstance(answer, Failure) and answer.reason == "the answer repeats the key"
    endpoint.reports = {"owned_by": KEY}
    with pytest.raises(EngineRefused, match=r"repeats the key"):
        served_model(Endpoint(endpoint.url, "tiny", KEY))


@pytest.mark.parametrize("key", ["k", "no", "EMPTY", "none", "password", "token-abc12"])
def test_an_answer_may_contain_a_placeholder_that_stands_for_a_key(key: str) -> None:
    assert not Endpoint("http://127.0.0.1:1/v1", "m", key).repeats_key(f"Type {key} in the field")
    assert Endpoint("http://127.0.0.1:1/v1", "m", key * 12).repeats_key(f"Type {key * 12} in the field")
