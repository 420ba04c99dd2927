"""LoRA and the attention in use: what is trained, what is saved, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Grpo, Lora, Sft
from coepg_dagster.inference.architecture import read
from coepg_dagster.inference.transformers_engine import load_checkpoint
from coepg_dagster.training import sft
from coepg_dagster.training.adapters import lora_config, merged
from coepg_dagster.training.cdrem_reward import CdremReward
from coepg_dagster.training.grpo import train_grpo
from coepg_dagster.training.sft import train_sft
from coepg_dagster.training.speed import WrongAttention, check_attention, load_with_attention
from tests.jobs import grpo_job, quiet, sft_job

LORA = Lora(rank=4, alpha=8)
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "attn.qkv", "attn.proj")


def changes(before: Path, after: Path) -> dict[str, torch.Tensor]:
    """What training added to each tensor that it changed, by name; both checkpoints hold the same tensors."""
    one, other = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    assert {n: t.shape for n, t in one.items()} == {n: t.shape for n, t in other.items()}
    return {name: other[name] - one[name] for name in one if not torch.equal(one[name], other[name])}


@pytest.mark.parametrize("frozen", [False, True])
def test_sft_with_lora_saves_a_whole_checkpoint_that_differs_by_matrices_of_that_rank(
    frozen: bool,
    random_checkpoint: Callable[[int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    init, out, logits = random_checkpoint(2), tmp_path / "out", {}
    ids = torch.arange(40)[None] % 30

    def remember(trainer: Any) -> int:
        model = trainer.model.eval()
        assert isinstance(model, PeftModel)
        with torch.no_grad():
            logits["adapted"] = model(input_ids=ids).logits
        return merge(trainer)

    merge = sft.merge_adapters
    monkeypatch.setattr(sft, "merge_adapters", remember)
    config = Sft(max_steps=2, batch_size=6, micro_batch_size=6, learning_rate=1e-2, freeze_vision=frozen, lora=LORA)
    figures = train_sft(sft_job(out, (dataset, steps, models), "planner", init, config, seed=7), quiet)

    deltas = changes(init, out)
    assert deltas and all(name.removesuffix(".weight").endswith(ADAPTED) for name in deltas)
    assert any("visual" in name for name in deltas) is not frozen
    assert all(torch.linalg.matrix_rank(delta.double(), rtol=1e-4) <= 4 for delta in deltas.values())
    assert figures["trained_parameters"] == read(init).adapters(4, vision=not frozen), "as `coepg plan` counts them"
    loaded, _ = load_checkpoint(out, "float32", "cpu")
    assert not isinstance(loaded, PeftModel) and not list(out.glob("adapter*"))
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, logits["adapted"], rtol=1e-4, atol=1e-4)


def test_grpo_with_lora_starts_at_its_reference_and_leaves_the_tower(
    random_checkpoint: Callable[[int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longer answers are better here: an untrained planner passes no gate, so that no group would have spread."""
    score = CdremReward.score

    def longer(self: Any, texts: Any, step_ids: Any) -> list[float]:
        score(self, texts, step_ids)
        for row in self.rows:
            row["reward"] = float(len(row["text"]))
        return [row["reward"] for row in self.rows]

    monkeypatch.setattr(CdremReward, "score", longer)
    init, out = random_checkpoint(0), tmp_path / "out"
    config = Grpo(
        prompts_per_step=2,
        group_size=4,
        micro_batch_size=8,
        max_steps=3,
        learning_rate=1e-2,
        max_plan_tokens=16,
        ensemble=False,
        lora=LORA,
        attention="eager",
    )
    logged: list[Any] = []
    job = grpo_job(out, (dataset, steps, models), init, random_checkpoint(1), config)
    figures = train_grpo(job, lambda done, of, log: logged.append(log))
    kl = [log["kl"] for log in logged if "kl" in log]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[2] > 1e-6, "warm-up: nothing moves in the first step"
    deltas = changes(init, out)
    assert deltas and all(name.removesuffix(".weight").endswith(ADAPTED) and "visual" not in name for name in deltas)
    assert figures["trained_parameters"] == read(init).adapters(4, vision=False)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_merged_adapters_compute_the_same_in_fewer_products_and_leave_the_weights(
    dtype: Any, most: float, random_checkpoint: Callable[[int], Path]
) -> None:
    torch.manual_seed(0)
    model, _ = load_checkpoint(random_checkpoint(0), dtype, "cpu")
    policy = get_peft_model(model, lora_config(model, LORA, freeze_vision=True))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in policy.state_dict().items()}
    products = []
    for name, module in policy.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_hook(lambda *_: products.append(1))
    ids = torch.arange(40)[None] % 30

    @torch.no_grad()
    def logits() -> torch.Tensor:
        products.clear()
        found: torch.Tensor = policy(input_ids=ids).logits.float()
        return found

    adapted, with_adapters = logits(), len(products)
    with pytest.raises(ZeroDivisionError), merged(policy):
        assert (logits() - adapted).abs().max() < most * adapted.abs().max() and not products
        1 / 0  # noqa: B018 - whatever ends it
    assert (
        torch.equal(logits(), adapted)
        and len(products) == with_adapters == 7 * model.config.text_config.num_hidden_layers
    )
    after = policy.state_dict()
    assert all(
        after[name].data_ptr() == place and torch.equal(after[name], was) for name, (place, was) in before.items()
    )
    assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in policy.named_parameters())
    with policy.disable_adapter(), torch.no_grad():
        assert (policy(input_ids=ids).logits.float() - adapted).abs().max() > most * adapted.abs().max(), (
            "they do something"
        )


# attention


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_in_use_is_printed(
    attention: Any, random_checkpoint: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = load_with_attention(str(random_checkpoint(0)), "float32", "cpu", attention)
    assert check_attention(model, attention) == {"language model": attention, "vision tower": attention}
    assert f"attention: language model {attention}, vision tower {attention}" in capsys.readouterr().out


def test_a_model_that_fell_back_is_refused(random_checkpoint: Callable[[int], Path]) -> None:
    model, _ = load_with_attention(str(random_checkpoint(0)), "float32", "cpu", "sdpa")
    model.model.visual.config._attn_implementation = "eager"
    with pytest.raises(WrongAttention, match=r"sdpa is configured, but the vision tower calls eager.*Set `attention`"):
        check_attention(model, "sdpa")


@pytest.mark.parametrize(
    ("device", "why"), [("cpu", "needs a GPU"), ("cuda", "cannot be used here .*install a flash-attn")]
)
def test_flash_attention_that_is_not_there_says_what_to_do(
    device: str, why: str, random_checkpoint: Callable[[int], Path]
) -> None:
    """This machine has neither a GPU nor the package."""
    with pytest.raises(WrongAttention, match=f"{why}.*`attention: sdpa`"):
        load_with_attention(str(random_checkpoint(0)), "bfloat16", device, "flash_attention_2")
