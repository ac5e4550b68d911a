"""Published draft heads: Medusa, EAGLE-1, EAGLE-2 and EAGLE-3, read and written in the layouts that others use.

    layout        tensors                                    config                            read by
    medusa        0.0.linear.weight, 0.1.weight              medusa_num_heads                  Medusa
    vllm-medusa   blocks.0.layers.0.weight, lm_heads.0.…     model_type: medusa, num_heads     vLLM
    eagle         layers.0.…, midlayer.… (EAGLE-3), fc.…     like a Llama's, draft_vocab_size  EAGLE, SGLang, vLLM
    speculators   layers.0.…, fc.…, d2t, t2d                 speculators_model_type: eagle3    speculators, vLLM

Reading is strict: each tensor of a file is used and each one that the head needs is there, or a note says why; the
config may leave things out but not contradict the tensors; what would change the forward and is not understood is
refused. What was missing or doubtful stands in `Head.notes`. Writing reads back what was written and compares it.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.errors import BadRequest, CorruptWeights, PacelineError, UnsupportedModel, nearest

from . import eagle, eagle_tensors, medusa
from .export import LAYOUTS, export
from .folder import new_folder, write_files
from .head import (
    Eagle3Settings,
    EagleSettings,
    Head,
    Kind,
    Layout,
    MedusaSettings,
    Source,
    default_layer_ids,
    with_layer_ids,
)
from .report import check_fits, describe, description
from .weights import Place, Weights, check_shapes, check_values, dtype_note, find, read_json

__all__ = [
    "Eagle3Settings",
    "EagleSettings",
    "Head",
    "Kind",
    "LAYOUTS",
    "Layout",
    "MedusaSettings",
    "Source",
    "check_fits",
    "check_head",
    "default_layer_ids",
    "describe",
    "description",
    "kind_of",
    "read_head",
    "with_layer_ids",
    "with_own",
    "write_head",
]
_OTHER_KINDS = {
    "dflash": "a DFlash head",
    "dspark": "a DSpark head",
    "eagle": "an EAGLE-1 head in speculators' older layout",
    "hydra": "a Hydra head",
    "mlp_speculator": "an MLP speculator",
    "mtp": "a multi-token prediction head",
    "peagle": "a P-EAGLE head",
    "redrafter": "a ReDrafter head",
}


def kind_of(path: "str | PathLike[str]") -> Kind | None:
    """The kind of the head in a folder or a file of weights, told by the names in it; None where there is no head."""
    if not Path(path).exists() or Path(path).suffix == ".gguf":
        return None
    try:
        names = Weights(find(Path(path)).weights).names
        if medusa.recognise(names):
            return "medusa"
        found = eagle.recognise(names)
    except PacelineError:
        return None
    return found.kind if found else None


def read_head(path: "str | PathLike[str]", *, index_map: bool = False) -> Head:
    """The head in a folder, or in a file of weights, in any of the layouts above.

    Args:
        path: a folder as published; or its weights, whose config.json is looked for beside them.
        index_map: convert a d2t that holds target ids, where offsets belong; without this it is refused.

    Raises:
        ModelNotFound: there is no such folder, or no weights in it.
        CorruptWeights: files are cut short, damaged or more than tensors; tensors are missing, too many, of another
            shape or no numbers; the config contradicts them or itself.
        UnsupportedModel: it is a whole model, another kind of head, or one whose forward has parts that are not here.
        BadRequest: it is not clear which file to read, or `index_map` has nothing to convert.
    """
    place = find(Path(path))
    values = {} if place.config is None else read_json(place.config)
    where = str(place.config or place.weights.with_name("config.json"))
    _refuse_others(values, where)
    weights = Weights(place.weights)
    notes: list[str] = []
    head, layout = _read(place, weights, values, where, notes, index_map)
    notes += [f"{name} beside {place.weights.name} was not read" for name in place.unread]
    notes += dtype_note(head.tensors)
    if index_map and "d2t" not in head.tensors:
        raise BadRequest("index_map=True was given, and the head has no d2t; leave it out")
    head = replace(head, source=Source(layout, place.weights), notes=tuple(notes))
    check_head(head)
    return head


def _read(
    place: Place, weights: Weights, values: Mapping[str, Any], where: str, notes: list[str], index_map: bool
) -> tuple[Head, Layout]:
    """The head and its layout, by what its tensors are called."""
    speculators = values.get("speculators_model_type") is not None
    if not speculators and (found := medusa.recognise(weights.names)):
        if place.config is None:
            notes.append(f"there is no {where}: heads and blocks were counted in the weights")
        return medusa.read(found, weights, values, where, notes), "vllm-medusa" if found.vllm else "medusa"
    if not (named := eagle.recognise(weights.names)):
        raise _no_head(weights)
    if place.config is None:
        raise CorruptWeights(f"{where} is missing, and an EAGLE head cannot be read without; fetch the head again")
    if speculators and named.kind != "eagle3":
        raise CorruptWeights(
            f"{where} says speculators_model_type: eagle3, and {place.weights} has the tensors of EAGLE-1; fetch "
            f"both again"
        )
    head = eagle.read(named, weights, values, where, notes, index_map)
    return head, "speculators" if speculators else "eagle"


def _refuse_others(values: Mapping[str, Any], where: str) -> None:
    """Refuses heads of another kind by what their config calls itself."""
    said = values.get("speculators_model_type")
    found = _OTHER_KINDS.get(str(said if said is not None else values.get("model_type")))
    if said is None and values.get("model_type") == "eagle":  # vLLM's name for what is read here, if it can be
        found = None
    named = values.get("architectures")
    if isinstance(named, list) and any("DFlash" in str(name) for name in named):
        found = "a DFlash head"
    if found is None and said not in (None, "eagle3"):
        found = f"a head of kind {said!r}"
    if found:
        raise UnsupportedModel(
            f"{where} says that this is {found}; Medusa, EAGLE-1, EAGLE-2 and EAGLE-3 heads can be read"
        )


def _no_head(weights: Weights) -> UnsupportedModel:
    """The refusal of weights that are those of something else."""
    names = weights.names
    few = ", ".join(sorted(names)[:4])
    if any(".layers." in name or name.startswith(("layers.", "transformer.h.")) for name in names):
        return UnsupportedModel(
            f"{weights.path} is a whole model ({len(names)} tensors: {few} …) and no draft head, which has an "
            "fc.weight or Medusa's blocks; a smaller model can draft with method='draft_model'"
        )
    return UnsupportedModel(
        f"{weights.path} is no draft head that can be read: its tensors are {few or 'none'}; Medusa's are called "
        "0.0.linear.weight or blocks.0.layers.0.weight, those of EAGLE fc.weight and layers.0.… or midlayer.…"
    )


def with_own(
    head: Head, *, lm_head: Float[Tensor, "V H"] | None = None, embed_tokens: Float[Tensor, "V H"] | None = None
) -> Head:
    """The same head bringing what it borrows from its target, for engines that do not lend it.

    Args:
        lm_head: the target's vocabulary matrix, for Medusa heads; of a trimmed vocabulary its rows are taken.
        embed_tokens: the target's embedding, for EAGLE heads: speculators leaves a missing one unfilled.

    Raises:
        BadRequest: the head has its own, or is of another kind, or the matrix is another target's.
    """
    settings, tensors = head.settings, dict(head.tensors)
    borrows_matrix = isinstance(settings, MedusaSettings) and settings.lm_head == "target"
    borrows_embedding = isinstance(settings, EagleSettings) and settings.embed_tokens == "target"
    for name, given, borrows in (
        ("lm_head", lm_head, borrows_matrix),
        ("embed_tokens", embed_tokens, borrows_embedding),
    ):
        if given is None:
            continue
        if not borrows:
            raise BadRequest(f"{name} was given, and this {head.kind} head borrows none; leave it out")
        if tuple(given.shape) != (settings.vocab_size, settings.hidden_size):
            raise BadRequest(
                f"{name} of {list(given.shape)} was given; the head is for a target whose matrix is "
                f"{[settings.vocab_size, settings.hidden_size]}"
            )
    if lm_head is not None and isinstance(settings, MedusaSettings):
        ids = head.target_ids
        rows = lm_head if ids is None else lm_head[ids.to(lm_head.device)]
        tensors["lm_head.weight"] = rows.detach().to(head.dtype).cpu()
        settings = replace(settings, lm_head="shared")
    if embed_tokens is not None and isinstance(settings, EagleSettings):
        tensors["embed_tokens.weight"] = embed_tokens.detach().to(head.dtype).cpu()
        settings = replace(settings, embed_tokens="own")
    return replace(head, settings=settings, tensors=tensors)


def check_head(head: Head) -> None:
    """Passes for a head whose tensors are those of its settings, whoever made it.

    Raises:
        CorruptWeights: tensors are missing, too many, of another shape or no numbers, or its maps are wrong.
        UnsupportedModel: tensors are quantised or sparse.
    """
    where = str(head.source.path) if head.source else "this head"
    check_values(head.tensors, where)
    if isinstance(head.settings, MedusaSettings):
        check_shapes(head.tensors, medusa.needed(head.settings, head.tensors), where)
        medusa.check(head.settings, head.tensors)
    else:
        check_shapes(head.tensors, eagle_tensors.needed(head.settings, head.tensors), where)
        eagle_tensors.check(head.settings, head.tensors)


def write_head(head: Head, folder: "str | PathLike[str]", layout: Layout, *, replace: bool = False) -> Path:
    """Writes a head in a layout, reads it back, and compares both tensor by tensor; then the folder appears whole.

    Args:
        folder: where; it is made. One that is there must be empty.
        layout: medusa or vllm-medusa for Medusa, eagle for all EAGLE heads, speculators for EAGLE-3.
        replace: put it in the place of an older head; a folder that holds anything else is refused all the same.

    Raises:
        BadRequest: the layout has no place for what the head has, or the folder may not be written to.
        CorruptWeights: the tensors are not those of the settings.
    """
    if layout not in (known := [name for names in LAYOUTS.values() for name in names]):
        raise BadRequest(
            f"layout={layout!r} was given; they are {', '.join(dict.fromkeys(known))}{nearest(layout, known)}"
        )
    check_head(head)
    tensors, config = export(head, layout)
    target = Path(folder).resolve()
    with new_folder(target, replace) as scratch:
        name = "medusa_lm_head.safetensors" if layout == "medusa" else "model.safetensors"
        write_files(scratch, name, tensors, config)
        _compare(head, read_head(scratch), layout)
    return target


def _compare(head: Head, again: Head, layout: str) -> None:
    """Refuses a layout that does not hold all of a head."""
    lost = [
        name
        for name, tensor in head.tensors.items()
        if name not in again.tensors
        or again.tensors[name].dtype != tensor.dtype
        or not torch.equal(again.tensors[name], tensor.cpu())
    ]
    if again.settings != head.settings:
        for key in (field.name for field in fields(head.settings) if field.compare):
            mine, other = getattr(head.settings, key), getattr(again.settings, key, None)
            lost += [f"{key} ({mine!r}, read back as {other!r})"] if mine != other else []
    if lost:
        raise BadRequest(f"layout={layout!r} was given, and it does not hold all of this head: {', '.join(lost[:4])}")
