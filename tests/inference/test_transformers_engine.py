"""The transformers engine on tiny checkpoints of the real classes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file

from coepg_dagster.inference.engine import Generation, Request, Sampling, Usage
from coepg_dagster.inference.files import IncompleteCheckpoint
from coepg_dagster.inference.processing import VISION_TOKENS, token_bytes, vision_token_ids
from coepg_dagster.inference.transformers_engine import (
    TransformersEngine,
    is_finite,
    load_checkpoint,
    nucleus,
)
from coepg_dagster.inference.weights import local_version
from coepg_dagster.progress import Ended
from coepg_dagster.prompts import grounder_messages, planner_messages
from tests.inference.test_files import KINDS

RED, BLUE = Image.new("RGB", (84, 112), (200, 10, 10)), Image.new("RGB", (84, 112), (10, 10, 200))
WIDE = Image.new("RGB", (140, 84), (10, 200, 10))


def requests() -> list[Request]:
    """Prompts of different lengths, on screens of two sizes, some of them on one screen."""
    return [
        Request(RED, grounder_messages("Click OK", "compact")),
        Request(BLUE, grounder_messages("the long description of a Search button below the Name", "compact")),
        Request(WIDE, grounder_messages("Next", "compact")),
        Request(RED, planner_messages("Click Cancel", ["Click OK", "Enter red into Name"], "compact")),
        Request(RED, grounder_messages("Cancel é <|im_end|>", "compact")),
        Request(BLUE, planner_messages("Click OK", [], "web")),
    ]


@pytest.fixture(scope="module")
def engine(random_checkpoint: Callable[[int], Path]) -> TransformersEngine:
    return TransformersEngine(random_checkpoint(0), dtype="float32", device="cpu", batch_size=4)


def generate(engine: TransformersEngine, queries: list[Request], sampling: Sampling) -> list[list[Generation]]:
    answers = engine.generate(queries, sampling)
    assert all(isinstance(answer, Generation) for row in answers for answer in row)
    return answers  # type: ignore[return-value]


def teacher_forced(engine: TransformersEngine, request: Request, answer: Generation) -> list[float]:
    """The log-probabilities of an answer's tokens in one plain forward pass over prompt and answer."""
    processor, model = engine._processor, engine._model
    text = processor.apply_chat_template(request.messages, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=[[request.image]], return_tensors="pt", do_resize=False)
    vocabulary = {token_bytes(processor.tokenizer, i): i for i in range(len(processor.tokenizer))}
    ids = torch.tensor([[vocabulary[piece] for piece in answer.pieces]])
    prompt = inputs["input_ids"].shape[1]
    inputs["input_ids"] = torch.cat([inputs["input_ids"], ids], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(ids)], 1)
    with torch.inference_mode():
        logits = model(**inputs).logits[0, prompt - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[0, :, None])[:, 0].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_log_probabilities_are_those_at_temperature_one(engine: TransformersEngine, temperature: float) -> None:
    queries = requests()
    answers = generate(engine, queries, Sampling(6, temperature, seed=3))
    for request, [answer] in zip(queries, answers, strict=True):
        # a special token has no bytes to find it by
        if b"" not in answer.pieces and answer.pieces:
            assert answer.logprobs == pytest.approx(teacher_forced(engine, request, answer), abs=1e-4)
    assert sum(b"" not in answer.pieces for [answer] in answers) >= 4


@pytest.fixture(scope="module")
def one_by_one(engine: TransformersEngine) -> list[Generation]:
    """The answers to `requests()`, each generated alone."""
    return [generate(engine, [request], Sampling(5))[0][0] for request in requests()]


@settings(max_examples=6)
@given(st.permutations(range(6)), st.integers(1, 6), st.lists(st.integers(0, 5), max_size=2))
def test_neither_order_nor_batches_change_an_answer_or_a_confidence(
    engine: TransformersEngine, one_by_one: list[Generation], order: list[int], batch_size: int, again: list[int]
) -> None:
    queries, chosen = requests(), [*order, *again]
    batched = TransformersEngine.of(engine._model, engine._processor, batch_size=batch_size)
    for i, [answer] in zip(chosen, generate(batched, [queries[i] for i in chosen], Sampling(5)), strict=True):
        assert answer.text == one_by_one[i].text
        assert answer.logprobs == pytest.approx(one_by_one[i].logprobs, abs=1e-4)


