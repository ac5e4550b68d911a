"""Reads Medusa heads: the head file of their authors, the same inside of a whole model, and vLLM's layout."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.errors import CorruptWeights

from .config import Config
from .head import Head, MedusaSettings
from .weights import Needed, Weights

_PREFIX = re.compile(r"^(?:model\.)?medusa_heads?\.")
_AUTHORS = (
    (re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$"), "heads.{}.layers.{}.{}"),
    (re.compile(r"^(\d+)\.medusa_layers\.(\d+)\.linear\.(weight|bias)$"), "heads.{}.layers.{}.{}"),
    (re.compile(r"^(\d+)\.lm_head\.weight$"), "heads.{}.lm_head.weight"),
)
_MATRIX = re.compile(r"^(\d+)\.(\d+)\.weight$")
"""The vocabulary matrix of a head, numbered behind its blocks."""
_VLLM = (
    (re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$"), "heads.{}.layers.{}.{}"),
    (re.compile(r"^lm_heads\.(\d+)\.weight$"), "heads.{}.lm_head.weight"),
    (re.compile(r"^token_map$"), "token_map"),
)
_NUM_HEADS = ("medusa_num_heads", "num_medusa_heads")
_NUM_LAYERS = ("medusa_num_layers", "num_medusa_layers")
_NO_EFFECT = ("max_paths", "max_seq_len", "medusa_choices", "num_lookahead_tokens", "topk", "version")
"""Keys for trees and runtimes."""
_REFUSED = ("logit_scale", "quantization_config")
"""What could change a head; else its config may be a copy of the target's."""


@dataclass
class Named:
    """A file's tensors that belong to a Medusa head."""

    names: dict[str, str]
    """Name in the file by our name."""
    vllm: bool
    inside: int
    """Tensors beside them, those of the model that the heads are part of."""


def recognise(names: Sequence[str]) -> Named | None:
    """Which tensors are those of a Medusa head; None if it is none."""
    prefixed = [name for name in names if _PREFIX.match(name)]
    stripped = {_PREFIX.sub("", name): name for name in (prefixed or names)}
    if prefixed and "token_map" in names:
        stripped["token_map"] = "token_map"
    if len(stripped) < len(prefixed):
        raise CorruptWeights("its tensors are there twice, under medusa_head and medusa_heads; take one of both out")
    vllm = any(name.startswith("blocks.") for name in stripped)
    ours = {_ours(name, vllm): name for name in stripped}
    if not prefixed and not any(re.match(r"^heads\.\d+\.layers\.", name) for name in ours):
        return None
    return Named({own: stripped[name] for own, name in ours.items()}, vllm, len(names) - len(stripped))


def _ours(name: str, vllm: bool) -> str:
    """Our name for a tensor, or its own where that has no place in a head."""
    for pattern, own in _VLLM if vllm else _AUTHORS:
        if found := pattern.match(name):
            return own.format(*found.groups())
    if not vllm and (found := _MATRIX.match(name)):
        return f"heads.{found[1]}.matrix.{found[2]}"  # which number it must have is known once the blocks are counted
    return name


def read(named: Named, weights: Weights, values: Mapping[str, Any], where: str, notes: list[str]) -> Head:
    """A head from its tensors and its config, which may be empty.

    Raises:
        CorruptWeights: the config does not fit the tensors, or itself.
        UnsupportedModel: the config asks for something that changes the forward and is not here.
    """
    config = Config(values, where, notes)
    ours, num_layers = _numbered(named.names, weights)
    tensors = dict(zip(ours, weights.take(ours.values()).values()))
    num_heads = _count_heads(tensors)
    _check_counts(config, num_heads, num_layers, named)
    bias = "heads.0.layers.0.bias" in tensors
    if named.vllm:
        if bias and config.flag("medusa_fc_bias") is None:
            notes.append(f"{where} has no medusa_fc_bias: vLLM would drop the biases of the blocks; here they are used")
        config.agrees(("medusa_fc_bias",), bias, "biases in the blocks")
    matrix = _shared(config, tensors, num_heads) if named.vllm else "own"
    rows = _select_rows(tensors, weights, notes)
    if rows is None and matrix != "target":
        raise CorruptWeights(f"{weights.path} has blocks of Medusa heads and no vocabulary matrix; fetch it again")
    vocab_size = config.whole("vocab_size", None if "token_map" in tensors else rows)
    settings = MedusaSettings(
        hidden_size=_side(tensors.get("heads.0.layers.0.weight"), weights),
        vocab_size=vocab_size,
        draft_vocab_size=rows or vocab_size,
        num_heads=num_heads,
        num_layers=num_layers,
        bias=bias,
        tied_layers=_tied(tensors, num_heads, num_layers),
        lm_head=matrix,
    )
    _check_sizes(config, settings, "token_map" in tensors)
    if num_layers > 1 and not settings.tied_layers and not named.vllm:
        notes.append(
            "the blocks of a head differ, though upstream's code repeats a single one and would use the last of them "
            "for all; here each is used"
        )
    base = config.text("base_model_name_or_path")
    if named.inside:
        notes.append(f"{named.inside} other tensors in {weights.path} are those of the model itself and were not read")
        return Head("medusa", settings, tensors, base)  # and the config is the model's
    for key in _NO_EFFECT:
        config.get(key)
    config.finish(_REFUSED)
    return Head("medusa", settings, tensors, base, None, (), values)


