"""What a training came to: its curves as a picture, and a card for the head's folder."""

import json
from pathlib import Path
from typing import Any

from paceline.errors import BadRequest
from paceline.files import whole, write_atomically
from paceline.train.recipe import Recipe

__all__ = ["card", "plot", "read_metrics"]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The notes of a training; a line that was cut short is left out.

    Raises:
        BadRequest: there are none.
    """
    found = []
    try:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    except OSError as error:
        raise BadRequest(f"no notes of a training in {path}: {error.strerror or error}") from error
    return found


def plot(metrics: Path, output: Path) -> bool:
    """Loss by step, shares of right guesses, and tokens per pass by epoch; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    notes = read_metrics(metrics)
    steps = [note for note in notes if "learning_rate" in note]
    epochs = [note for note in notes if "acceptance_length" in note]
    figure, (loss, share, length) = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    loss.plot([n["step"] for n in steps], _smooth([n["loss"] for n in steps]), color="#2a6f97", label="learnt texts")
    loss.plot(
        [n["step"] for n in epochs], [n["held_out"]["loss"] for n in epochs], "o-", color="#c9184a", label="held out"
    )
    loss.set(title="loss", xlabel="step")
    loss.legend(frameon=False)
    at = [n["step"] for n in epochs]
    for i in range(sum(key.startswith("right_") for key in epochs[0]["held_out"]) if epochs else 0):
        own = [n["held_out"][f"right_{i}"] for n in epochs]
        share.plot(at, own, "-", color=pyplot.get_cmap("viridis")(i / 7), label=f"guess {i + 1}, read")
        drafted = [n["kept"][i] if i < len(n["kept"]) else None for n in epochs]
        share.plot(
            at, [float("nan") if d is None else d for d in drafted], ":", color=pyplot.get_cmap("viridis")(i / 7)
        )
    share.set(title="right on held-out texts (dotted: when drafting)", xlabel="step", ylim=(0, 1))
    share.legend(frameon=False, fontsize=8)
    length.plot(at, [n["acceptance_length"] for n in epochs], "o-", color="#2d6a4f")
    length.axhline(1.0, color="#999999", linewidth=0.8)
    length.set(title="tokens per pass, greedy, drafting a chain", xlabel="step")
    for axis in (loss, share, length):
        axis.spines[["top", "right"]].set_visible(False)
    with whole(output) as file:
        figure.savefig(file, format="png", dpi=130)
    pyplot.close(figure)
    return True


def _smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Each value with those before it, older ones counting less."""
    found, mean, total = [], 0.0, 0.0
    for value in values:
        mean, total = weight * mean + value, weight * total + 1.0
        found.append(mean / total)
    return found


def card(path: Path, recipe: Recipe, length: float, num_texts: int, num_learnt: int) -> None:
    """What the head is, in the words that a hub shows."""
    kinds = {"medusa": "Medusa heads", "eagle": "An EAGLE-1 head", "eagle3": "An EAGLE-3 head"}
    where = "written by the model itself" if recipe.data == "self" else f"from `{Path(recipe.data).name}`"
    others = {
        "medusa": "It borrows the model's vocabulary matrix; with `paceline.formats.with_own` vLLM reads it too.",
        "eagle": "vLLM reads this folder as it is; SGLang asks for the architecture LlamaForCausalLMEagle.",
        "eagle3": "vLLM and SGLang read this folder as it is; `with_own` and `write_head` make speculators' layout.",
    }
    text = f"""---
base_model: {recipe.model}
library_name: paceline
tags: [speculative-decoding, {recipe.method}]
---

# {kinds[recipe.method]} for {recipe.model}

Drafts for that model in speculative decoding; what comes out is the model's own text.

    paceline generate {recipe.model} "..." --method {recipe.method} --draft-model FOLDER

{others[recipe.method]}

| | |
|---|---|
| texts | {num_texts:,}, {num_learnt:,} tokens learnt, {where}, temperature {recipe.temperature:g} |
| training | loss {recipe.loss}, learning rate {recipe.learning_rate:g}, {recipe.epochs} epochs, seed {recipe.seed} |
| held-out questions | {length:.2f} tokens per pass of the model, greedy, a chain of guesses |

Everything else is in `recipe.json`, and every step in `metrics.jsonl`.
"""
    write_atomically(path, text)
