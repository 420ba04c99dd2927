"""What makes training fast changes none of its results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedDataParallelKwargs
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn.parallel import DistributedDataParallel

from coepg_dagster.inference.attention import WINDOWS, attend_windows
from coepg_dagster.inference.processing import load_processor
from coepg_dagster.inference.transformers_engine import load_checkpoint
from coepg_dagster.training.speed import (
    GradientsInBuckets,
    compile_layers,
    each_image_once,
    expect_right_padding,
    half_activations,
    half_vision,
    lean_vision,
    recompute,
)


def batch(processor: Any) -> Any:
    """Two rows of different length, padded on the right."""
    texts = [
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": words}]}], tokenize=False
        )
        for words in ("Click red.", "Enter red into blue. Click red. Click blue.")
    ]
    images = [[Image.effect_noise((168, 224), 90).convert("RGB")] for _ in texts]
    return processor(text=texts, images=images, return_tensors="pt", padding=True, padding_side="right")


def test_without_a_mask_right_padding_changes_nothing_that_is_read(random_checkpoint: Callable[[int], Path]) -> None:
    model, processor = load_checkpoint(random_checkpoint(0), "float32", "cpu")
    inputs = batch(processor)
    real = inputs["attention_mask"].bool()
    assert not real.all()
    with torch.no_grad():
        masked = model(**inputs).logits
        expect_right_padding(model)
        unmasked = model(**inputs).logits
    torch.testing.assert_close(unmasked[real], masked[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("share", "layers"), [(0.0, 0), (0.34, 2), (1.0, 6)])
def test_recomputed_layers_have_the_same_gradients(
    random_checkpoint: Callable[[int], Path], share: float, layers: int
) -> None:
    model, processor = load_checkpoint(random_checkpoint(0), "float32", "cpu")
    inputs = batch(processor)
    model.train()

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**inputs).logits.float().square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    before = gradients()
    assert recompute(model, share) == layers
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, before[name], msg=name)


def test_half_activations_change_the_loss_by_rounding_only(random_checkpoint: Callable[[int], Path]) -> None:
    """Under autocast, as on a GPU: float32 weights with float32 gradients."""
    model, processor = load_checkpoint(random_checkpoint(0), "float32", "cpu")
    inputs = batch(processor)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    model.model.visual.requires_grad_(False)

    def loss_and_gradient() -> tuple[float, torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs, labels=labels).loss
        loss.backward()
        return float(loss), model.model.language_model.layers[0].mlp.up_proj.weight.grad.clone()

    before, gradient = loss_and_gradient()
    seen: list[torch.dtype] = []
    model.model.language_model.layers[-1].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    half_activations(model)
    half_vision(model)
    after, halved = loss_and_gradient()
    assert seen == [torch.bfloat16]
    assert after == pytest.approx(before, rel=5e-3)
    assert halved.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(halved.flatten(), gradient.flatten(), 0) > 0.99


def test_a_tower_that_is_trained_keeps_its_weights(random_checkpoint: Callable[[int], Path]) -> None:
    model, _ = load_checkpoint(random_checkpoint(0), "float32", "cpu")
    with pytest.raises(ValueError, match="trained"):
        half_vision(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_windows_in_one_kernel_attend_as_one_by_one(random_checkpoint: Callable[[int], Path]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 4, 200, 80, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3))
    ends = torch.tensor([0, 64, 128, 160, 200], device="cuda", dtype=torch.int32)
    found, _ = attend_windows(None, q, k, v, None, cu_seq_lens_q=ends, max_length_q=64, scaling=80**-0.5)
    one_by_one = [
        torch.nn.functional.scaled_dot_product_attention(
            *(t[:, :, a:b].float() for t in (q, k, v)), scale=80**-0.5
        ).transpose(1, 2)
        for a, b in pairwise(ends.tolist())
    ]
    torch.testing.assert_close(found.float(), torch.cat(one_by_one, 1), rtol=2e-2, atol=2e-2)
    model, processor = load_checkpoint(random_checkpoint(0), "bfloat16", "cuda")
    inputs = batch(processor).to("cuda", torch.bfloat16)
    with torch.no_grad():
        before = model(**inputs).logits
        model.model.visual.config._attn_implementation = WINDOWS
        after = model(**inputs).logits
        compile_layers(model)
        compiled = model(**inputs).logits
    torch.testing.assert_close(after.float(), before.float(), rtol=0.05, atol=0.1)
    torch.testing.assert_close(compiled.float(), before.float(), rtol=0.05, atol=0.1)


SIZES = ((84, 112), (112, 84), (84, 112))


@pytest.fixture(scope="module")
def tower_and_images(either_checkpoint: Path) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A model, and pixels and grid of some images for its vision tower."""
    model, processor = load_checkpoint(either_checkpoint, "float32", "cpu")
    images = [Image.effect_noise(size, 90).convert("RGB") for size in SIZES]
    made = [processor.image_processor(images=[image], return_tensors="pt") for image in images]
    return model, [(one["pixel_values"], one["image_grid_thw"]) for one in made]