def _numbered(names: Mapping[str, str], weights: Weights) -> tuple[dict[str, str], int]:
    """Names with each vocabulary matrix where it should be, behind the blocks of its head, and the count of blocks."""
    blocks = {found[1] for name in names if (found := re.match(r"^heads\.\d+\.layers\.(\d+)\.", name))}
    if not blocks:
        raise CorruptWeights(f"{weights.path} has vocabulary matrices of Medusa heads and no blocks; fetch it again")
    count = len(blocks)
    placed = re.compile(rf"^(heads\.\d+)\.matrix\.{count}$")
    return {placed.sub(r"\1.lm_head.weight", own): name for own, name in names.items()}, count


def _count_heads(tensors: Mapping[str, Tensor]) -> int:
    return len({found[1] for name in tensors if (found := re.match(r"^heads\.(\d+)\.", name))})


def _check_counts(config: Config, num_heads: int, num_layers: int, named: Named) -> None:
    """The config's counts of heads and blocks against those of the file.

    Published heads say two and have five, which is what upstream's loader then makes of them: told, not refused.
    """
    inner = Config(config.table("medusa"), f"medusa in {config.where}", config.notes)
    for place, key in [*((config, key) for key in _NUM_HEADS), (inner, "num_medusa_heads")]:
        said = place.whole(key, num_heads)
        if said < num_heads and not named.vllm:
            config.notes.append(
                f"{place.where} says {key}: {said}, and the weights have {num_heads} heads: all are used"
            )
        else:
            place.same(key, num_heads, "heads")
    for place, key in [*((config, key) for key in _NUM_LAYERS), (inner, "num_medusa_layers")]:
        place.same(key, num_layers, "blocks in a head")
    if named.vllm:
        config.same("num_heads", num_heads, "heads")
        config.same("num_hidden_layers", num_layers, "blocks in a head")
    inner.finish()


def _shared(config: Config, tensors: dict[str, Tensor], num_heads: int) -> Literal["own", "shared", "target"]:
    """Whose vocabulary matrix a head in vLLM's layout uses; a shared one gets the name that it has here."""
    matrices = [name for i in range(num_heads) if (name := f"heads.{i}.lm_head.weight") in tensors]
    if not config.flag("original_lm_head"):
        return "own"
    if not matrices:
        config.notes.append(
            "it has no vocabulary matrix of its own: the target's is used; vLLM cannot load it like this"
        )
        return "target"
    first = tensors[matrices[0]]
    if matrices[0] != "heads.0.lm_head.weight" or not all(torch.equal(tensors[name], first) for name in matrices):
        raise CorruptWeights(
            f"{config.where} says original_lm_head: true, so that all heads share lm_heads.0.weight, and the weights "
            f"have others ({', '.join(matrices)}); correct the config, or take the others out"
        )
    for name in matrices:
        del tensors[name]
    tensors["lm_head.weight"] = first
    return "shared"


