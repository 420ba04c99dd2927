"""The files of a checkpoint: which ones are loaded, what is wrong with them, and which weights are not finite.

Only headers and bytes are read, so that `coepg plan` needs no model library. Every checkpoint is checked here before loading.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open

from coepg_dagster.inference.architecture import UnknownModel, read
from coepg_dagster.pictures import LFS_POINTER
from coepg_dagster.progress import Ended

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file with all weights; the file that says which shard holds which tensor."""

DESCRIPTION: Final = (
    "config.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)
"""The files of a checkpoint that transformers reads besides weights; not every checkpoint has all of them."""

PROCESSOR: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "tokenizer": (("tokenizer.json",), ("vocab.json", "merges.txt")),
    "image processor": (("preprocessor_config.json",), ("processor_config.json",)),
    "chat template": (("chat_template.jinja",), ("chat_template.json",)),
}
"""Part of a processor → the alternatives of files that it is made from."""

REDIRECTING: Final = ("adapter_config.json", "audio_tokenizer_config.json")
"""Files for which transformers loads more than what was checked: an adapter, also a pickled one, or another model."""
FOREIGN: Final[Mapping[str, str]] = {
    "auto_map": "asks for code of its own, which is never run",
    "custom_generate": "asks for code of its own, which is never run",
    "audio_tokenizer": "names another model, which was not checked",
}
"""Keys of the files that describe a checkpoint → why it is refused."""
MAX_DESCRIPTION: Final = 1 << 28
"""Bytes of a file that describes a checkpoint; the largest tokenizers have about 20 MB."""
PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack")


class IncompleteCheckpoint(Ended, ValueError):
    """A checkpoint that is missing, incomplete, or not what it should be; the message says what to do."""


def weight_names(folder: Path) -> list[str]:
    """The names of the files from which transformers loads the weights, whether or not they exist.

    Raises IncompleteCheckpoint if the index of the shards cannot be read.
    """
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return [WEIGHTS]
    return sorted(set(_weight_map(folder / INDEX).values()))


def faults(folder: Path, *, weights: bool = True) -> list[str]:
    """Everything that keeps a checkpoint folder from being loaded, each with what to do; empty: it is complete.

    Args:
        weights: whether a model is loaded, or its processor alone.
    """
    if not folder.is_dir():
        return [f"there is no checkpoint folder {folder}: make it, or correct the name in `models`"]
    wrong = [fault for name in DESCRIPTION if (fault := _unreadable(folder / name) or _foreign(folder / name))]
    wrong += [
        f"{folder} holds {name}, which would load more than these weights: merge an adapter into them, or remove the file"
        for name in REDIRECTING
        if (folder / name).exists()
    ]
    needed = {**({"configuration": (("config.json",),)} if weights else {}), **PROCESSOR}
    for what, alternatives in needed.items():
        there = any(all((folder / name).is_file() for name in names) for names in alternatives)
        if not there and not (what == "chat template" and _has_inner_template(folder)):
            files = ", or ".join(" and ".join(names) for names in alternatives)
            wrong.append(f"{folder} holds no {what} ({files}): copy it from the model that this one was made from")
    return wrong + (weight_faults(folder) if weights else [])


def weight_faults(folder: Path) -> list[str]:
    """What is wrong with the weights of a folder: none there, some missing, cut off, or a git-lfs pointer in their place."""
    try:
        names = weight_names(folder)
    except IncompleteCheckpoint as error:
        return [str(error)]
    if names == [WEIGHTS] and not (folder / WEIGHTS).exists():
        return [_no_weights(folder)]
    wrong, held = [], set()
    for name in names:
        file = folder / name
        if not file.is_file():
            wrong.append(f"{folder} lacks {name}, which {INDEX} names: copy or download it too")
        elif _is_pointer(file):
            wrong.append(_pointer(file))
        else:
            try:
                with safe_open(file, framework="np") as tensors:  # compares the header with the size of the file
                    held.update(tensors.keys())
            except (SafetensorError, OSError) as error:
                wrong.append(f"{file} is cut off or damaged ({error}): copy or download it again")
    wanted = set() if names == [WEIGHTS] else set(_weight_map(folder / INDEX))
    if not wrong and (lost := sorted(wanted - held)):
        wrong.append(f"{folder}: the files lack tensors that {INDEX} names: {_some(lost)}; copy or download them again")
    if not wrong and not held:
        wrong.append(f"{folder} holds weights without any tensor: copy or download them again")
    return wrong


def check(folder: Path, *, weights: bool = True) -> Path:
    """The folder, if it is complete. Raises IncompleteCheckpoint with all its `faults`."""
    if wrong := faults(folder, weights=weights):
        raise IncompleteCheckpoint("; ".join(wrong))
    return folder


