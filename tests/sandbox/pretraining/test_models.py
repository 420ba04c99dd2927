from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from coepg_dagster import prompts
from coepg_dagster.sandbox.pretraining import recipe, tiny_models
from coepg_dagster.sandbox.pretraining import tokenizer as tokens
from coepg_dagster.sandbox.pretraining.fast import PREFIX, FastModel
from coepg_dagster.sandbox.pretraining.tiny_models import SCREEN_HEIGHT, SCREEN_WIDTH, VISUAL_TOKENS
from tests.project import REPOSITORY as ROOT

MODELS = ROOT / "models"
SHIPPED = tuple(recipe.read(MODELS / "recipe.yaml").checkpoints)
MOST_BYTES = 12_000_000


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "model"
    corpus = ['Click on the "previous" button.', 'Enter "Cristin" into the text field and press Submit.']
    tiny_models.save(*tiny_models.build("small", tokens.fit(corpus), 1), folder)
    return folder


def noise(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (SCREEN_HEIGHT, SCREEN_WIDTH, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def chat_inputs(processor: Any, plan: str, image: Image.Image) -> Any:
    text = processor.apply_chat_template(prompts.grounder_messages(plan, "compact"), add_generation_prompt=True)
    return processor(text=[text], images=[image], return_tensors="pt")


def test_auto_classes_load_and_generate(random_checkpoint: Path) -> None:
    processor = AutoProcessor.from_pretrained(random_checkpoint)
    model = AutoModelForImageTextToText.from_pretrained(random_checkpoint, dtype=torch.float32)
    inputs = chat_inputs(processor, "button 'previous'", noise(0))
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert 1 <= output.shape[1] - inputs["input_ids"].shape[1] <= 4


def test_screens_are_not_resized_and_image_tokens_equal_the_grid(random_checkpoint: Path) -> None:
    processor = AutoProcessor.from_pretrained(random_checkpoint)
    inputs = chat_inputs(processor, "x", noise(0))
    time, height, width = inputs["image_grid_thw"][0].tolist()
    assert (time, height * 14, width * 14) == (1, SCREEN_HEIGHT, SCREEN_WIDTH)
    image_token = processor.tokenizer.get_vocab()[tokens.IMAGE_PAD]
    assert int((inputs["input_ids"] == image_token).sum()) == height * width // 4 == VISUAL_TOKENS


def test_the_fast_forward_pass_equals_the_librarys(random_checkpoint: Path) -> None:
    model, processor = tiny_models.load(random_checkpoint)
    fast = FastModel(model, processor.tokenizer)
    image = noise(3)
    other = torch.tensor(processor.tokenizer.encode("link 'x'"))
    inputs = chat_inputs(processor, "press on the previous button", image)
    with torch.no_grad():
        expected = model(**inputs).logits[0, PREFIX:]
        prompt = inputs["input_ids"][0, PREFIX:]
        text = torch.cat([other, prompt])[None]
        positions = torch.cat([torch.arange(len(other)), torch.arange(len(prompt))])[None]
        segments = torch.cat([torch.full_like(other, 1), torch.full_like(prompt, 2)])[None]
        visual = fast.screens(torch.from_numpy(np.array(image))[None])
        result = fast.logits(fast.states(visual, text, positions, segments))[0, len(other) :]
    assert torch.allclose(result, expected, atol=1e-4)


def test_presets_have_the_sizes_that_they_are_for() -> None:
    tokenizer = tokens.fit(["".join(chr(97 + n // 26**k % 26) for k in range(4)) for n in range(2000)], size=1472)
    counts = {
        name: tiny_models.parameter_count(tiny_models.build(name, tokenizer, 0)[0]) for name in tiny_models.PRESETS
    }
    assert 0.5e6 < counts["small"] < counts["medium"] < 1e6 <= counts["base"] <= 1.5e6
    assert 3 <= counts["large"] / counts["base"] <= 6


def test_the_same_seed_gives_the_same_weights() -> None:
    tokenizer = tokens.fit([])
    first, again, other = (
        tiny_models.build("small", tokenizer, seed)[0].state_dict()["model.visual.merger.mlp.0.weight"]
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_broken_checkpoint_is_noticed(tmp_path: Path) -> None:
    model, processor = tiny_models.build("small", tokens.fit([]), 0)
    with torch.no_grad():
        model.model.visual.merger.mlp[0].weight[0, 0] = float("nan")
    with pytest.raises(tiny_models.BadCheckpoint, match="not finite"):
        tiny_models.save(model, processor, tmp_path / "broken")


def test_shipped_models_are_small_enough() -> None:
    files = [path for name in SHIPPED for path in (MODELS / name).iterdir()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_models_load_whole(name: str) -> None:
    tiny_models.check(MODELS / name)
    assert (MODELS / name / "README.md").is_file()
    processor = AutoProcessor.from_pretrained(MODELS / name)
    assert processor.tokenizer.decode(processor.tokenizer.encode('Type "xQ7" (12,223) é')) == 'Type "xQ7" (12,223) é'
