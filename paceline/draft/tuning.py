"""How a draft model runs best on this machine: measured once for a pair of models, stored, read again after that.

Weights in 4 or 8 bits and a shorter list of ids to score make a pass cheaper and guesses a little worse. Both sides
are measured on a short text: seconds of passes, and the overlap of the laws of draft and target. What is kept is the
variant with the most expected tokens for its time, and the costs that drafting decides by from then on.

Laws over the ids of two tokenizers cannot be compared. A draft with a tokenizer of its own is compared with itself: how
much of its law is left in few bits, times what drafts have in common with their targets as a rule.
"""

import hashlib
import json
import statistics
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.draft.costs import Costs, Curve
from paceline.errors import BadRequest
from paceline.files import write_atomically
from paceline.kernels.machine import machine_name
from paceline.kernels.quantised import BITS, why_not
from paceline.model_cache import home
from paceline.sampling import Sampler, SamplingParams
from paceline.target import HFTarget

TEXT = """The harbour was quiet when the boat came in. Nobody stood on the pier, and the lamp at its end had gone out.
"We are late," said the captain, "but not too late." She took the letter from her coat and read it once more.

def mean_and_variance(values: list[float]) -> tuple[float, float]:
    \"\"\"The mean and the variance of some numbers.\"\"\"
    if not values:
        raise ValueError("values is empty")
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    return mean, variance

A train leaves at 9:40 and travels 150 km at 60 km/h. How long does it take? 150 / 60 = 2.5, so it takes 2.5 hours
and arrives at 12:10. The second train is 30 minutes faster, so it needs 2.5 - 0.5 = 2 hours for the same way.
"""
SMALL = 64 << 20
"""Models with fewer bytes of weights are not measured: their passes cost what they cost."""
READ_BY = (1, 4, 8, 16, 17, 24, 32)
"""Tokens of the target's passes that are timed."""
GUESSED_BY = (1, 2, 4, 8, 16)
"""Tokens of the draft model's."""
CHOICES = 2
"""Tokens of a drafting pass behind which guesses are made, as a rule."""
SCORED = (1.0, 0.65)
"""Shares of the vocabulary that are tried. Ids are merges by frequency, so the first ones are the frequent ones: of
what a 1.5B model wrote in code, maths, stories and summaries, 0.1% lay beyond 65% of the ids, but 2.9% beyond 43%."""
FOREIGN = 0.6
"""Overlap of the laws of draft and target that is taken for granted where their ids differ."""
MARGIN = 1.01
"""What a variant must bring to be preferred to one with more exact guesses."""
VERSION = 2
DTYPES = ("auto", "bfloat16", "int8", "int4")


@dataclass(frozen=True)
class Variant:
    """A way to run the draft model."""

    bits: int
    """Of a weight; 16 is the model as it was loaded."""
    vocab_size: int
    """Ids that are scored."""
    overlap: float
    """1 - TV of the laws of draft and target, mean over the text."""
    curve: Curve
    """(tokens, cost) in single passes of the target."""

    def rate(self, target: Costs) -> float:
        """Tokens in the time of one single pass of the target, at the best depth of a chain."""
        tokens, best = 1.0, 1.0
        for depth in range(1, 17):
            tokens += self.overlap**depth
            best = max(best, tokens / (target.verify(depth + 1) + depth * self.curve[0][1]))
        return best


@dataclass(frozen=True)
class Tuning:
    """What was measured, best variant first."""

    variants: tuple[Variant, ...]
    costs: Costs


def tune(
    target: HFTarget,
    draft: HFTarget,
    ids: list[int],
    own: list[int] | None = None,
    *,
    dtype: str = "auto",
    vocab_size: int | None = None,
) -> Tuning | None:
    """Set the draft model up for its target, and tell what passes cost; None for models too small to measure.

    Args:
        ids: `TEXT` in the target's tokens.
        own: `TEXT` in the draft's tokens, where these are others.
        dtype: `auto` takes what pays; `bfloat16`, `int8` or `int4` what is said.
        vocab_size: ids to score; None leaves it to the measurement.

    Raises:
        UnsupportedModel: weights in few bits are asked for and not to be had.
    """
    why = why_not(draft.model)
    if dtype in ("int4", "int8") and why:
        draft.quantise(int(dtype[3:]))  # raises, with the reason
    if vocab_size is not None and (why or dtype == "bfloat16"):
        reason = why or "draft_dtype is bfloat16"
        raise BadRequest(f"draft_vocab_size={vocab_size} is for weights in few bits, and there are none here: {reason}")
    if vocab_size is not None and dtype == "auto":
        raise BadRequest(f"draft_vocab_size={vocab_size} needs draft_dtype 'int4' or 'int8' beside it")
    if min(target.weight_bytes, draft.weight_bytes) < SMALL:
        if dtype in ("int4", "int8"):
            draft.quantise(int(dtype[3:]), vocab_size)
        return None
    found = _stored(target, draft, own) or _measured(target, draft, ids, own)
    wanted = [v for v in found.variants if dtype == "auto" or v.bits == _bits(dtype)]
    best = max(wanted, key=lambda v: v.rate(found.costs))
    exact = [v for v in wanted if v.rate(found.costs) * MARGIN >= best.rate(found.costs)]
    chosen = max(exact, key=lambda v: v.overlap)
    if chosen.bits in BITS:
        draft.quantise(chosen.bits, vocab_size or chosen.vocab_size)
    costs = Costs(found.costs.target, chosen.curve, found.costs.reading)
    return Tuning((chosen, *(v for v in found.variants if v is not chosen)), costs)


def _bits(dtype: str) -> int:
    return 16 if dtype == "bfloat16" else int(dtype[3:])


# -- measuring ---------------------------------------------------------------------------------------------------------