def test_samples_come_in_order_and_the_same_seed_draws_the_same(engine: TransformersEngine) -> None:
    queries, sampling = requests(), Sampling(5, temperature=1.0, top_p=0.9, samples=3, seed=5)
    first, second = generate(engine, queries, sampling), generate(engine, queries, sampling)
    assert first == second
    assert [len(row) for row in first] == [3] * 6
    assert len({answer.text for row in first for answer in row}) > 6, "samples differ"
    other = generate(engine, queries, Sampling(5, temperature=1.0, top_p=0.9, samples=3, seed=6))
    assert other != first


def test_a_tiny_nucleus_is_greedy(engine: TransformersEngine) -> None:
    greedy = generate(engine, requests(), Sampling(5))
    nucleus = generate(engine, requests(), Sampling(5, temperature=1.0, top_p=1e-6))
    assert [row[0].text for row in nucleus] == [row[0].text for row in greedy]


@pytest.mark.parametrize("sharpness", [0.1, 3.0, 30.0])
def test_a_nucleus_is_the_same_whether_the_vocabulary_is_sorted_or_not(sharpness: float) -> None:
    draw = torch.Generator().manual_seed(3)
    probabilities = (torch.randn(5, 3000, generator=draw) * sharpness).softmax(-1)
    for top_p in (0.01, 0.5, 0.95):
        kept = nucleus(probabilities, top_p)
        for row, expected in zip(kept, probabilities, strict=True):
            ranked = expected.sort(descending=True).values
            size = int((ranked.cumsum(0) - ranked < top_p).sum())
            assert int((row > 0).sum()) == size
            assert torch.equal(row[row > 0].sort(descending=True).values, ranked[:size])
            assert torch.equal(row[row > 0], expected[row > 0])


def test_no_requests_give_no_answers(engine: TransformersEngine) -> None:
    assert engine.generate([], Sampling(1)) == []