ORDERS = st.lists(st.integers(0, len(SIZES) - 1), min_size=1, max_size=7)


@given(ORDERS, ORDERS)
@settings(max_examples=12, deadline=None)
@pytest.mark.parametrize("trained", [True, False])
def test_equal_images_are_encoded_once(
    tower_and_images: tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]],
    trained: bool,
    first: list[int],
    second: list[int],
) -> None:
    """Features and gradients are those of a tower that encodes every image, for any order of images of several sizes.

    A tower that is not trained encodes in the second of two batches what was not in the first.
    """
    model, images = tower_and_images
    tower, parameter, given = model.model.visual, model.model.visual.patch_embed.proj.weight, []
    tower.requires_grad_(trained)
    hook = tower.patch_embed.register_forward_pre_hook(lambda _, arguments: given.append(len(arguments[0])))

    def features(order: list[int]) -> list[torch.Tensor]:
        pixels, grids = (torch.cat(parts) for parts in zip(*(images[i] for i in order), strict=True))
        output = model.model.get_image_features(pixels, grids)
        found = [torch.cat(list(output.pooler_output)), output.last_hidden_state]
        found += [torch.cat(list(level)) for level in getattr(output, "deepstack_features", None) or []]
        model.zero_grad()
        if trained:
            sum(part.square().sum() for part in found).backward()
            found.append(parameter.grad.clone())
        return [part.detach() for part in found]

    def patches(order: list[int]) -> int:
        return sum(len(images[i][0]) for i in order)

    try:
        plain = [features(order) for order in (first, second)]
        given.clear()
        lean = lean_vision(model, remember=True)
        found = [features(order) for order in (first, second)]
        seen, new = set(first), set(second) if trained else set(second) - set(first)
        assert sum(given) == patches([*seen]) + patches([*new])
        lean.forget()
        features(second)
        assert given[-1] == patches([*set(second)])
    finally:
        hook.remove()
        tower.requires_grad_(True)
        vars(tower).pop("forward", None)
    for before, after in zip(plain, found, strict=True):
        for expected, part in zip(before, after, strict=True):
            torch.testing.assert_close(part, expected, rtol=1e-3, atol=1e-4)


def test_images_with_the_same_sum_are_told_apart(random_checkpoint: Callable[[int], Path]) -> None:
    model, processor = load_checkpoint(random_checkpoint(0), "float32", "cpu")
    made = processor.image_processor(images=[Image.effect_noise((84, 112), 90).convert("RGB")], return_tensors="pt")
    whole = made["pixel_values"].round()  # whole numbers, whose sum is the same in any order
    pixels = torch.cat([whole, whole.flip(0)])
    grids = made["image_grid_thw"].repeat(2, 1)
    with torch.no_grad():
        plain = torch.cat(model.model.get_image_features(pixels, grids).pooler_output)
        lean_vision(model, remember=True)
        for _ in range(2):
            lean = torch.cat(model.model.get_image_features(pixels, grids).pooler_output)
            torch.testing.assert_close(lean, plain)


