"""What a head holds, and whether it fits a target."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.errors import CorruptWeights, IncompatibleDrafter

from .head import Eagle3Settings, EagleSettings, Head, MedusaSettings, default_layer_ids
from .weights import read_json

_WORDS = {"medusa": "Medusa", "eagle": "EAGLE-1 (EAGLE-2 is the same head)", "eagle3": "EAGLE-3"}


def describe(head: Head) -> dict[str, Any]:
    """Everything about a head that is not a weight, as JSON can hold it."""
    settings = {field.name: getattr(head.settings, field.name) for field in fields(head.settings)}
    sizes: dict[str, int] = {}
    for tensor in head.tensors.values():
        sizes[_dtype(tensor)] = sizes.get(_dtype(tensor), 0) + tensor.numel()
    return {
        "kind": head.kind,
        "layout": head.source.layout if head.source else None,
        "path": str(head.source.path) if head.source else None,
        "base_model": head.base_model,
        "parameters": head.num_parameters,
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in head.tensors.values()),
        "dtypes": sizes,
        "settings": {key: _plain(value) for key, value in settings.items()},
        "from_target": from_target(head),
        "tensors": {name: [list(tensor.shape), _dtype(tensor)] for name, tensor in head.tensors.items()},
        "notes": list(head.notes),
    }


def from_target(head: Head) -> list[str]:
    """What a head takes from its target when it drafts."""
    settings = head.settings
    if isinstance(settings, MedusaSettings):
        return ["the last hidden state, after the final norm"] + ["lm_head"] * (settings.lm_head == "target")
    if not isinstance(settings, Eagle3Settings):
        found = ["the last hidden state, after the final norm"]
    elif settings.layer_ids is None:
        found = ["hidden_states 2, L//2 and L-3 of L layers"]
    else:
        found = [f"hidden_states {', '.join(map(str, settings.layer_ids))}"]
    return found + [name for name in ("embed_tokens", "lm_head") if getattr(settings, name) == "target"]


def description(head: Head) -> str:
    """The same in lines to read, the tensors left out."""
    settings, about = head.settings, describe(head)
    trimmed = head.target_ids is not None
    own = settings.draft_vocab_size if isinstance(settings, MedusaSettings | Eagle3Settings) else settings.vocab_size
    lines = [
        f"{_WORDS[head.kind]} in the layout {about['layout']}" if about["layout"] else _WORDS[head.kind],
        f"trained for  {head.base_model or 'a model that the head does not name'}",
        f"weights      {about['parameters']:,} parameters in {len(head.tensors)} tensors, {about['bytes']:,} bytes; "
        + ", ".join(sorted(about["dtypes"])),
        f"fits         {_fits(settings)}",
        f"vocabulary   {own:,} of {settings.vocab_size:,} tokens" if trimmed else f"vocabulary   {own:,} tokens",
        f"takes        {'; '.join(about['from_target'])}",
    ]
    if isinstance(settings, MedusaSettings):
        lines.append(f"heads        {settings.num_heads}, each of {settings.num_layers} block(s)")
    if isinstance(settings, Eagle3Settings):
        lines.append(f"layers       {settings.layer_id_source}")
    if isinstance(settings, EagleSettings):
        scaled = f"scaled by {settings.rope_scaling['rope_type']}" if settings.rope_scaling else "unscaled"
        lines.append(
            f"positions    base {settings.rope_theta:g}, {scaled}, trained up to {settings.max_position_embeddings:,}"
        )
    return "\n".join(lines + [f"note         {note}" for note in head.notes])


def _fits(settings: MedusaSettings | EagleSettings) -> str:
    width = settings.target_hidden_size if isinstance(settings, Eagle3Settings) else settings.hidden_size
    depth = ""
    if isinstance(settings, Eagle3Settings):
        depth = f", {max(settings.layer_ids) + 1 if settings.layer_ids else 7} layers at least"
    return f"targets with hidden_size {width}, a vocabulary of {settings.vocab_size}{depth}"


def check_fits(
    head: Head,
    *,
    hidden_size: int,
    vocab_size: int,
    num_layers: int,
    rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    max_position_embeddings: int | None = None,
    model: str | None = None,
    tokenizer: Any = None,
) -> list[str]:
    """What is doubtful about a head for a target with such a config.

    Args:
        rope_theta: the target's; with None neither it nor `rope_scaling` is compared.
        model: the target's name.
        tokenizer: the target's; compared where the head's folder has one.

    Raises:
        IncompatibleDrafter: the head is one for another width, vocabulary, number of layers or tokenizer.
    """
    settings = head.settings
    width = settings.target_hidden_size if isinstance(settings, Eagle3Settings) else settings.hidden_size
    for what, own, other in (("hidden_size", width, hidden_size), ("vocab_size", settings.vocab_size, vocab_size)):
        if own != other:
            raise IncompatibleDrafter(
                f"the head is for a target with {what} {own}, and this one has {other}; take the head that was "
                f"trained for it" + (f" (this one was for {head.base_model})" if head.base_model else "")
            )
    found: list[str] = []
    if head.base_model and model and _last(head.base_model) != _last(model):
        found.append(f"the head was trained for {head.base_model}, and the target is {model}")
    if isinstance(settings, Eagle3Settings):
        found += _check_layers(settings, num_layers)
    if isinstance(settings, EagleSettings):
        found += _positions(settings, rope_theta, rope_scaling, max_position_embeddings)
    if tokenizer is not None and head.source is not None:
        _check_tokenizer(head.source.path.parent / "tokenizer.json", tokenizer)
    return found


def _check_layers(settings: Eagle3Settings, num_layers: int) -> list[str]:
    """The states that the head reads must be there; a list that looks like one by the other convention is told."""
    if settings.layer_ids is None:
        usual = default_layer_ids(num_layers)
        return [f"the head does not say which hidden states it reads: {list(usual)} are taken, as EAGLE's code does"]
    if max(settings.layer_ids) >= num_layers:
        raise IncompatibleDrafter(
            f"the head reads hidden_states {list(settings.layer_ids)} ({settings.layer_id_source}), and the target has "
            f"{num_layers} layers, so that {num_layers - 1} is the last that enters a layer; take the head that was "
            "trained for it, or name the states with layer_ids"
        )
    ids, usual = settings.layer_ids, (2, num_layers // 2, num_layers - 3)
    for convention, step in (("inputs", 1), ("outputs", -1)):
        if settings.layer_id_convention == convention and tuple(k + step for k in ids) == usual:
            other = "what leaves layers" if step > 0 else "what enters layers"
            return [
                f"the head's list ({settings.layer_id_source}) would be EAGLE's usual layers if it meant {other}: "
                f"should few guesses be right, try layer_ids={usual}"
            ]
    return []


def _positions(
    settings: EagleSettings, theta: float | None, scaling: Mapping[str, Any] | None, longest: int | None
) -> list[str]:
    """What is told about positions. The head keeps its own: it was trained with them."""
    found = []
    if theta is not None and theta != settings.rope_theta:
        found.append(
            f"the head's rope_theta is {settings.rope_theta:g}, the target's {theta:g}; the head keeps its own"
        )
    other = scaling.get("rope_type", scaling.get("type", "default")) if scaling else "default"
    own = settings.rope_scaling["rope_type"] if settings.rope_scaling else "default"
    if theta is not None and own != other:
        found.append(f"the head's rope scaling is {own}, the target's {other}; the head keeps its own")
    if longest is not None and settings.max_position_embeddings < longest:
        found.append(
            f"the head was trained for {settings.max_position_embeddings:,} positions, the target for {longest:,}: "
            "behind them fewer guesses will be right"
        )
    return found


def _check_tokenizer(path: Path, tokenizer: Any) -> None:
    """Passes where the tokens beside the head, if there are some, are the target's."""
    if not path.is_file():
        return
    model = read_json(path).get("model")
    own = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(own, list):  # a unigram model: pairs of token and score, in the order of their ids
        own = {pair[0]: i for i, pair in enumerate(own) if isinstance(pair, list) and pair}
    if not isinstance(own, dict):
        raise CorruptWeights(
            f"{path} is no tokenizer that can be read: its model has no vocab; take it out, or fetch it again"
        )
    theirs = tokenizer.get_vocab()
    different = [token for token, place in own.items() if theirs.get(token) != place]
    if different:
        raise IncompatibleDrafter(
            f"the tokenizer beside the head is another one than the target's: {len(different):,} of {len(own):,} "
            f"tokens have other ids, {different[0]!r} the first of them; take the head that was trained for this target"
        )


def _last(name: str) -> str:
    """The last part of a model's name or path."""
    return name.rstrip("/").rpartition("/")[2].lower()


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value
