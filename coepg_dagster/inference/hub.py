"""Checkpoints of the Hugging Face hub: a name is resolved to a commit once, and its files are in the hub's cache.

Nothing that is in the cache is requested again, so that everything works without a network after one download. Only
safetensors and the files that describe a model are downloaded, never pickled weights or code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import HfApi, constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # exported for whoever catches its errors

from coepg_dagster.inference.files import DESCRIPTION, INDEX, WEIGHTS, IncompleteCheckpoint, check, faults, weight_names
from coepg_dagster.refusal import without_credentials


def split(checkpoint: str) -> tuple[str, str | None]:
    """(name, revision) of `OWNER/NAME@REVISION`; None: the default branch. Raises IncompleteCheckpoint."""
    name, at, revision = checkpoint.partition("@")
    if at and not revision:
        raise IncompleteCheckpoint(f"{checkpoint}: a branch, tag or commit must follow the @; add it, or remove the @")
    return name, revision or None


def resolve(checkpoint: str) -> str:
    """The commit of a hub model, from the cache or else from the hub. Raises IncompleteCheckpoint."""
    name, revision = split(checkpoint)
    with _explained(checkpoint):
        try:
            return HfApi().resolve_revision(name, revision=revision, local_files_only=True).resolved
        except RevisionResolutionError:
            return HfApi().resolve_revision(name, revision=revision).resolved


def snapshot(name: str, commit: str, *, weights: bool = True) -> Path:
    """The folder of a commit in the cache; missing files are downloaded, weights last. Raises IncompleteCheckpoint.

    Args:
        weights: whether a model will be loaded, or its processor alone.
    """
    with _explained(f"{name}@{commit}"):
        try:
            folder = _fetch(name, commit, weights, local_only=True)
            if not faults(folder, weights=weights):
                return folder
        except LocalEntryNotFoundError:
            pass
        return _fetch(name, commit, weights)


def _fetch(name: str, commit: str, weights: bool, local_only: bool = False) -> Path:
    def fetched(files: list[str]) -> Path:
        return Path(snapshot_download(name, revision=commit, allow_patterns=files, local_files_only=local_only))

    folder = fetched([*DESCRIPTION, INDEX])
    return fetched(weight_names(folder)) if weights else folder


def described(checkpoint: str, *, weights: bool = True) -> Path:
    """The cache folder of a hub model with the files that describe it, perhaps without weights. Raises IncompleteCheckpoint.

    Args:
        weights: whether a model will be loaded, so that the hub must have its weights.
    """
    name, commit = split(checkpoint)[0], resolve(checkpoint)
    folder = snapshot(name, commit, weights=False)
    with suppress(CachedRepoTreeNotFoundError):  # another program filled the cache
        listed = {file.path for file in get_cached_repo_tree(name, revision=commit)}
        if weights and not listed & {WEIGHTS, INDEX}:
            raise IncompleteCheckpoint(
                f"{checkpoint} has neither {WEIGHTS} nor {INDEX} on the hub: other weight formats are refused; choose another "
                "revision, or convert a copy and name its folder"
            )
    return check(folder, weights=False)


@contextmanager
def _explained(checkpoint: str) -> Iterator[None]:
    """Turns errors of the hub into IncompleteCheckpoint with what to do."""
    again = "files that are complete are kept: run the same command again"
    try:
        yield
    except GatedRepoError:
        why = "its owner wants terms to be accepted: accept them on its page, and log in (`hf auth login`, or HF_TOKEN)"
    except RepositoryNotFoundError:
        why = (
            "there is no such folder, and the hub has no such model, or it is private: correct the name in `models`, or log in "
            "(`hf auth login`, or HF_TOKEN)"
        )
    except RevisionNotFoundError:
        why = "the hub has no such revision of this model: correct what follows the @"
    except HFValidationError as error:
        why = f"there is no such folder, and this cannot be a name of the hub ({_short(error)}): correct it in `models`"
    except (RevisionResolutionError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        cause = _short(error.__cause__ or error)
        off = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"the hub cannot be reached ({cause})"
        name, _, revision = checkpoint.partition("@")
        command = f"hf download {name} --revision {revision}" if revision else f"hf download {name}"
        why = (
            f"there is no such folder, the hub's cache {constants.HF_HUB_CACHE} lacks this model or a part of it, and {off}: "
            f"download the model where there is a network (`{command}`), or name a local "
            "folder"
        )
    except HfHubHTTPError as error:
        why = f"the hub answered {_short(error)}: {again}"
    except httpx.HTTPError as error:
        why = f"the connection to the hub broke ({_short(error)}): {again}"
    except OSError as error:
        why = f"it could not be downloaded to {constants.HF_HUB_CACHE} ({_short(error)}): {again}"
    else:
        return
    raise IncompleteCheckpoint(f"{checkpoint}: {why}")


def _short(error: BaseException) -> str:
    return without_credentials(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