def _select_rows(tensors: dict[str, Tensor], weights: Weights, notes: list[str]) -> int | None:
    """How many draft ids there are. With a token map, matrices over the whole vocabulary are cut to its rows."""
    matrices = [name for name in tensors if name.endswith("lm_head.weight") and tensors[name].ndim == 2]
    token_map = tensors.get("token_map")
    if token_map is None:
        return len(tensors[matrices[0]]) if matrices else None
    if token_map.ndim != 1 or token_map.dtype not in (torch.int64, torch.int32) or not len(token_map):
        raise CorruptWeights(
            f"token_map in {weights.path} is {list(token_map.shape)} of {token_map.dtype}; a list of target ids is "
            f"needed"
        )
    for name in matrices:
        rows = len(tensors[name])
        if rows > len(token_map) and int(token_map.min()) >= 0 and int(token_map.max()) < rows:
            tensors[name] = tensors[name][token_map.long()]
            notes.append(f"the {len(token_map)} rows of token_map were taken out of {name}, which has {rows}")
    return len(token_map)


def _check_sizes(config: Config, settings: MedusaSettings, mapped: bool) -> None:
    truncated = config.whole("truncated_vocab_size", settings.draft_vocab_size if mapped else settings.vocab_size)
    if truncated != settings.draft_vocab_size or mapped == (truncated == settings.vocab_size):
        raise CorruptWeights(
            f"{config.where} says vocab_size: {settings.vocab_size} and truncated_vocab_size: "
            f"{config.values.get('truncated_vocab_size')}, and the heads have {settings.draft_vocab_size} rows "
            f"{'and a' if mapped else 'without a'} token_map; a token_map must have truncated_vocab_size ids, fewer "
            "than vocab_size, and without one all rows are needed"
        )
    config.same("hidden_size", settings.hidden_size, "columns (hidden_size)")


def _tied(tensors: Mapping[str, Tensor], num_heads: int, num_layers: int) -> bool:
    """Whether there are several blocks to a head, all of them the same."""

    def same(i: int, j: int, part: str) -> bool:
        one, other = tensors.get(f"heads.{i}.layers.0.{part}"), tensors.get(f"heads.{i}.layers.{j}.{part}")
        return one is other or (one is not None and other is not None and torch.equal(one, other))

    return num_layers > 1 and all(
        same(i, j, part) for i in range(num_heads) for j in range(1, num_layers) for part in ("weight", "bias")
    )


def _side(tensor: Tensor | None, weights: Weights) -> int:
    if tensor is None or tensor.ndim != 2:
        raise CorruptWeights(f"{weights.path} lacks the first block of the first Medusa head; fetch it again")
    return int(tensor.shape[0])


def needed(settings: MedusaSettings, tensors: Mapping[str, Tensor]) -> Needed:
    """The tensors of a head with such settings."""
    h, v = settings.hidden_size, settings.draft_vocab_size
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for i in range(settings.num_heads):
        for j in range(settings.num_layers):
            found[f"heads.{i}.layers.{j}.weight"] = (h, h), "hidden_size × hidden_size"
            if settings.bias:
                found[f"heads.{i}.layers.{j}.bias"] = (h,), "hidden_size"
        if settings.lm_head == "own":
            found[f"heads.{i}.lm_head.weight"] = (v, h), "draft vocabulary × hidden_size"
    if settings.lm_head == "shared":
        found["lm_head.weight"] = (v, h), "draft vocabulary × hidden_size"
    if "token_map" in tensors:
        found["token_map"] = (v,), "draft vocabulary"
    return found


def check(settings: MedusaSettings, tensors: Mapping[str, Tensor]) -> None:
    """Passes where the ids of a trimmed vocabulary are different ids of the target.

    Raises:
        CorruptWeights: they are not, or are missing.
    """
    token_map = tensors.get("token_map")
    if token_map is None:
        if settings.draft_vocab_size != settings.vocab_size:
            raise CorruptWeights(
                f"the heads have {settings.draft_vocab_size} rows of a vocabulary of {settings.vocab_size} and no "
                "token_map that says which; fetch the head again"
            )
        return
    low, high, different = int(token_map.min()), int(token_map.max()), len(torch.unique(token_map))
    if low < 0 or high >= settings.vocab_size or different < len(token_map):
        raise CorruptWeights(
            f"token_map must have different ids below {settings.vocab_size}: it has {len(token_map)}, {different} of "
            f"them different, from {low} to {high}; fetch the head again"
        )