def test_nothing_goes_back_through_a_tower_that_is_not_trained(random_checkpoint: Callable[[int], Path]) -> None:
    """Checkpointing alone would have it computed again, and its patches ask for gradients."""
    model, processor = load_checkpoint(random_checkpoint(0), "float32", "cpu")
    model.model.visual.requires_grad_(False)
    inputs, calls = batch(processor), []
    model.train()
    model.model.visual.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append("tower"))
    model.model.language_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append("language model"))

    def gradients() -> dict[str, torch.Tensor]:
        calls.clear()
        model.zero_grad()
        model(**inputs).logits.float().square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    recompute(model, 1.0)
    before = gradients()
    assert calls.count("tower") == 2, "as transformers does it"
    lean_vision(model)
    after = gradients()
    assert calls.count("tower") == 1 and calls.count("language model") == 2
    assert after.keys() == before.keys()
    for name, gradient in after.items():
        torch.testing.assert_close(gradient, before[name], msg=name)


def test_an_image_that_comes_again_is_not_prepared_again(random_checkpoint: Callable[[int], Path]) -> None:
    """As GRPO asks: the chat template and the processor itself, each rollout with its own copy of the group's screenshot."""
    processor = load_processor(str(random_checkpoint(0)))
    images = processor.image_processor
    noise = [Image.effect_noise(size, 90).convert("RGB") for size in ((84, 112), (112, 84), (84, 112))]
    shown = [[noise[i].copy()] for i in (0, 0, 1, 2, 1)]
    prompts = [[{"role": "user", "content": [{"type": "image", "image": image}]}] for [image] in shown]
    texts = ["<|vision_start|><|image_pad|><|vision_end|>"] * len(shown)

    def both() -> list[Any]:
        return [
            processor.apply_chat_template(prompts, tokenize=True, return_dict=True),
            processor(images=shown, text=texts, padding=True, return_tensors="pt"),
        ]

    plain, prepare, given = both(), images._preprocess, []
    images._preprocess = lambda parts, **settings: given.append(len(parts)) or prepare(parts, **settings)
    with each_image_once(images):
        once = both()
    assert sum(given) <= 6 and given[0] == 3, "three screenshots, at most once for each way to ask"
    for before, after in zip(plain, once, strict=True):
        assert before.keys() == after.keys()
        for name in ("pixel_values", "image_grid_thw"):
            assert type(after[name]) is type(before[name])
            assert torch.equal(torch.as_tensor(after[name]), torch.as_tensor(before[name]))
        assert [list(ids) for ids in before["input_ids"]] == [list(ids) for ids in after["input_ids"]]
    assert "preprocess" not in vars(images)


def sum_in_buckets(rank: int, meet: Path) -> None:
    """One of two processes."""
    torch.distributed.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=2)
    plain = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(5)])
    for i, parameter in enumerate(plain.parameters()):
        torch.nn.init.orthogonal_(parameter, gain=1 + i, generator=torch.Generator().manual_seed(i))
    handler = DistributedDataParallelKwargs()
    trainer = SimpleNamespace(accelerator=SimpleNamespace(ddp_handler=handler))
    callback = GradientsInBuckets(trainer)
    trainer.model_wrapped = model = DistributedDataParallel(plain, **handler.to_kwargs())
    rows = [[torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * r + i)) for i in range(3)] for r in (0, 1)]
    for step in range(2):
        callback.on_step_begin(None, None, None)
        for i, row in enumerate(rows[rank]):
            with model.no_sync() if i < 2 else nullcontext():
                model(row).square().sum().backward()
            places = {p.grad.untyped_storage().data_ptr() for p in plain.parameters()}
            assert len(places) == 1, f"step {step}, pass {i}: gradients in {len(places)} places"
        found = [p.grad.clone() for p in plain.parameters()]
        model.zero_grad()
        for row in rows[0] + rows[1]:
            (plain(row).square().sum() / 2).backward()
        for gradient, parameter in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)
        model.zero_grad()


def test_gradients_of_data_parallel_training_lie_in_buckets_alone(tmp_path: Path) -> None:
    """From the first pass of a step to the last, and they are the mean over the processes."""
    torch.multiprocessing.start_processes(sum_in_buckets, (tmp_path / "meet",), 2, start_method="fork")
