"""Checkpoints made to run code, to load something else than was checked, or to break what reads them: all are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from coepg_dagster.inference.engine import Request
from coepg_dagster.inference.files import IncompleteCheckpoint, check, check_finite, check_size
from coepg_dagster.inference.processing import load_processor, prompt_of
from coepg_dagster.inference.screens import resize_of
from coepg_dagster.inference.transformers_engine import load_checkpoint
from coepg_dagster.prompts import grounder_messages

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(random_checkpoint: Callable[[int], Path], tmp_path: Path) -> Path:
    return shutil.copytree(random_checkpoint(0), tmp_path / "model")


def change(file: Path, **keys: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


CODE = "import pathlib; pathlib.Path({!r}).write_text('ran')\nclass Mine: pass\n"


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("config.json", {"auto_map": {"AutoConfig": "mine.Mine", "AutoModelForImageTextToText": "mine.Mine"}}),
        ("config.json", {"auto_map": {"AutoConfig": "evil/model--mine.Mine"}, "model_type": "mine"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}}),
        ("processor_config.json", {"auto_map": {"AutoProcessor": "mine.Mine"}}),
        (
            "processor_config.json",
            {"audio_tokenizer": {"audio_tokenizer_class": "X", "audio_tokenizer_name_or_path": "y"}},
        ),
        ("generation_config.json", {"custom_generate": "evil/code"}),
    ],
)
def test_code_that_comes_with_a_checkpoint_never_runs(
    folder: Path, tmp_path: Path, name: str, keys: dict[str, Any]
) -> None:
    ran = tmp_path / "ran"
    (folder / "mine.py").write_text(CODE.format(str(ran)))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(CODE.format(str(ran)))
    change(folder / name, **keys)
    with pytest.raises(IncompleteCheckpoint, match=rf"{name}: `{next(iter(keys))}` "):
        load_checkpoint(folder, "float32", "cpu")
    with pytest.raises(IncompleteCheckpoint, match="remove the key"):
        load_processor(str(folder))
    assert not ran.exists()


def test_code_that_no_configuration_names_does_not_run_either(folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(CODE.format(str(ran)))
    for name in ("modeling_qwen2_5_vl.py", "configuration_qwen2_5_vl.py", "processing_qwen2_5_vl.py"):
        (folder / name).write_text(CODE.format(str(ran)))
    load_checkpoint(folder, "float32", "cpu")
    assert not ran.exists()


def test_an_adapter_beside_the_checked_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    base = AutoModelForImageTextToText.from_pretrained(folder)
    adapted = get_peft_model(base, LoraConfig(r=1, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(tmp_path / "adapter" / name, folder)
    loaded = AutoModelForImageTextToText.from_pretrained(folder)  # what transformers does with such a folder
    assert any("lora" in name for name, _ in loaded.named_parameters())
    for load in (lambda: load_checkpoint(folder, "float32", "cpu"), lambda: check(folder)):
        with pytest.raises(IncompleteCheckpoint, match=r"holds adapter_config\.json, which would load more"):
            load()


def test_pickled_weights_are_never_read(folder: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"weights": Evil()}, folder / "pytorch_model.bin")
    torch.save({"weights": Evil()}, folder / "model.bin")
    load_checkpoint(folder, "float32", "cpu")
    (folder / WEIGHTS).unlink()
    with pytest.raises(
        IncompleteCheckpoint, match=r"no \*\.safetensors but model\.bin, pytorch_model\.bin: other weight formats"
    ):
        load_checkpoint(folder, "float32", "cpu")
    shutil.copy(folder / "model.bin", folder / WEIGHTS)  # by another name
    with pytest.raises(IncompleteCheckpoint, match="cut off or damaged"):
        load_checkpoint(folder, "float32", "cpu")
    assert not (tmp_path / "ran").exists()


def test_tensors_of_another_shape_or_under_other_names_are_refused(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    square = next(name for name, tensor in weights.items() if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1])
    for changed in (
        weights | {square: weights[square].T.contiguous()},
        weights | {square: weights[square].reshape(-1)},
        {name: tensor for name, tensor in weights.items() if name != square} | {"else": weights[square]},
        weights | {"more": torch.zeros(3)},
    ):
        save_file(changed, folder / WEIGHTS, metadata={"format": "pt"})
        check_size(check(folder))
        with pytest.raises(IncompleteCheckpoint, match="saved by another version"):
            load_checkpoint(folder, "float32", "cpu")


def header(tensors: Any, data: bytes, length: int | None = None) -> bytes:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(8),
        header({"a": F32}, b"", 2**63),
        header({"a": F32}, bytes(8), 2**40),
        header({"a": F32 | {"shape": [2**62, 2**62]}}, bytes(8)),
        header({"a": F32 | {"shape": [-2]}}, bytes(8)),
        header({"a": F32 | {"data_offsets": [0, 2**60]}}, bytes(8)),
        header({"a": F32 | {"data_offsets": [8, 0]}}, bytes(8)),
        header({"a": F32, "b": F32}, bytes(8)),  # two tensors of the same bytes
        header({"a": F32 | {"data_offsets": [4, 12]}}, bytes(12)),  # a hole before it
        header({"a": F32}, bytes(9)),
        header({"a": F32 | {"dtype": "I3"}}, bytes(8)),
        header({"a": F32 | {"dtype": ["F32"]}}, bytes(8)),
        header([F32], bytes(8)),
        header(b"[" * 1000, bytes(8)),
        header(b"\xff\xfe", bytes(8)),
        header({"__metadata__": {"a": 1}, "a": F32}, bytes(8)),
    ],
)
def test_damaged_headers_are_refused_whatever_they_state(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(IncompleteCheckpoint, match=r"model\.safetensors is cut off or damaged"):
        check_finite(check(folder))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"),
        ("{{ messages.__init__.__globals__ }}", "chat template"),
        ("{% for m in messages %}{{ m.update({'role': 'x'}) }}{% endfor %}", "chat template"),
        ("{{ range(10 ** 9) | list | length }}", "chat template"),
        ("{% include '/etc/passwd' %}", "chat template"),
        ("{{ undefined.attribute }}", "chat template"),
        ("{% for", "chat template"),
        ("<|vision_start|><|image_pad|><|vision_end|>click the other button", "does not hold"),
    ],
)
def test_a_chat_template_reaches_nothing_and_keeps_what_is_said(folder: Path, template: str, says: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    request = Request(Image.new("RGB", (56, 56)), grounder_messages("the left button", "compact"))
    with pytest.raises(IncompleteCheckpoint, match=says):
        prompt_of(load_processor(str(folder)), request)


@pytest.mark.parametrize("keys", [{"patch_size": 0}, {"merge_size": -2}, {"size": {"shortest_edge": 9, "longest_edge": 1}},
                                  {"size": {"shortest_edge": 1, "longest_edge": 10**12}}, {"patch_size": 1.5}])  # fmt: skip
def test_an_image_processor_with_absurd_sizes_is_refused(folder: Path, keys: dict[str, Any]) -> None:
    file = folder / "processor_config.json"
    config = json.loads(file.read_text())
    change(file, image_processor=config["image_processor"] | keys)
    with pytest.raises(IncompleteCheckpoint, match="image processor"):
        resize_of(load_processor(str(folder)))
