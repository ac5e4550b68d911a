"""Set-up shared by all tests: machine-checked shapes, repeatable property tests, model folders small and real."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from jaxtyping import config as shape_checks
from jaxtyping import install_import_hook

# Shape annotations are checked on every call in the test run, and only there. Before anything of the package is loaded.
# Two thirds of the time goes into it, so the short run (`make test-fast`) leaves it to the whole one.
if os.environ.get("PACELINE_SHAPE_CHECKS") != "off":
    install_import_hook("paceline", "beartype.beartype")

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("repeatable")

NAMED_05B = "qwen2.5-coder-0.5b-instruct-q4_k_m"
THREADS = min(4, os.cpu_count() or 1)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """As users run the package: annotations unchecked, at full speed, and nobody draws from the global generator."""
    shape_checks.update("jaxtyping_disable", True)
    yield
    shape_checks.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _same_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test starts with the same number of threads, whatever the one before asked for.

    Tiny models run on one: they are too small to share, and waiting for a busy core makes them twenty times slower.
    """
    torch.set_num_threads(THREADS if request.node.get_closest_marker("real") else 1)
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="session")
def model_05b() -> Path:
    """The named 0.5B model, fetched on first use. Tests that ask for it carry the mark ``real``."""
    from paceline.models import resolve

    return Path(resolve(NAMED_05B).path)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as a user would have one, 100 KB: random float32 Qwen2 weights and a byte-level BPE tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-qwen2"
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["def add(a, b):\n    return a + b\n", "the quick brown fox jumps over the dog"]
    bpe.train_from_iterator(text * 8, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config).to(torch.float32).eval()
        with torch.no_grad():
            model.lm_head.weight.mul_(8.0)  # wide margins, so that rounding decides nothing
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Written without an end id: a random model must not stop by chance in tests that count tokens.
    (folder / "generation_config.json").write_text(json.dumps({"pad_token_id": 0}))
    return folder
