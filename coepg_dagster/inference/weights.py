"""Which weights a model has: the version that is kept with what it answered."""

from __future__ import annotations

import hashlib
from pathlib import Path


def folder_version(folder: Path) -> str:
    """A hash of the weights of a checkpoint folder. Raises FileNotFoundError where it holds no safetensors."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors: other weight formats are refused; convert it first")
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]


def is_local(root: Path, checkpoint: str) -> bool:
    """Whether a checkpoint is a folder below `root`, there or not, and no name on the hub."""
    return checkpoint.startswith((".", "/")) or checkpoint.count("/") != 1 or (root / checkpoint).parent.is_dir()


def weights_version(root: Path, checkpoint: str) -> str:
    """A hash of the weights of a local folder below `root`; of a hub model, its commit. Raises FileNotFoundError."""
    folder = root / checkpoint
    if folder.is_dir():
        return folder_version(folder)
    if is_local(root, checkpoint):
        raise FileNotFoundError(f"there is no checkpoint folder {checkpoint}: make it, or correct `models` in the file")
    from huggingface_hub import HfApi

    return str(HfApi().model_info(checkpoint).sha)


def local_version(checkpoint: str) -> str:
    """The version of a checkpoint that is on this machine: a hash of a folder's weights; of a hub model, its commit."""
    folder = Path(checkpoint)
    if folder.is_dir():
        return folder_version(folder)
    from transformers import AutoConfig

    return str(AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)._commit_hash)
