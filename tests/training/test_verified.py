"""A trained model is saved whole or not at all: it is loaded again, its tensors and its logits are compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from coepg_dagster.inference.files import IncompleteCheckpoint
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import load_checkpoint
from coepg_dagster.inference.weights import deciding_files
from coepg_dagster.store import digests, version_of
from coepg_dagster.training import verified
from coepg_dagster.training.examples import planner_examples
from coepg_dagster.training.verified import first_logits, save_whole


@pytest.fixture
def model_and_processor(random_checkpoint: Callable[[int], Path]) -> tuple[Any, Any]:
    return load_checkpoint(random_checkpoint(0), "float32", "cpu")


@pytest.fixture
def example(steps: pa.Table, dataset: pa.Table) -> Any:
    return planner_examples(dataset, steps, Screens(steps, (28, 3136, 50176)), "compact")[0]


def after_saving(monkeypatch: pytest.MonkeyPatch, model: Any, change: Callable[[Path], None]) -> None:
    """From now on what `model` saves is changed on its way to the disk."""
    save = type(model).save_pretrained

    def damaged(self: Any, folder: Path, **kwargs: Any) -> None:
        save(self, folder, **kwargs)
        change(folder)

    monkeypatch.setattr(type(model), "save_pretrained", damaged)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_whole_model_is_saved_and_reported(
    model_and_processor: tuple[Any, Any], example: Any, tmp_path: Path
) -> None:
    model, processor = model_and_processor
    expected = example, first_logits(model, processor, example)
    figures = save_whole(model, processor, tmp_path / "good", "float32", expected=expected)
    assert figures["parameters"] == sum(p.numel() for p in model.parameters())
    assert figures["tensors"] == len(model.state_dict())
    assert figures["logits_apart"] < 1e-6
    assert not any(file.is_dir() for file in (tmp_path / "good").iterdir())

    half, _ = load_checkpoint(tmp_path / "good", "bfloat16", "cpu")
    figures = save_whole(half, processor, tmp_path / "half", "bfloat16", expected=expected)
    assert 0 < figures["logits_apart"] < 0.05, "rounded, and not another model"
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_tied_weights_are_written_once_in_another_type_too(
    model_and_processor: tuple[Any, Any], tmp_path: Path
) -> None:
    """As on a GPU: what is written are copies, and the two names of a tied tensor have a copy each."""
    model, processor = model_and_processor
    assert model.config.tie_word_embeddings
    for dtype in ("float32", "bfloat16"):
        save_whole(model, processor, tmp_path / dtype, dtype)
        assert "lm_head.weight" not in load_file(tmp_path / dtype / "model.safetensors")


def test_weights_of_several_files_are_the_same_model_and_all_decide_its_version(
    model_and_processor: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = model_and_processor
    save_whole(model, processor, tmp_path / "one", "float32")
    monkeypatch.setattr(verified, "SHARD", "500KB")
    save_whole(model, processor, tmp_path / "many", "float32")
    one, many = (load_checkpoint(tmp_path / name, "float32", "cpu")[0].state_dict() for name in ("one", "many"))
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)
    assert deciding_files(tmp_path / "one") == ["config.json", "model.safetensors", "tokenizer.json"]
    weights = {name for name in deciding_files(tmp_path / "many") if name.endswith(".safetensors")}
    assert len(weights) > 1 and weights == {file.name for file in (tmp_path / "many").glob("*.safetensors")}
    versions = {version_of(digests(tmp_path / "many"), deciding_files(tmp_path / "many"))}
    for name in weights:
        tensors = load_file(tmp_path / "many" / name)
        next(iter(tensors.values())).view(-1)[0] += 1
        save_file(tensors, tmp_path / "many" / name, metadata={"format": "pt"})
        versions.add(version_of(digests(tmp_path / "many"), deciding_files(tmp_path / "many")))
    assert len(versions) == 1 + len(weights)


def shift(weights: dict[str, torch.Tensor]) -> None:
    weights["visual.blocks.0.attn.proj.weight"].view(-1)[0] += 1


def drop(weights: dict[str, torch.Tensor]) -> None:
    del weights["visual.blocks.0.attn.proj.weight"]


def add(weights: dict[str, torch.Tensor]) -> None:
    weights["visual.blocks.7.attn.proj.weight"] = torch.zeros(3)


def spoil(weights: dict[str, torch.Tensor]) -> None:
    weights["visual.blocks.0.attn.proj.weight"].view(-1)[0] = float("inf")


@pytest.mark.parametrize(
    ("change", "why"),
    [(shift, "is not what was trained"), (drop, "missing_keys"), (add, "unexpected_keys"), (spoil, "not finite")],
)
def test_files_that_do_not_hold_what_was_trained_are_refused_and_go(
    change: Any, why: str, model_and_processor: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = model_and_processor
    after_saving(monkeypatch, model, lambda folder: change_weights(folder, change))
    out = tmp_path / "bad"
    with pytest.raises(IncompleteCheckpoint, match=rf"{out}.*{why}|{why}") as refused:
        save_whole(model, processor, out, "float32")
    assert "visual.blocks" in str(refused.value) and ".saving" not in str(refused.value)
    assert list(out.iterdir()) == []


def test_a_model_that_answers_otherwise_is_refused(
    model_and_processor: tuple[Any, Any], example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor is right; a number in config.json is not."""
    model, processor = model_and_processor

    def other_rope(folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config["text_config"]["rope_parameters"]["rope_theta"] = 10.0
        file.write_text(json.dumps(config))

    after_saving(monkeypatch, model, other_rope)
    logits = first_logits(model, processor, example)
    with pytest.raises(IncompleteCheckpoint, match=r"answers differently.*config\.json"):
        save_whole(model, processor, tmp_path / "bad", "float32", expected=(example, logits))
    assert list((tmp_path / "bad").iterdir()) == []


def test_a_diverged_model_is_refused_before_anything_is_written(
    model_and_processor: tuple[Any, Any], tmp_path: Path
) -> None:
    model, processor = model_and_processor
    with torch.no_grad():
        model.model.visual.blocks[0].attn.proj.weight[:2] = float("nan")
    with pytest.raises(
        IncompleteCheckpoint, match=r"visual.blocks.0.attn.proj.weight: \d+ of \d+ values.*learning rate"
    ):
        save_whole(model, processor, tmp_path / "nan", "float32")
    assert not (tmp_path / "nan").exists()
