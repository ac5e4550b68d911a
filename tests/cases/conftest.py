"""Model folders that several tests of this folder use."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_draft(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model for `tiny_model`: its weights disturbed, so that guesses are often right and often wrong."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("models") / "tiny-draft"
    model, noise = AutoModelForCausalLM.from_pretrained(tiny_model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise) * 0.15 * weight.std())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder
