"""What a vision tower makes of screenshots, looked up by their keys: the same numbers, computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from coepg_dagster.inference.processing import load_processor
from coepg_dagster.inference.screens import resize_of
from coepg_dagster.inference.transformers_engine import load_checkpoint
from coepg_dagster.inference.visual import KEY, Screenshots, Tower, VisualStore, names, screenshot_key

SIZES = ((3, 4), (4, 3), (3, 4))
"""Of the images, in visual tokens."""
TEXT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Click OK<|im_end|>"

Embed = Callable[[list[int]], list[torch.Tensor]]
"""From the images to ask about, by number, to features (and the gradient of a weight, where the tower is trained)."""


def noise(processor: Any) -> list[Image.Image]:
    factor, _, _ = resize_of(processor)
    return [Image.effect_noise((width * factor, height * factor), 90).convert("RGB") for width, height in SIZES]


def pixels_of(processor: Any) -> Any:
    return processor(
        images=[[image] for image in noise(processor)], text=[TEXT] * len(SIZES), padding=True, return_tensors="pt"
    )


@pytest.fixture
def bare(either_checkpoint: Path) -> Iterator[tuple[Any, Any]]:
    """A model with the tower that it came with, and its processor."""
    yield load_checkpoint(either_checkpoint, "float32", "cpu")


ORDERS = st.lists(st.integers(0, len(SIZES) - 1), min_size=1, max_size=6)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_features_and_gradients_are_those_of_pixels(bare: tuple[Any, Any], trained: bool, kept: bool) -> None:
    """For any order of images, in batches that follow each other; only what is new is encoded."""
    model, processor = bare
    tower, weight = model.model.visual, model.model.visual.patch_embed.proj.weight
    tower.requires_grad_(trained)
    images, given_patches = noise(processor), list[int]()
    tower.patch_embed.register_forward_pre_hook(lambda _, arguments: given_patches.append(len(arguments[0])))
    plain_forward = tower.forward
    shown = Screenshots(processor)
    keyed = Tower(model, shown, VisualStore() if kept else None)

    def features(order: list[int]) -> list[torch.Tensor]:
        made = processor.image_processor(images=[images[i] for i in order], return_tensors="pt")
        output = model.model.get_image_features(made["pixel_values"], made["image_grid_thw"])
        parts = [torch.cat(list(output.pooler_output))]
        parts += [torch.cat(list(level)) for level in getattr(output, "deepstack_features", None) or []]
        model.zero_grad()
        if trained:
            sum(part.square().sum() for part in parts).backward()
            parts.append(weight.grad.clone())
        return [part.detach() for part in parts]

    known: set[int] = set()

    @given(ORDERS)
    @settings(max_examples=8, deadline=None)
    def holds(order: list[int]) -> None:
        tower.forward = plain_forward
        plain = features(order)
        tower.forward = keyed
        given_patches.clear()
        shown.forget()
        with shown.keys():
            result = features(order)
        for expected, part in zip(plain, result, strict=True):
            torch.testing.assert_close(part, expected, rtol=1e-3, atol=1e-4)
        new = set(order) - known if kept and not trained else set(order)
        known.update(order)
        assert len(given_patches) == (len(new) if kept and not trained else 1), "one alone, or all together"
        merged = processor.image_processor.merge_size**2
        assert sum(given_patches) == merged * sum(SIZES[i][0] * SIZES[i][1] for i in new)

    holds()
    assert "preprocess" not in vars(processor.image_processor)


def test_kept_outputs_do_not_depend_on_the_rest_of_a_batch(random_checkpoint: Callable[[int], Path]) -> None:
    """To the last bit: else a run that is continued, or had its embeddings from another process, would differ."""
    images, kept = noise(load_processor(str(random_checkpoint(0)))), []
    for together in ([0], [2, 0], [1, 2, 0]):
        model, processor = load_checkpoint(random_checkpoint(0), "float32", "cpu")
        shown, store = Screenshots(processor), VisualStore()
        tower = Tower(model.requires_grad_(False), shown, store)
        with shown.keys():
            made = processor.image_processor(images=[images[i] for i in together], return_tensors="pt")
        model.model.get_image_features(made["pixel_values"], made["image_grid_thw"])
        kept.append(store.get(tower.version, screenshot_key(images[0]).hex(), torch.device("cpu"))["pooler_output"])
    assert all(torch.equal(kept[0], other) for other in kept)


def test_the_same_tower_finds_what_another_process_kept_and_no_other_tower_does(
    random_checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    [image, *_] = noise(load_processor(str(random_checkpoint(0))))

    def encoded(seed: int, store: VisualStore, change: Callable[[Any], object] = lambda tower: None) -> int:
        """How often a tower computes."""
        model, processor = load_checkpoint(random_checkpoint(seed), "float32", "cpu")
        model.requires_grad_(False)
        change(model.model.visual)
        calls: list[int] = []
        model.model.visual.patch_embed.register_forward_pre_hook(lambda *_: calls.append(1))
        shown = Screenshots(processor)
        Tower(model, shown, store)
        with shown.keys():
            made = processor.image_processor(images=[image], return_tensors="pt")
        with torch.inference_mode():
            model.model.get_image_features(made["pixel_values"], made["image_grid_thw"])
        return len(calls)

    def trained(tower: Any) -> None:
        tower.merger.mlp[2].bias[0] += 1e-3

    def half(tower: Any) -> None:
        tower.to(torch.bfloat16)

    assert encoded(0, VisualStore(tmp_path)) == 1
    assert encoded(0, VisualStore(tmp_path)) == 0, "another process"
    assert encoded(0, VisualStore(tmp_path, memory=0)) == 0
    assert encoded(1, VisualStore(tmp_path)) == 1, "another model"
    for change in (trained, half):
        assert encoded(0, VisualStore(tmp_path), change) == 1
    [first, *_] = sorted(tmp_path.rglob("*.safetensors"))
    for damage in (first.read_bytes()[:-9], b"\0" * 40, first.read_bytes()[:-1] + b"!"):
        for file in tmp_path.rglob("*.safetensors"):
            file.write_bytes(damage)
        assert encoded(0, VisualStore(tmp_path)) == 1, "damaged: encoded again"
        assert encoded(0, VisualStore(tmp_path)) == 0, "and kept again"


def test_no_more_is_held_or_written_than_there_is_room_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = {"pooler_output": torch.zeros(4, 8)}  # 128 bytes
    store = VisualStore(tmp_path, memory=300, disk=450)
    for name in "abcd":
        store.put("tower", name * 32, part)
    assert len(store._held) == 2
    written = {file.stem[0] for file in tmp_path.rglob("*.safetensors")}
    assert written == {"a", "b"}, "the one that crossed the limit was the last"
    assert capsys.readouterr().out.count("no more are written") == 1
    assert store.get("tower", "a" * 32, torch.device("cpu")) is not None
    assert store.get("tower", "c" * 32, torch.device("cpu")) is None


@given(st.data())
@settings(max_examples=25)
def test_torn_batches_are_refused(data: st.DataObject) -> None:
    grids = data.draw(st.lists(st.tuples(st.just(1), st.integers(1, 3), st.integers(1, 3)), min_size=2, max_size=4))
    keys = [bytes([i]) * KEY for i in range(len(grids))]
    rows = [list(key) for key, (_, h, w) in zip(keys, grids, strict=True) for _ in range(h * w)]
    batch, grid = torch.tensor(rows, dtype=torch.float32), torch.tensor(grids)
    assert names(batch, grid) == [key.hex() for key in keys]
    assert names(batch.to(torch.bfloat16), grid) == [key.hex() for key in keys], "bytes survive half precision"
    with pytest.raises(ValueError, match="rows left out"):
        names(batch[:-1], grid)
    if grids[0][1] * grids[0][2] > 1:
        with pytest.raises(ValueError, match="another order"):
            names(batch.roll(1, 0), grid)


def test_a_screenshot_of_another_size_or_process_is_refused(random_checkpoint: Callable[[int], Path]) -> None:
    model, processor = load_checkpoint(random_checkpoint(0), "float32", "cpu")
    shown = Screenshots(processor)
    Tower(model, shown, VisualStore())
    with shown.keys():
        with pytest.raises(ValueError, match="the model would resize"):
            processor.image_processor(images=[Image.new("RGB", (90, 112))], return_tensors="pt")
        made = processor.image_processor(images=[noise(processor)[0]], return_tensors="pt")
    shown.forget()
    shown.forget()
    with pytest.raises(ValueError, match="not prepared here"):
        model.model.get_image_features(made["pixel_values"], made["image_grid_thw"])


def test_the_chat_template_and_the_processor_write_the_same_keys(random_checkpoint: Callable[[int], Path]) -> None:
    """As TRL asks, each rollout with its own copy of the group's screenshot; what is not pixels stays as it was."""
    _, processor = load_checkpoint(random_checkpoint(0), "float32", "cpu")
    images = noise(processor)
    given_images = [[images[i].copy()] for i in (0, 0, 1, 2, 1)]
    prompts = [[{"role": "user", "content": [{"type": "image", "image": image}]}] for [image] in given_images]
    texts = ["<|vision_start|><|image_pad|><|vision_end|>"] * len(given_images)

    def both() -> list[Any]:
        return [
            processor.apply_chat_template(prompts, tokenize=True, return_dict=True),
            processor(images=given_images, text=texts, padding=True, return_tensors="pt"),
        ]

    plain = both()
    with Screenshots(processor).keys():
        keyed = both()
    for before, after in zip(plain, keyed, strict=True):
        assert before.keys() == after.keys()
        assert [list(ids) for ids in before["input_ids"]] == [list(ids) for ids in after["input_ids"]]
        assert torch.equal(torch.as_tensor(before["image_grid_thw"]), torch.as_tensor(after["image_grid_thw"]))
        pixels = torch.as_tensor(after["pixel_values"])
        assert len(pixels) == len(torch.as_tensor(before["pixel_values"]))
        assert names(pixels, torch.as_tensor(after["image_grid_thw"])) == [
            screenshot_key(image).hex() for [image] in given_images
        ]


def test_nothing_goes_back_through_a_tower_that_is_not_trained(random_checkpoint: Callable[[int], Path]) -> None:
    """Checkpointing alone would have it computed again, and its patches ask for gradients."""
    model, processor = load_checkpoint(random_checkpoint(0), "float32", "cpu")
    model.model.visual.requires_grad_(False)
    inputs, calls = pixels_of(processor), []
    model.train()
    model.model.visual.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append("tower"))
    model.model.language_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append("language model"))

    def gradients() -> dict[str, torch.Tensor]:
        calls.clear()
        model.zero_grad()
        model(**inputs).logits.float().square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before = gradients()
    assert calls.count("tower") == 2, "as transformers does it"
    Tower(model, Screenshots(processor), None)
    after = gradients()
    assert calls.count("tower") == 1 and calls.count("language model") == 2
    assert after.keys() == before.keys()
    for name, gradient in after.items():
        torch.testing.assert_close(gradient, before[name], msg=name)
