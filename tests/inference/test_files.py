"""Faults in the files of a checkpoint are reported before anything is computed with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from coepg_dagster.inference.files import (
    IncompleteCheckpoint,
    check,
    check_finite,
    check_size,
    faults,
    not_finite,
    weight_names,
)
from coepg_dagster.inference.weights import folder_version, local_folder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 2900000\n"
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def sharded(folder: Path) -> None:
    """The same weights in two shards."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(weights)
    parts = names[::2], names[1::2]
    for shard, part in zip(SHARDS, parts, strict=True):
        save_file({name: weights[name] for name in part}, folder / shard, metadata={"format": "pt"})
    where = {name: shard for shard, part in zip(SHARDS, parts, strict=True) for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.fixture
def single(random_checkpoint: Callable[[int], Path], tmp_path: Path) -> Path:
    return shutil.copytree(random_checkpoint(0), tmp_path / "single")


@pytest.fixture
def shards(random_checkpoint: Callable[[int], Path], tmp_path: Path) -> Path:
    folder = shutil.copytree(random_checkpoint(0), tmp_path / "shards")
    sharded(folder)
    return folder


def remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(keep * len(content))])

    return change


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def index_of(weight_map: Any) -> Callable[[Path], None]:
    return write(INDEX, json.dumps({"weight_map": weight_map}))


def test_whole_checkpoints_of_one_file_and_of_several(single: Path, shards: Path, either_checkpoint: Path) -> None:
    assert faults(single) == faults(shards) == faults(either_checkpoint) == []
    assert weight_names(single) == [WEIGHTS] and weight_names(shards) == SHARDS
    assert check(shards) == shards == local_folder(str(shards))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (write(WEIGHTS, POINTER), r"model\.safetensors is a git-lfs pointer.*git lfs pull"),
        (write("tokenizer.json", POINTER), r"tokenizer\.json is a git-lfs pointer.*git lfs pull"),
        (write("config.json", POINTER), r"config\.json is a git-lfs pointer.*git lfs pull"),
        (cut(WEIGHTS, 0.99), r"model\.safetensors is cut off or damaged.*again"),
        (cut(WEIGHTS, 0.0), r"model\.safetensors is cut off or damaged.*again"),
        (cut("tokenizer.json", 0.5), r"tokenizer\.json is cut off or damaged.*again"),
        (write("processor_config.json", "[]"), r"processor_config\.json holds no JSON object"),
        (write("config.json", 100_000 * "["), r"config\.json is cut off or damaged"),
        (remove("config.json"), r"no configuration \(config\.json\)"),
        (remove("tokenizer.json"), r"no tokenizer \(tokenizer\.json, or vocab\.json and merges\.txt\)"),
        (remove("processor_config.json"), r"no image processor"),
        (remove("chat_template.jinja"), r"no chat template"),
        (remove(WEIGHTS), r"holds no \*\.safetensors: copy or download the weights too"),
        (pickled, r"holds no \*\.safetensors but pytorch_model\.bin.*convert"),
        (lambda folder: save_file({}, folder / WEIGHTS), r"without any tensor"),
    ],
)
def test_what_is_missing_cut_off_or_a_pointer_is_named(single: Path, change: Callable[[Path], Any], says: str) -> None:
    change(single)
    with pytest.raises(IncompleteCheckpoint, match=says):
        check(single)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (remove(SHARDS[1]), rf"lacks {SHARDS[1]}, which {INDEX} names"),
        (remove(*SHARDS), rf"lacks {SHARDS[0]}.*lacks {SHARDS[1]}"),
        (remove(INDEX), rf"neither {WEIGHTS} nor {INDEX}, only {SHARDS[0]}, {SHARDS[1]}"),
        (write(INDEX, POINTER), "git lfs pull"),
        (write(SHARDS[0], POINTER), rf"{SHARDS[0]} is a git-lfs pointer"),
        (cut(INDEX, 0.5), f"{INDEX} is cut off"),
        (cut(SHARDS[1], 0.5), f"{SHARDS[1]} is cut off"),
        (index_of({"more": SHARDS[0]}), f"lack tensors that {INDEX} names: more"),
        (index_of({}), "`weight_map` must name"),
        (index_of([SHARDS[0]]), "`weight_map` must name"),
        (index_of({"a": "../other/model.safetensors"}), "`weight_map` must name"),
        (index_of({"a": "pytorch_model.bin"}), "`weight_map` must name"),
    ],
)
def test_shards_are_those_of_their_index(shards: Path, change: Callable[[Path], None], says: str) -> None:
    change(shards)
    for look in (check, folder_version):
        with pytest.raises(IncompleteCheckpoint, match=says):
            look(shards)


def test_all_faults_are_named_at_once(single: Path) -> None:
    for change in (remove("tokenizer.json", "config.json"), cut(WEIGHTS, 0.5)):
        change(single)
    assert len(faults(single)) == 3
    assert len(faults(single, weights=False)) == 1, "a processor needs neither configuration nor weights"
    [missing] = faults(single / "nowhere")
    assert "there is no checkpoint folder" in missing


def test_fewer_weights_than_the_configuration_describes(single: Path, shards: Path, either_checkpoint: Path) -> None:
    for folder in (shards, either_checkpoint):
        check_size(folder)
    weights = load_file(single / WEIGHTS)
    lost = sorted(weights)[-1]
    save_file({name: weights[name] for name in weights if name != lost}, single / WEIGHTS, metadata={"format": "pt"})
    check(single)
    with pytest.raises(
        IncompleteCheckpoint, match=r"config\.json describes [\d,]+ parameters, the weights hold [\d,]+: some"
    ):
        check_size(single)
    (shards / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(IncompleteCheckpoint, match="'llama' is not known here"):
        check_size(shards)


def test_a_chat_template_may_be_part_of_another_file(single: Path) -> None:
    template = (single / "chat_template.jinja").read_text()
    (single / "chat_template.jinja").unlink()
    file = single / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    assert faults(single) == []


KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(width=16), min_size=1, max_size=9),
    kind=st.sampled_from(KINDS),
    before=st.integers(0, 5),
)
def test_tensors_with_nan_or_infinity_are_those_that_torch_names(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], kind: torch.dtype, before: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "finite.safetensors"
    tensor = torch.tensor(values, dtype=torch.float64).to(kind)
    save_file(
        {"a": torch.zeros(before, dtype=torch.uint8), "whole": torch.full((2,), -1, dtype=torch.int32), "b": tensor},
        file,
    )
    assert not_finite(file) == ([] if torch.isfinite(tensor.float()).all() else ["b"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_error_for_nan_weights_advises_a_new_copy(shards: Path, value: float) -> None:
    check_finite(shards)
    weights = load_file(shards / SHARDS[1])
    name = sorted(weights)[0]
    weights[name].view(-1)[-1] = value
    save_file(weights, shards / SHARDS[1], metadata={"format": "pt"})
    with pytest.raises(IncompleteCheckpoint, match=rf"NaN or infinite: {name} in {SHARDS[1]}: copy"):
        check_finite(shards)
