"""The vision cache: embeddings of screenshots by a vision tower that is not trained, each computed once.

π_k, π'_k and ϕ_k of one base often have the same tower, an iteration shows the same screenshots to a dozen models, and the
tower takes half of the time of a short answer. So embeddings are kept by (tower, screenshot): in memory, and on disk for other
processes. A tower is identified by a hash of its weights, configuration, precision and attention, a screenshot by a hash of
its resized pixels. A tower that was trained, or another resize, therefore never gets embeddings of another.

Each screenshot is encoded alone, so that its embeddings do not depend on the rest of a batch.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import BatchFeature
from transformers.modeling_outputs import BaseModelOutputWithPooling

from coepg_dagster.artifacts import whole
from coepg_dagster.experiment.training import VISUAL_MEMORY
from coepg_dagster.inference.screens import visual_tokens
from coepg_dagster.progress import Ended

DISK: Final = 20_000_000_000
"""Limit of the embeddings on disk, in bytes; beyond it each process computes them again."""
KEY: Final = 16
"""Bytes of a screenshot's hash. Each patch of an image carries them in place of pixels, one number for each byte."""

POOLED, DEEPSTACK = "pooler_output", "deepstack_features"
"""The parts of a tower's output that the language model reads: for Qwen2.5-VL the first, for Qwen3-VL both."""

Embeddings = dict[str, torch.Tensor]
"""Of one screenshot: POOLED, and if there are any DEEPSTACK.0, DEEPSTACK.1, …, each of shape (visual tokens, width)."""


class VisualStore:
    """Embeddings by tower and screenshot, in memory and below `folder` (None: in memory alone)."""

    def __init__(self, folder: Path | None = None, *, memory: int = VISUAL_MEMORY, disk: int = DISK) -> None:
        self._folder, self._room, self._disk = folder, memory, disk
        self._held: OrderedDict[tuple[str, str], Embeddings] = OrderedDict()

    def get(self, tower: str, screenshot: str, device: torch.device) -> Embeddings | None:
        """The embeddings, on `device`; None: there are none, or their file is damaged."""
        embeddings = self._held.get((tower, screenshot))
        if embeddings is not None:
            self._held.move_to_end((tower, screenshot))
            return embeddings
        embeddings = self._read(tower, screenshot, device)
        if embeddings is not None:
            self._hold(tower, screenshot, embeddings)
        return embeddings

    def put(self, tower: str, screenshot: str, embeddings: Embeddings) -> None:
        """Keeps embeddings in memory, and on disk while there is room and it can be written to."""
        self._hold(tower, screenshot, embeddings)
        if self._folder is None or self._left <= 0:
            return
        file = self._file(tower, screenshot)
        plain = {name: tensor.cpu().contiguous() for name, tensor in embeddings.items()}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole(file) as draft:
                save_file(plain, draft, metadata={"hash": _hash_of(plain)})
        except (OSError, SafetensorError) as error:
            print(f"{self._folder}: no more visual embeddings are kept: {error}", flush=True)
            self._left = 0
            return
        self._left -= file.stat().st_size
        if self._left <= 0:
            print(
                f"{self._folder}: {self._disk / 1e9:.3g} GB of visual embeddings are kept, no more are written",
                flush=True,
            )

    @cached_property
    def _left(self) -> int:
        """Bytes that may still be written."""
        assert self._folder is not None
        return self._disk - sum(file.stat().st_size for file in self._folder.rglob("*.safetensors"))

    def _hold(self, tower: str, screenshot: str, embeddings: Embeddings) -> None:
        self._held[tower, screenshot] = embeddings
        self._room -= _bytes_of(embeddings)
        while self._room < 0 and len(self._held) > 1:
            _, old = self._held.popitem(last=False)
            self._room += _bytes_of(old)

    def _read(self, tower: str, screenshot: str, device: torch.device) -> Embeddings | None:
        if self._folder is None:
            return None
        file = self._file(tower, screenshot)
        try:
            with safe_open(file, framework="pt", device="cpu") as stored:
                plain = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
                written = (stored.metadata() or {}).get("hash")
        except FileNotFoundError:
            return None
        except SafetensorError:
            written, plain = None, {}
        if written is None or written != _hash_of(plain):  # a full disk, a flipped bit
            print(f"{file} is damaged: the screenshot is encoded again", flush=True)
            file.unlink(missing_ok=True)
            return None
        return {name: tensor.to(device) for name, tensor in plain.items()}

    def _file(self, tower: str, screenshot: str) -> Path:
        assert self._folder is not None
        return self._folder / tower / screenshot[:2] / f"{screenshot}.safetensors"


