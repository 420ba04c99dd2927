"""Checkpoints by name: the folder that is loaded, and the version that is kept with the model's answers.

A checkpoint is a folder, or a model of the hub: `OWNER/NAME`, or `OWNER/NAME@REVISION` with a branch, a tag or a commit.
`identify` resolves it to a commit once; every job then gets `OWNER/NAME@COMMIT`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from coepg_dagster.inference.files import (
    IncompleteCheckpoint,
    check,
    check_finite,
    check_size,
    weight_faults,
    weight_names,
)
from coepg_dagster.store import digests, hashed

HERE: Final = Path()


def is_local(root: Path, checkpoint: str) -> bool:
    """Whether a checkpoint names a folder below `root`, which may not exist, and not a model on the hub."""
    name = checkpoint.partition("@")[0]
    return checkpoint.startswith((".", "/", "~")) or name.count("/") != 1 or (root / name).parent.is_dir()


def local_folder(checkpoint: str, *, weights: bool = True, root: Path = HERE) -> Path:
    """The complete folder of a checkpoint: below `root`, or in the hub's cache that of its commit.

    Files that the cache lacks are downloaded. Raises IncompleteCheckpoint.

    Args:
        weights: whether a model will be loaded, or its processor alone.
    """
    if is_local(root, checkpoint):
        return check(root / checkpoint, weights=weights)
    from coepg_dagster.inference import hub  # half a second, for every run of Dagster

    return check(hub.snapshot(hub.split(checkpoint)[0], hub.resolve(checkpoint), weights=weights), weights=weights)


def folder_version(folder: Path, files: Mapping[str, str] | None = None) -> str:
    """A hash of the weights of a checkpoint folder. Raises IncompleteCheckpoint if they are incomplete.

    Args:
        files: the `digests` of the folder, if they are known.
    """
    if wrong := weight_faults(folder):
        raise IncompleteCheckpoint("; ".join(wrong))
    weights = sorted(folder.glob("*.safetensors"))
    digest = hashlib.sha256()
    for one in [files[file.name] for file in weights] if files else hashed(weights):
        digest.update(bytes.fromhex(one))
    return digest.hexdigest()[:16]


def deciding_files(folder: Path) -> list[str]:
    """The names of the files of a saved model that decide its answers. Raises IncompleteCheckpoint."""
    return ["config.json", *weight_names(folder), "tokenizer.json"]


def local_version(checkpoint: str) -> str:
    """The version of a checkpoint: for a folder a hash of its weights, for a hub model its commit."""
    if is_local(Path(), checkpoint):
        return folder_version(Path(checkpoint))
    from coepg_dagster.inference import hub

    return hub.resolve(checkpoint)


def identify(root: Path, checkpoint: str, *, weights: bool = True) -> dict[str, Any]:
    """Name and version of a checkpoint whose files are all sound: {"checkpoint", "version"}.

    Of a hub model it has the "revision" too, whose commit fixes its files, and of a folder the `digests` of its "files".

    A hub model is downloaded, and its weights are compared with the hashes of the hub. Raises IncompleteCheckpoint if
    anything is missing, damaged, or not finite.
    """
    if is_local(root, checkpoint):
        folder = local_folder(checkpoint, weights=weights, root=root)
        entry: dict[str, Any] = {"checkpoint": checkpoint, "version": ""}
        if weights:
            entry["files"] = digests(folder)
            entry["version"] = folder_version(folder, entry["files"])
    else:
        from coepg_dagster.inference import hub

        name, revision = hub.split(checkpoint)
        entry = {"checkpoint": name, "version": hub.resolve(checkpoint), "revision": revision or "main"}
        folder = local_folder(pinned(entry), weights=weights)
        shards = [folder / name for name in weight_names(folder)] if weights else []
        # the cache names a file by the hub's hash of its content
        blobs = {file: blob for file in shards if re.fullmatch(r"[0-9a-f]{64}", (blob := file.resolve()).name)}
        for (file, blob), found in zip(blobs.items(), hashed(list(blobs)), strict=True):
            if found != blob.name:
                raise IncompleteCheckpoint(
                    f"{file} is not what the hub has: delete {blob} and run the same command again"
                )
    if weights:
        check_size(folder)
        check_finite(folder)
    return entry


def pinned(entry: Mapping[str, Any]) -> str:
    """The name that a job loads, given the result of `identify`: the folder, or the hub model at its commit."""
    return f"{entry['checkpoint']}@{entry['version']}" if "revision" in entry else str(entry["checkpoint"])