def _measured(target: HFTarget, draft: HFTarget, ids: list[int], own: list[int] | None) -> Tuning:
    """Time passes, compare laws, store the outcome."""
    base = dict(_timed(target, ids, READ_BY))
    one = base[1]
    model, alike, shared = target, 1.0, min(target.vocab_size, draft.vocab_size)
    if own is not None:
        ids, model, alike, shared = own, draft, FOREIGN, draft.vocab_size
        draft.few = None
    law = torch.softmax(_logits(model, ids, len(ids)), -1)
    variants = []
    for bits in (16, *(() if why_not(draft.model) else BITS)):
        draft.few = None
        if bits != 16:
            draft.quantise(bits)
        vocab = min(shared, draft.num_scored)
        logits = _logits(draft, ids, len(ids) if bits == 16 else 16)[:, :vocab]
        seconds = dict(_timed(draft, ids, GUESSED_BY, guesses=True))
        for share in SCORED if bits != 16 else SCORED[:1]:
            scored = vocab if share == 1 else min(vocab, int(shared * share))
            saved = 0.0
            if share < 1:
                draft.quantise(bits, scored)
                saved = seconds[1] - min(seconds[1], dict(_timed(draft, ids, (1,), guesses=True))[1])
            overlap = alike * torch.minimum(law[:, :scored], torch.softmax(logits[:, :scored], -1)).sum(-1).mean()
            curve = tuple((n, max(0.0, s - saved) / one) for n, s in seconds.items())
            variants.append(Variant(bits, scored, float(overlap), curve))
    draft.few = None
    start = perf_counter()
    _logits(draft, ids, len(ids))
    reading = (perf_counter() - start) / len(ids) / one
    costs = Costs(tuple((n, s / one) for n, s in base.items()), variants[0].curve, reading)
    found = Tuning(tuple(variants), costs)
    _store(target, draft, own, found)
    return found


def _logits(model: HFTarget, ids: list[int], width: int) -> Float[Tensor, "N V"]:
    """What a model says after each token of a text, read `width` tokens at a time."""
    cache = model.new_cache(1, len(ids) + 1)
    rows = []
    for begin in range(0, len(ids), width):
        part = torch.tensor([ids[begin : begin + width]])
        size = part.shape[1]
        rows.append(model.forward(part, torch.arange(size)[None], None, cache).logits[0].float())
        cache.commit([range(size)])
    return torch.cat(rows)


def _timed(
    model: HFTarget, ids: list[int], widths: tuple[int, ...], repeats: int = 5, guesses: bool = False
) -> list[tuple[int, float]]:
    """Median seconds of passes over so many tokens behind the text, never falling with their number.

    Args:
        guesses: with the choice of candidates after up to `CHOICES` of the tokens, as when drafting.
    """
    sampler = Sampler(SamplingParams(seed=0), model.num_scored, [])
    cache = model.new_cache(1, len(ids) + max(widths) + 1)
    model.forward(torch.tensor([ids]), torch.arange(len(ids))[None], None, cache, logits=False)
    cache.commit([range(len(ids))])
    taken: dict[int, list[float]] = {n: [] for n in widths}

    def once(n: int) -> float:
        start = perf_counter()
        logits = model.forward(torch.tensor([ids[:n]]), torch.arange(n)[None], None, cache).logits
        float(logits[0, -1, 0])  # waits for a device that computes behind our back
        for row in logits[0, -CHOICES:] if guesses else ():
            sampler.top(row[: model.num_scored], (), len(ids), 4)
        cache.unstage()
        return perf_counter() - start

    for turn in range(repeats + 1):  # in turns: a machine that drifts drifts for all alike
        for n in widths:
            seconds = once(n)
            if turn:
                taken[n].append(seconds)
    curve, most = [], 0.0
    for n in widths:
        most = max(most, statistics.median(taken[n]))
        curve.append((n, most))
    return curve


# -- the store ---------------------------------------------------------------------------------------------------------


def _key(target: HFTarget, draft: HFTarget, own: list[int] | None) -> str:
    """What the numbers depend on: both models, what laws were compared, the machine, its threads, the framework."""
    parts: list[Any] = [VERSION, torch.__version__, torch.get_num_threads(), machine_name(), why_not(draft.model)]
    parts += [] if own is None else [FOREIGN, own]
    for model in (target, draft):
        sample = model.model.get_output_embeddings().weight[0, :8].float().tolist()
        parts += [model.model.config.to_json_string(), model.weight_bytes, model.kernel.name, str(model.device), sample]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _stored(target: HFTarget, draft: HFTarget, own: list[int] | None) -> Tuning | None:
    """What was measured earlier; a file that cannot be read is measured anew."""
    try:
        held = json.loads((home() / "costs" / f"{_key(target, draft, own)}.json").read_text(encoding="utf-8"))
        variants = tuple(
            Variant(v["bits"], v["vocab_size"], v["overlap"], _curve(v["curve"])) for v in held["variants"]
        )
        return Tuning(variants, Costs(_curve(held["target"]), variants[0].curve, float(held["reading"])))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _store(target: HFTarget, draft: HFTarget, own: list[int] | None, found: Tuning) -> None:
    """Write what was measured; where that is not possible it is measured again next time."""
    variants = [
        {"bits": v.bits, "vocab_size": v.vocab_size, "overlap": v.overlap, "curve": v.curve} for v in found.variants
    ]
    text = json.dumps({"variants": variants, "target": found.costs.target, "reading": found.costs.reading})
    folder = home() / "costs"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{_key(target, draft, own)}.json", text + "\n")


def _curve(points: Any) -> Curve:
    curve = tuple((int(n), float(cost)) for n, cost in points)
    if not curve:
        raise ValueError("a curve needs a point")
    return curve