def check_size(folder: Path) -> None:
    """Raises IncompleteCheckpoint if config.json describes another kind of model, or more weights than there are.

    The folder must be complete (`check`). Quantized weights, which are packed, are not counted.
    """
    try:
        wanted = read(folder).parameters
    except UnknownModel as error:
        raise IncompleteCheckpoint(str(error)) from None
    if "quantization_config" in json.loads((folder / "config.json").read_bytes()):
        return
    held = 0
    for name in weight_names(folder):
        with safe_open(folder / name, framework="np") as tensors:
            held += sum(math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    if held < wanted:
        raise IncompleteCheckpoint(
            f"{folder}: config.json describes {wanted:,} parameters, the weights hold {held:,}: some are missing, or it is the "
            "config.json of another model; copy or download the checkpoint again"
        )


_NO_NUMBER: Final = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E5M2": ("<u1", 0x7C),
    "F8_E4M3": ("<u1", 0x7F),
}
"""Type of a tensor → the integer type of its width, and the bits that are all set in infinities and NaN (F8_E4M3: in NaN)."""
_AT_A_TIME: Final = 1 << 20  # fits a cache


def not_finite(file: Path) -> list[str]:
    """The names of the tensors of a safetensors file that hold NaN or an infinity. The file must be complete (`check`).

    Reads bits, since NumPy has no bfloat16 and importing torch takes longer than reading the file.
    """
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    bad = []
    for name, tensor in header.items():
        if tensor["dtype"] not in _NO_NUMBER:
            continue  # integers
        kind, mask = _NO_NUMBER[tensor["dtype"]]
        begin, end = tensor["data_offsets"]
        if begin == end:
            continue
        bits = np.memmap(file, kind, "r", offset=8 + size + begin, shape=((end - begin) // np.dtype(kind).itemsize,))
        parts = (bits[start : start + _AT_A_TIME] for start in range(0, len(bits), _AT_A_TIME))
        if any(bool(((part & mask) == mask).any()) for part in parts):
            bad.append(name)
    return bad


def check_finite(folder: Path) -> None:
    """Raises IncompleteCheckpoint if a weight is NaN or infinite. The folder must be complete (`check`)."""
    bad = [f"{name} in {file}" for file in weight_names(folder) for name in not_finite(folder / file)]
    if bad:
        raise IncompleteCheckpoint(
            f"{folder}: weights that are NaN or infinite: {_some(bad)}: copy or download the checkpoint again, or take "
            "another one"
        )


def _unreadable(file: Path) -> str | None:
    """Why a file that describes a model cannot be read; None: it can, or does not exist."""
    if not file.is_file():
        return None
    if _is_pointer(file):
        return _pointer(file)
    if file.stat().st_size > MAX_DESCRIPTION:
        return f"{file} has more than {MAX_DESCRIPTION:,} bytes, which no description of a model needs: correct it"
    if file.suffix == ".json":
        try:
            if not isinstance(json.loads(file.read_bytes()), dict):
                return f"{file} holds no JSON object: copy or download it again"
        except (ValueError, RecursionError) as error:
            return f"{file} is cut off or damaged ({error}): copy or download it again"
    return None


def _foreign(file: Path) -> str | None:
    """Why a file that describes a model, and can be read, is refused; None: it is not, or does not exist."""
    if file.suffix != ".json" or not file.is_file():
        return None
    keys = json.loads(file.read_bytes()).keys() & FOREIGN.keys()
    return f"{file}: `{min(keys)}` {FOREIGN[min(keys)]}: remove the key, or take another model" if keys else None


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(LFS_POINTER)) == LFS_POINTER


def _pointer(file: Path) -> str:
    return f"{file} is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder"


def _has_inner_template(folder: Path) -> bool:
    """Whether another file contains a chat template."""
    for name in ("tokenizer_config.json", "processor_config.json"):
        file = folder / name
        if file.is_file() and not _unreadable(file) and json.loads(file.read_bytes()).get("chat_template"):
            return True
    return False


def _no_weights(folder: Path) -> str:
    pickled = sorted(file.name for kind in PICKLED for file in folder.glob(kind))
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    if shards:
        return f"{folder} holds neither {WEIGHTS} nor {INDEX}, only {_some(shards)}: copy or download the index too"
    if pickled:
        return (
            f"{folder} holds no *.safetensors but {_some(pickled)}: other weight formats are refused; convert it first"
        )
    return (
        f"{folder} holds no *.safetensors: copy or download the weights too (other formats are refused: convert them)"
    )


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor → shard, from the index."""
    if fault := _unreadable(index):
        raise IncompleteCheckpoint(fault)
    shards = json.loads(index.read_bytes()).get("weight_map")
    plain = isinstance(shards, dict) and all(
        isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors") for file in shards.values()
    )
    if not shards or not plain:
        raise IncompleteCheckpoint(
            f"{index}: `weight_map` must name a *.safetensors file of this folder for each tensor"
        )
    return dict(shards)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
