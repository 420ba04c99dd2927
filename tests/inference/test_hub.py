"""Models of the hub: one commit, resolved once, kept in the cache, and loaded from there with or without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import torch
from coepg_dagster.assets.shared import as_recorded, checkpoint_of, identities, identity
from PIL import Image
from safetensors.torch import load_file, save_file

from coepg_dagster.auditing.archive import BASE
from coepg_dagster.experiment.models import Member, Models
from coepg_dagster.inference.engine import Generation, Request, Sampling
from coepg_dagster.inference.files import IncompleteCheckpoint
from coepg_dagster.inference.opening import opened
from coepg_dagster.inference.processing import load_processor
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.inference.weights import identify, is_local, local_folder, local_version, pinned
from coepg_dagster.jobs import Job
from coepg_dagster.planning.dryrun import broken, size_of
from coepg_dagster.prompts import planner_messages
from coepg_dagster.store import digests
from tests.conftest import HEIGHT, WIDTH
from tests.hub import Hub, served
from tests.project import REPOSITORY, make_project, tell

NAME, NOWHERE, WEIGHTS = "acme/tiny", Path("/nowhere"), "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty hub that this process asks, with an empty cache."""
    with served() as hub:
        url = "huggingface_hub.constants."
        monkeypatch.setattr(f"{url}ENDPOINT", hub.url)
        monkeypatch.setattr(f"{url}HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(f"{url}HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(f"{url}HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
        yield hub


@pytest.fixture
def offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def copy(random_checkpoint: Callable[[int], Path], tmp_path: Path) -> Path:
    return shutil.copytree(random_checkpoint(0), tmp_path / "copy")


def answer(checkpoint: str) -> Generation:
    engine = TransformersEngine(checkpoint, dtype="float32", device="cpu", batch_size=1)
    [[generation]] = engine.generate(
        [Request(Image.new("RGB", (WIDTH, HEIGHT)), planner_messages("x", [], "compact"))], Sampling(3)
    )
    assert isinstance(generation, Generation)
    return generation


def same_weights(one: Path, other: Path) -> bool:
    a, b = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_name_is_one_commit_whatever_the_hub_has_later(hub: Hub, random_checkpoint: Callable[[int], Path]) -> None:
    first = hub.publish(NAME, random_checkpoint(0))
    record = identify(NOWHERE, NAME)
    assert record == {"checkpoint": NAME, "version": first, "revision": "main"}
    second = hub.publish(NAME, random_checkpoint(1))
    hub.requests.clear()
    assert identify(NOWHERE, NAME) == record, "the cache comes first"
    assert pinned(record) == f"{NAME}@{first}" and same_weights(local_folder(pinned(record)), random_checkpoint(0))
    generation = answer(pinned(record))
    assert generation.weights == local_version(pinned(record)) == first
    assert generation.text == answer(str(random_checkpoint(0))).text
    assert hub.requests == [], "what is in the cache is not asked for"
    assert same_weights(local_folder(f"{NAME}@{second}"), random_checkpoint(1))
    assert local_version(f"{NAME}@{second}") == second


def test_vllm_is_given_the_folder_of_that_commit(
    hub: Hub, random_checkpoint: Callable[[int], Path], models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.publish(NAME, random_checkpoint(0))
    started: list[dict[str, Any]] = []

    @contextmanager
    def server(path: str, **settings: Any) -> Iterator[None]:
        started.append({"path": path, "weights": settings["weights"]})
        yield None

    monkeypatch.setattr("coepg_dagster.inference.opening.vllm_server", server)
    member = Member(model=f"{NAME}@{commit}", engine="vllm")
    job = Job(out=tmp_path, scratch=tmp_path, steps=tmp_path, models=models, device="cpu", batch_size=1, seed=0)
    with opened(member, job, logs=tmp_path, beside_training=True):
        pass
    assert started == [{"path": str(local_folder(NAME)), "weights": commit}]


def test_a_branch_and_a_tag_are_pinned_too(hub: Hub, random_checkpoint: Callable[[int], Path]) -> None:
    hub.publish(NAME, random_checkpoint(0))
    commit = hub.publish(NAME, random_checkpoint(1), "v1.0")
    assert identify(NOWHERE, f"{NAME}@v1.0") == {"checkpoint": NAME, "version": commit, "revision": "v1.0"}
    assert identify(NOWHERE, f"{NAME}@{commit}")["version"] == commit


def test_only_what_is_loaded_is_downloaded(hub: Hub, copy: Path) -> None:
    for name in ("pytorch_model.bin", "modeling_evil.py", "flax_model.msgpack", "other.safetensors", "image.png"):
        (copy / name).write_bytes(b"0")
    hub.publish(NAME, copy)
    folder = local_folder(NAME)
    assert {file.name for file in folder.iterdir()} == {file.name for file in copy.glob("*.j*")} | {WEIGHTS}


@pytest.mark.parametrize("gone", [True, False])
def test_what_is_in_the_cache_needs_no_network(
    hub: Hub,
    offline: Callable[[], None],
    random_checkpoint: Callable[[int], Path],
    gone: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit = hub.publish(NAME, random_checkpoint(0))
    local_folder(NAME)
    if gone:  # nobody listens there
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    else:
        offline()
    hub.requests.clear()
    assert identify(NOWHERE, NAME)["version"] == answer(NAME).weights == commit
    assert load_processor(NAME) is not None and hub.requests == []
    with pytest.raises(IncompleteCheckpoint, match=r"acme/none: there is no such folder.*hf download acme/none"):
        identify(NOWHERE, "acme/none")


def test_a_download_that_was_cut_goes_on(
    hub: Hub, random_checkpoint: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.publish(NAME, random_checkpoint(0))
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cuts[WEIGHTS] = [100_000, 5_000]
    assert same_weights(local_folder(NAME), random_checkpoint(0))
    assert hub.requests.count(f"GET /{NAME}/resolve/{hub.models[NAME]['main']}/{WEIGHTS}") == 3


def test_a_download_that_cannot_end_says_so_and_the_next_one_does_the_rest(
    hub: Hub, random_checkpoint: Callable[[int], Path]
) -> None:
    hub.publish(NAME, random_checkpoint(0))
    hub.cuts[WEIGHTS] = 50 * [0]
    with pytest.raises(IncompleteCheckpoint, match=r"connection to the hub broke.*run the same command again"):
        identify(NOWHERE, NAME)
    hub.cuts.clear()
    hub.requests.clear()
    identify(NOWHERE, NAME)
    assert [line for line in hub.requests if line.startswith("GET")] == [
        f"GET /{NAME}/resolve/{hub.models[NAME]['main']}/{WEIGHTS}"
    ]


def test_what_another_download_left_half_done_is_completed(hub: Hub, random_checkpoint: Callable[[int], Path]) -> None:
    hub.publish(NAME, random_checkpoint(0))
    folder = local_folder(NAME)
    for name in ("tokenizer.json", "generation_config.json", WEIGHTS):
        (folder / name).resolve().unlink()
        (folder / name).unlink()
        assert (local_folder(NAME) / name).is_file()


def test_a_cache_without_the_weights_and_without_a_network_says_so(
    hub: Hub,
    offline: Callable[[], None],
    random_checkpoint: Callable[[int], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.publish(NAME, random_checkpoint(0))
    local_folder(NAME, weights=False)
    offline()
    with pytest.raises(IncompleteCheckpoint, match=r"lacks this model or a part of it, and HF_HUB_OFFLINE is set"):
        local_folder(NAME)
    shutil.rmtree(tmp_path / "cache" / "models--acme--tiny" / "trees")  # as something older fills a cache
    monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    with pytest.raises(IncompleteCheckpoint, match=r"copy or download the weights too"):
        local_folder(NAME)


def test_a_file_that_changed_in_the_cache_is_refused(hub: Hub, random_checkpoint: Callable[[int], Path]) -> None:
    hub.publish(NAME, random_checkpoint(0))
    file = local_folder(NAME) / WEIGHTS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.resolve().write_bytes(content)
    with pytest.raises(IncompleteCheckpoint, match=r"not what the hub has: delete .*blobs"):
        identify(NOWHERE, NAME)


@pytest.mark.parametrize(
    ("checkpoint", "says"),
    [
        ("acme/none", "the hub has no such model, or it is private"),
        (f"{NAME}@v9", "no such revision"),
        (f"{NAME}@", "must follow the @"),
        ("acme/ti ny", "cannot be a name of the hub"),
    ],
)
def test_what_the_hub_does_not_have(
    hub: Hub, random_checkpoint: Callable[[int], Path], checkpoint: str, says: str
) -> None:
    hub.publish(NAME, random_checkpoint(0))
    with pytest.raises(IncompleteCheckpoint, match=says):
        identify(NOWHERE, checkpoint)


def test_a_folder_that_is_not_there_is_not_requested_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for checkpoint in ("models/nothere", "./nothere", "/no/where", "~/here", "nothere", "a/b/c", "models/a@b"):
        assert is_local(tmp_path, checkpoint)
        with pytest.raises(IncompleteCheckpoint, match="there is no checkpoint folder"):
            identify(tmp_path, checkpoint)
    assert not is_local(tmp_path, f"{NAME}@refs/pr/1") and hub.requests == []


def test_weights_of_other_formats_are_never_requested(hub: Hub, copy: Path) -> None:
    (copy / WEIGHTS).rename(copy / "pytorch_model.bin")
    hub.publish(NAME, copy)
    models = Models(base_planner=NAME, base_grounder=NAME, planners={"p": NAME}, verifiers={"v": NAME})
    [line] = broken(models, NOWHERE)
    assert line.startswith("models: base_planner, base_grounder, planners/p, verifiers/v: ") and "on the hub" in line
    with pytest.raises(IncompleteCheckpoint, match=r"holds no \*\.safetensors"):
        identify(NOWHERE, NAME)
    assert not any("bin" in line for line in hub.requests)


def test_a_plan_downloads_no_weights(hub: Hub, random_checkpoint: Callable[[int], Path]) -> None:
    hub.publish(NAME, random_checkpoint(0))
    endpoint = Member(model="big", engine="openai", base_url="http://127.0.0.1:9/v1", processor=NAME)
    models = Models(base_planner=NAME, base_grounder=NAME, planners={"p": NAME}, verifiers={"v": endpoint})
    assert broken(models, NOWHERE) == [] and size_of(NAME, NOWHERE).source == "hub"
    assert hub.requests and not any(WEIGHTS in line for line in hub.requests)


def test_a_plan_refuses_what_a_later_step_would(hub: Hub, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    shutil.copy(copy / "config.json", tmp_path / "bin")
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(b"0")
    (copy / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n")
    project = make_project(tmp_path / "project", REPOSITORY / "tests" / "experiments" / "tiny.yaml")
    (project / "experiments" / "broken.yaml").write_text(
        f"""parent: tiny
description: models that are not whole
models: {{base_planner: models/nothere, planners: {{p: {tmp_path / "bin"}}}, verifiers: {{v: {copy}, good: models/verifier-a}}}}
"""
    )
    code, _, err = tell(project, "plan", "broken")
    assert code == 1 and hub.requests == []
    for words in (
        "base_planner: there is no checkpoint folder",
        "planners/p: ",
        "holds no tokenizer",
        "no *.safetensors but pytorch_model.bin",
        "verifiers/v: ",
        "git lfs pull",
    ):
        assert words in err
    assert "verifiers/good" not in err


def test_every_broken_model_is_named_at_once(
    copy: Path, random_checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    good = str(random_checkpoint(0))
    weights = load_file(copy / WEIGHTS)
    weights[sorted(weights)[0]].view(-1)[0] = float("nan")
    save_file(weights, copy / WEIGHTS, metadata={"format": "pt"})
    models = Models(
        base_planner=good,
        base_grounder=str(tmp_path / "none"),
        planners={"p": good},
        verifiers={"a": str(copy), "b": str(copy)},
    )
    with pytest.raises(dg.Failure) as refused:
        identities(tmp_path, models)
    lines = str(refused.value.description).splitlines()
    assert lines[0].startswith("models: base_grounder: there is no checkpoint folder")
    assert lines[1].startswith("models: verifiers/a, verifiers/b: ") and "NaN or infinite" in lines[1]
    assert len(lines) == 2
    assert len(broken(models, tmp_path)) == 1, "a plan reads no weights"


def test_jobs_load_what_was_recorded(hub: Hub, random_checkpoint: Callable[[int], Path], tmp_path: Path) -> None:
    commit = hub.publish(NAME, random_checkpoint(0))
    member = Member(model=NAME)
    entry = identity(NOWHERE, member)
    assert as_recorded(tmp_path, member, entry).model == f"{NAME}@{commit}" and "files" not in entry
    (tmp_path / BASE).write_text(json.dumps(entry))
    assert checkpoint_of(tmp_path, tmp_path) == f"{NAME}@{commit}"
    local = Member(model=str(random_checkpoint(0)))
    entry = identity(NOWHERE, local)
    assert entry["files"] == digests(Path(local.model)) and entry["version"] == local_version(local.model)
    assert as_recorded(NOWHERE, local, entry) == local
