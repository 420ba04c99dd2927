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
from PIL import Image
from torch.nn.parallel import DistributedDataParallel

from coepg_dagster.inference.attention import WINDOWS, attend_windows
from coepg_dagster.inference.transformers_engine import load_checkpoint
from coepg_dagster.training.speed import (
    GradientsInBuckets,
    compile_layers,
    expect_right_padding,
    half_activations,
    recompute,
    vision_to_bfloat16,
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
    vision_to_bfloat16(model)
    after, halved = loss_and_gradient()
    assert seen == [torch.bfloat16]
    assert after == pytest.approx(before, rel=5e-3)
    assert halved.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(halved.flatten(), gradient.flatten(), 0) > 0.99


def test_a_tower_that_is_trained_keeps_its_weights(random_checkpoint: Callable[[int], Path]) -> None:
    model, _ = load_checkpoint(random_checkpoint(0), "float32", "cpu")
    with pytest.raises(ValueError, match="trained"):
        vision_to_bfloat16(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_windows_in_one_kernel_attend_as_one_by_one(random_checkpoint: Callable[[int], Path]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 4, 200, 80, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3))
    ends = torch.tensor([0, 64, 128, 160, 200], device="cuda", dtype=torch.int32)
    output, _ = attend_windows(None, q, k, v, None, cu_seq_lens_q=ends, max_length_q=64, scaling=80**-0.5)
    one_by_one = [
        torch.nn.functional.scaled_dot_product_attention(
            *(t[:, :, a:b].float() for t in (q, k, v)), scale=80**-0.5
        ).transpose(1, 2)
        for a, b in pairwise(ends.tolist())
    ]
    torch.testing.assert_close(output.float(), torch.cat(one_by_one, 1), rtol=2e-2, atol=2e-2)
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
        gradients = [p.grad.clone() for p in plain.parameters()]
        model.zero_grad()
        for row in rows[0] + rows[1]:
            (plain(row).square().sum() / 2).backward()
        for gradient, parameter in zip(gradients, plain.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)
        model.zero_grad()


def test_gradients_of_data_parallel_training_lie_in_buckets_alone(tmp_path: Path) -> None:
    """From the first pass of a step to the last, and they are the mean over the processes."""
    torch.multiprocessing.start_processes(sum_in_buckets, (tmp_path / "meet",), 2, start_method="fork")
