"""Models of true size, and their tiny counterparts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import sized
from coepg_dagster.inference.transformers_engine import load_checkpoint


@pytest.mark.parametrize("size", sized.TINY)
def test_a_tiny_checkpoint_has_the_parameters_that_are_counted(size: sized.Size, tmp_path: Path) -> None:
    folder = sized.make_checkpoint(tmp_path / size, size, device="cpu")
    model, _ = load_checkpoint(folder, "float32", "cpu")
    assert sum(p.numel() for p in model.parameters()) == sized.architecture_of(size).parameters


@pytest.mark.parametrize("size", sized.SIZES)
def test_screenshots_pass_the_processor_as_they_are(size: sized.Size, tmp_path: Path) -> None:
    processor: Any = sized.write_processor(tmp_path, size)
    width, height = sized.SCREENS[size]
    grid = processor.image_processor([Image.new("RGB", (width, height))], return_tensors="pt")["image_grid_thw"]
    patch = sized.architecture_of(size).vision.patch
    assert grid.tolist() == [[1, height // patch, width // patch]]
    assert len(processor.tokenizer) == sized.architecture_of(size).vocabulary