_process_store = VisualStore()


def process_store() -> VisualStore:
    """The store that all models of this process share."""
    return _process_store


def keep_in(folder: Path | None) -> None:
    """Sets the folder in which this process reads and writes embeddings; None: it keeps them in memory alone."""
    global _process_store
    _process_store = VisualStore(folder)


def _bytes_of(embeddings: Embeddings) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in embeddings.values())


def _hash_of(tensors: Embeddings) -> str:
    digest = hashlib.blake2b(digest_size=KEY)
    for name in sorted(tensors):
        digest.update(name.encode() + str(tuple(tensors[name].shape)).encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def screenshot_key(image: Image.Image) -> bytes:
    """KEY bytes that identify an image: a hash of its mode, size and pixels."""
    digest = hashlib.blake2b(f"{image.mode} {image.width} {image.height} ".encode(), digest_size=KEY)
    digest.update(image.tobytes())
    return digest.digest()


class Screenshots:
    """The screenshots of a batch by their keys. A batch holds keys in place of pixels until a tower needs the pixels.

    Args:
        processor: a Qwen-VL processor; its image processor prepares the pixels.
    """

    def __init__(self, processor: Any) -> None:
        self._processor, self._images = processor, processor.image_processor
        self.merged: int = self._images.merge_size**2  # patches in a visual token
        # held while the processor writes keys, for threads that share it, as those of a server do
        self.lock = threading.RLock()
        self._shown: dict[str, Callable[[], Any]] = {}
        self._shown_before: dict[str, Callable[[], Any]] = {}

    def forget(self) -> None:
        """Drops the screenshots of the batch before last; those of the last batch may still be needed."""
        self._shown_before, self._shown = self._shown, {}

    @contextmanager
    def keys(self) -> Iterator[None]:
        """A context in which the processor writes keys for pixels. Raises ValueError for images that it would resize."""
        # the class's method, even if another writes keys now
        prepare = type(self._images).preprocess.__get__(self._images)

        def keyed(images: Any, *args: Any, **kwargs: Any) -> BatchFeature:
            flat = [image for part in images for image in (part if isinstance(part, list | tuple) else [part])]
            known: dict[int, tuple[torch.Tensor, list[int]]] = {}
            for image in flat:
                if id(image) in known:
                    continue
                patches = visual_tokens(self._processor, image) * self.merged
                key = screenshot_key(image)
                self._shown[key.hex()] = partial(prepare, [image], *args, **kwargs | {"return_tensors": "pt"})
                row = torch.tensor(list(key), dtype=torch.float32)
                known[id(image)] = row.expand(patches, KEY), self.grid(image)
            rows, grids = zip(*(known[id(image)] for image in flat), strict=True)
            return BatchFeature({"pixel_values": torch.cat(rows), "image_grid_thw": torch.tensor(grids)})

        with self.lock:
            self._images.preprocess = keyed
            try:
                yield
            finally:
                del self._images.preprocess

    def grid(self, image: Image.Image) -> list[int]:
        """The patches of an image: [frames, rows, columns]."""
        return [1, image.height // self._images.patch_size, image.width // self._images.patch_size]

    def pixels(self, key: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The image processor's output for a screenshot: (patches, width), and its grid (1, 3). Raises ValueError."""
        shown = self._shown.get(key) or self._shown_before.get(key)
        if shown is None:
            raise ValueError("a batch names a screenshot that was not prepared here: is it of another process or step?")
        prepared = shown()
        return torch.as_tensor(prepared["pixel_values"]), torch.as_tensor(prepared["image_grid_thw"])


def names(keys: torch.Tensor, grid_thw: torch.Tensor) -> list[str]:
    """The keys, in hexadecimal, of the screenshots of a batch.

    Args:
        keys: in place of pixels, (patches, KEY).
        grid_thw: frames, rows and columns of each image, (images, 3).
    Raises:
        ValueError: the patches of a screenshot were separated or mixed with another's.
    """
    patches = grid_thw.prod(-1)
    ends = patches.cumsum(0).to(keys.device)
    if int(ends[-1]) != len(keys):
        raise ValueError(f"{len(keys)} patches do not make the images of {grid_thw.tolist()}: were rows left out?")
    last = keys[ends - 1]
    if not torch.equal(keys[ends - patches.to(keys.device)], last):
        raise ValueError("the patches of a screenshot are mixed with another's: were rows put in another order?")
    return [bytes(row).hex() for row in last.to(torch.uint8).tolist()]


def refuse_other_screenshots(batch: Mapping[str, Any], images: Sequence[Image.Image], shown: Screenshots) -> None:
    """Raises Ended if a row of a batch of rollouts does not hold the screenshot that it was sampled from.

    Args:
        batch: as TRL makes it, with keys in place of pixels.
        images: one for each row.
    """
    if batch.get("pixel_values") is None or batch.get("image_grid_thw") is None:
        raise Ended(
            "a batch of rollouts reached the trainer without its screenshots: the planner would learn to ignore them"
        )
    keys = {id(image): screenshot_key(image).hex() for image in {id(image): image for image in images}.values()}
    if batch["image_grid_thw"].tolist() != [shown.grid(image) for image in images]:
        raise Ended(
            "a batch of rollouts has screenshots of another size than they were sampled from: was one resized again?"
        )
    if names(batch["pixel_values"], batch["image_grid_thw"]) != [keys[id(image)] for image in images]:
        raise Ended(
            "a batch of rollouts has other screenshots than they were sampled from: were rows put in another order?"
        )


class Tower:
    """Replaces the forward pass of a Qwen-VL model's vision tower: it looks up the embeddings of screenshots given by key.

    Pixels pass through to the tower, without gradients if it is not trained. For adapters in the layers above, transformers'
    checkpointing makes the embeddings of patches require gradients; without this the tower would be computed again in the
    backward pass, and differentiated, for nothing.

    Args:
        shown: the screenshots whose keys the batches hold.
        store: the embeddings that are kept. None: a tower that is not trained is computed in every pass. That is needed where
            each process holds a part of it, since all of them must call it.
    """

    def __init__(self, model: Any, shown: Screenshots, store: VisualStore | None) -> None:
        self._tower, self.shown, self._store = model.model.visual, shown, store
        self._encode = self._tower.forward
        self._tower.forward = self

    def __call__(self, pixels: torch.Tensor, grid_thw: torch.Tensor, **settings: Any) -> Any:
        trained = any(parameter.requires_grad for parameter in self._tower.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
            if pixels.shape[-1] != KEY:
                return self._encode(pixels, grid_thw=grid_thw, **settings)
            named = names(pixels, grid_thw)
            each = list(dict.fromkeys(named))
            if self._store is None or trained:
                known = dict(zip(each, self._encoded(each, pixels.device, settings), strict=True))
            else:
                known = {name: self._kept(name, self._store, pixels.device, settings) for name in each}
            return _output([known[name] for name in named])

    def _kept(self, name: str, store: VisualStore, device: torch.device, settings: dict[str, Any]) -> Embeddings:
        embeddings = store.get(self.version, name, device)
        if embeddings is None:
            # a policy in training may read what an engine computed, which inference tensors would not allow
            with torch.inference_mode(False), torch.no_grad():
                [embeddings] = self._encoded([name], device, settings)
            store.put(self.version, name, embeddings)
        return embeddings

    def _encoded(self, each: Sequence[str], device: torch.device, settings: dict[str, Any]) -> list[Embeddings]:
        pixels, grids = zip(*map(self.shown.pixels, each), strict=True)
        grid = torch.cat(grids).to(device)
        output = self._encode(torch.cat(pixels).to(device, self._tower.dtype), grid_thw=grid, **settings)
        lengths = (grid.prod(-1) // self.shown.merged).tolist()
        parts = {POOLED: torch.split(output.pooler_output, lengths)}
        for i, features in enumerate(getattr(output, DEEPSTACK, None) or ()):
            parts[f"{DEEPSTACK}.{i}"] = torch.split(features, lengths)
        return [{part: of_each[i] for part, of_each in parts.items()} for i in range(len(each))]

    @cached_property
    def version(self) -> str:
        """A hash of everything that decides the tower's output for given pixels."""
        about = {
            "config": self._tower.config.to_dict(),
            "attention": self._tower.config._attn_implementation,
            "device": self._tower.device.type,
        }
        digest = hashlib.blake2b(json.dumps(about, sort_keys=True, default=str).encode(), digest_size=KEY)
        for name, weights in self._tower.state_dict().items():
            digest.update(f"{name} {weights.dtype} {tuple(weights.shape)}".encode())
            digest.update(weights.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


def _output(embeddings: Sequence[Embeddings]) -> BaseModelOutputWithPooling:
    """A tower's output for several screenshots, from that of each."""
    joined = {name: torch.cat([one[name] for one in embeddings]) for name in embeddings[0]}
    output = BaseModelOutputWithPooling(pooler_output=joined.pop(POOLED))
    if joined:
        setattr(
            output, DEEPSTACK, [joined[name] for name in sorted(joined, key=lambda name: int(name.rpartition(".")[2]))]
        )
    return output