def test_vision_tokens_are_never_written(random_checkpoint: Callable[[int], Path]) -> None:
    """Not even by a model that wants nothing else."""
    model, processor = load_checkpoint(random_checkpoint(1), "float32", "cpu")
    ids = vision_token_ids(processor.tokenizer)
    assert len(ids) >= 4
    engine = TransformersEngine.of(model, processor, batch_size=8)
    forward = model.forward

    def obsessed(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.logits[..., ids] += 50
        return output

    model.forward = obsessed
    vocabulary = set(processor.tokenizer.convert_ids_to_tokens(ids))
    assert vocabulary <= set(VISION_TOKENS)
    for sampling in (Sampling(4), Sampling(4, temperature=1.0, samples=4)):
        for row in engine.generate(requests()[:2], sampling):
            for answer in row:
                assert isinstance(answer, Generation)
                assert not any(token in answer.text for token in VISION_TOKENS)
                assert all(logprob < -40 for logprob in answer.logprobs), "the log-probability is the model's own"


def test_an_answer_that_ends_at_once_keeps_how_sure_that_was(
    engine: TransformersEngine, random_checkpoint: Callable[[int], Path]
) -> None:
    stop = int(engine._stops[0])
    answer = engine._generation([stop, 5, 6], [-0.25, -1.0, -2.0], 20, 16)
    assert answer == Generation("", (), (), "stop", -0.25, Usage(20, 16, 1), engine.weights)
    assert engine.weights == local_version(str(random_checkpoint(0)))


def test_two_images_or_none_are_refused(engine: TransformersEngine) -> None:
    [message] = grounder_messages("x", "compact")
    for content in (message["content"][1:], [message["content"][0], *message["content"]]):
        with pytest.raises(ValueError, match="exactly one image"):
            engine.generate([Request(RED, [{"role": "user", "content": content}])], Sampling(1))


def test_token_bytes_of_a_text_are_the_text(engine: TransformersEngine) -> None:
    tokenizer = engine._tokenizer
    for text in ("Click OK (12,34) é ü 漢字 \n\t 🙂", '{"plan": "x", "action_type": "CLICK", "value": ""}'):
        pieces = [token_bytes(tokenizer, i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
        assert b"".join(pieces) == text.encode()
    assert token_bytes(tokenizer, tokenizer.eos_token_id) == b""


def test_an_output_without_a_token_writes_nothing(random_checkpoint: Callable[[int], Path]) -> None:
    """Models have more outputs than their tokenizers have tokens."""
    model, processor = load_checkpoint(random_checkpoint(1), "float32", "cpu")
    model.resize_token_embeddings(len(processor.tokenizer) + 2)
    engine, forward = TransformersEngine.of(model, processor, batch_size=8), model.forward

    def beyond(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.logits[..., -1] += 50
        return output

    model.forward = beyond
    [[answer]] = generate(engine, requests()[:1], Sampling(3))
    assert (answer.text, answer.pieces, answer.finish_reason) == ("", (b"",) * 3, "length")


def test_a_repetition_penalty_of_the_checkpoint_is_not_ours(
    random_checkpoint: Callable[[int], Path], engine: TransformersEngine, tmp_path: Path
) -> None:
    """Qwen2.5-VL ships one of 1.05 for chat; greedy here means the model's own first choice."""
    folder = shutil.copytree(random_checkpoint(0), tmp_path / "chatty")
    file = folder / "generation_config.json"
    chat = {"repetition_penalty": 5.0, "do_sample": True, "temperature": 0.1, "top_k": 1}
    file.write_text(json.dumps(json.loads(file.read_text()) | chat))
    chatty = TransformersEngine(folder, dtype="float32", device="cpu", batch_size=4)
    assert generate(chatty, requests()[:2], Sampling(5)) == generate(engine, requests()[:2], Sampling(5))


def test_without_a_stop_token_in_its_generation_config_the_tokenizers_is_one(
    copy: Path, engine: TransformersEngine
) -> None:
    file = copy / "generation_config.json"
    file.write_text(json.dumps({"transformers_version": json.loads(file.read_text())["transformers_version"]}))
    silent = TransformersEngine(copy, dtype="float32", device="cpu", batch_size=4)
    assert generate(silent, requests()[:2], Sampling(5)) == generate(engine, requests()[:2], Sampling(5))


# load_checkpoint


@pytest.fixture
def copy(random_checkpoint: Callable[[int], Path], tmp_path: Path) -> Path:
    return shutil.copytree(random_checkpoint(0), tmp_path / "copy")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def some_weight(weights: dict[str, torch.Tensor]) -> str:
    return next(name for name in sorted(weights) if "mlp" in name and name.endswith("weight"))


def test_missing_weights_are_refused(copy: Path) -> None:
    change_weights(copy, lambda weights: weights.__delitem__(some_weight(weights)))
    with pytest.raises(IncompleteCheckpoint, match=r"missing_keys.*mlp"):
        load_checkpoint(copy, "float32", "cpu")


def test_unknown_weights_are_refused(copy: Path) -> None:
    change_weights(copy, lambda weights: weights.update(stranger=torch.zeros(2)))
    with pytest.raises(IncompleteCheckpoint, match=r"unexpected_keys.*stranger"):
        load_checkpoint(copy, "float32", "cpu")


def test_a_renamed_weight_is_not_replaced_by_a_random_one(copy: Path) -> None:
    def rename(weights: dict[str, torch.Tensor]) -> None:
        name = some_weight(weights)
        weights[name.replace("mlp", "mlq")] = weights.pop(name)

    change_weights(copy, rename)
    with pytest.raises(IncompleteCheckpoint, match="another version of transformers"):
        load_checkpoint(copy, "float32", "cpu")


@settings(max_examples=60)
@given(values=st.lists(st.floats(width=16), max_size=9), kind=st.sampled_from(KINDS), part=st.booleans())
def test_finite_tensors_are_those_that_torch_names(values: list[float], kind: torch.dtype, part: bool) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(kind)
    tensor = tensor[::2] if part else tensor
    assert is_finite(tensor) == bool(torch.isfinite(tensor.float()).all())


def test_whole_numbers_are_finite() -> None:
    assert is_finite(torch.tensor([2**62])) and is_finite(torch.tensor([True]))


def test_weights_that_are_not_finite_are_refused(copy: Path) -> None:
    change_weights(copy, lambda weights: weights[some_weight(weights)].view(-1)[0].fill_(float("nan")))
    with pytest.raises(IncompleteCheckpoint, match=r"not finite.*lower the learning rate"):
        load_checkpoint(copy, "float32", "cpu")


@pytest.mark.parametrize("sampling", [Sampling(4), Sampling(4, temperature=1.0, samples=2)])
def test_a_model_that_overflows_answers_nothing(copy: Path, sampling: Sampling) -> None:
    """Its weights are finite, its attention is not; a NaN would have the highest confidence."""

    def overflow(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weights[name] *= 1e25

    change_weights(copy, overflow)
    with pytest.raises(Ended, match="copy computes numbers that are infinite or none at all"):
        TransformersEngine(copy, dtype="float32", device="cpu", batch_size=4).generate(requests()[:1], sampling)


def test_pickled_weights_are_not_opened(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    torch.save(weights, copy / "pytorch_model.bin")
    with pytest.raises(IncompleteCheckpoint, match=r"no \*\.safetensors but pytorch_model\.bin"):
        load_checkpoint(copy, "float32", "cpu")
