"""How large should a draft be? The first layers of a draft model, with its final norm and head, as drafts of a target.

    python benchmarks/truncated.py [MODEL] [DRAFT_MODEL] [--layers 4 12 24] [--text FILE] [--json FILE]

For each number of layers, on the same text and in the same turns:

    acceptance          1 - TV of the laws of draft and target at temperature 1, mean over the text's tokens
    c                   a pass of the draft over one token, in such passes of the target
    best_K, speedup     what these two come to in `paceline.theory`, with the measured passes of the target

The whole model is the last point, and once more in 4 bits where that can be had. It takes minutes for 0.5B and 1.5B.
The pages docs/theory*.md show benchmarks/results/truncated.json.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline import theory
from paceline.draft.costs import Costs
from paceline.draft.tuning import READ_BY, TEXT, _logits, _timed
from paceline.errors import BadRequest
from paceline.files import write_atomically
from paceline.kernels.cpu import threads_available
from paceline.kernels.quantised import why_not
from paceline.models import load_model, load_tokenizer, resolve
from paceline.target import HFTarget

PARTS = (1 / 12, 1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 11 / 12, 1.0)
"""Parts of the layers that draft, where nothing is said."""
FEW_BITS = 4


def main() -> None:
    """Measure, print a table for people, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b-instruct-q4_k_m")
    parser.add_argument("draft_model", nargs="?", default="qwen2.5-coder-0.5b-instruct-q4_k_m")
    parser.add_argument("--layers", type=int, nargs="+", help="how many layers draft; left out: eight sizes")
    parser.add_argument("--text", type=Path, help="what laws are compared on; left out: prose, code and sums")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, default=Path("truncated.json"))
    args = parser.parse_args()
    torch.set_num_threads(threads_available())
    sources = resolve(args.model, progress=True), resolve(args.draft_model, progress=True)
    target, draft = (HFTarget(load_model(source)) for source in sources)
    text = args.text.read_text(encoding="utf-8") if args.text else TEXT
    ids = load_tokenizer(sources[0])(text, add_special_tokens=False).input_ids
    result = {
        "model": sources[0].name,
        "draft_model": sources[1].name,
        "notes": [source.note for source in sources],
        "kernel": target.kernel.name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "text_tokens": len(ids),
        **measure(target, draft, ids, args.layers or sizes(draft.num_layers), args.repeats),
    }
    write_atomically(args.json, json.dumps(result, indent=1) + "\n")
    print(table(result))


def sizes(num_layers: int) -> list[int]:
    """The numbers of layers that are tried, the whole model last."""
    return sorted({max(1, round(num_layers * part)) for part in PARTS})


def measure(
    target: HFTarget, draft: HFTarget, ids: list[int], layers: Sequence[int], repeats: int = 9
) -> dict[str, Any]:
    """The points of the plot, and what passes of the target cost by their tokens.

    Args:
        ids: of the text, the same ids in both models.
        layers: how many of the draft model's layers draft.
    """
    if bad := [n for n in layers if not 1 <= n <= draft.num_layers]:
        raise BadRequest(f"layers {bad} were given; the draft model has {draft.num_layers}")
    shared = min(target.vocab_size, draft.vocab_size)
    law = torch.softmax(_logits(target, ids, len(ids))[:, :shared], -1)
    base = _timed(target, ids, READ_BY, repeats)
    passes = Costs(target=tuple((n, seconds / base[0][1]) for n, seconds in base))
    costs = relative_costs(target, draft, ids, layers, repeats)
    points = []
    for count in layers:
        found = overlap(law, first_layers(draft, ids, count)[:, :shared])
        weights = draft.share(count) * draft.weight_bytes / target.weight_bytes
        points.append(point(count, draft.num_layers, 16, weights, costs[count], found, passes))
    if not why_not(draft.model):
        whole = draft.num_layers
        draft.quantise(FEW_BITS)
        found = overlap(law, _logits(draft, ids, 16)[:, :shared])
        weights = draft.weight_bytes * FEW_BITS / 16 / target.weight_bytes
        c = relative_costs(target, draft, ids, [whole], repeats)[whole]
        points.append(point(whole, whole, FEW_BITS, weights, c, found, passes))
        draft.few = None
    return {"passes": passes.target, "points": points}


def point(layers: int, of: int, bits: int, weights: float, c: float, alpha: float, passes: Costs) -> dict[str, Any]:
    """What a draft costs, how often it is kept, and what that brings at best."""
    best = theory.best_length(alpha, c, passes.verify, most=passes.target[-1][0] - 1)
    return {
        "layers": layers,
        "of": of,
        "bits": bits,
        "share_of_weights": weights,
        "c": c,
        "acceptance": alpha,
        "best_K": best.num_drafted,
        "speedup": best.speedup,
    }


def overlap(law: Float[Tensor, "N V"], logits: Float[Tensor, "N V"]) -> float:
    """1 - TV, mean over the positions; rounding may not lift it above 1."""
    return min(1.0, float(torch.minimum(law, torch.softmax(logits, -1)).sum(-1).mean()))


def first_layers(draft: HFTarget, ids: list[int], count: int) -> Float[Tensor, "N V"]:
    """What the first layers say after each token of a text."""
    part = None if count == draft.num_layers else (0, count)
    offsets = torch.arange(len(ids))[None]
    seen = draft.forward(torch.tensor([ids]), offsets, None, draft.new_cache(1, len(ids)), layers=part)
    return seen.logits[0].float()


def relative_costs(
    target: HFTarget, draft: HFTarget, ids: list[int], layers: Sequence[int], repeats: int
) -> dict[int, float]:
    """Passes over one token behind the text, in turns: medians of the draft's seconds over the target's."""
    caches = {}
    for model in (target, draft):
        cache = caches[model] = model.new_cache(1, len(ids) + 1)
        model.forward(torch.tensor([ids]), torch.arange(len(ids))[None], None, cache, logits=False)
        cache.commit([range(len(ids))])

    def once(model: HFTarget, part: tuple[int, int] | None) -> float:
        start = time.perf_counter()
        seen = model.forward(
            torch.tensor([ids[:1]]), torch.zeros(1, 1, dtype=torch.int64), None, caches[model], layers=part
        )
        int(seen.logits[0, -1].argmax())  # a guess; and it waits for a device that computes behind our back
        caches[model].unstage()
        return time.perf_counter() - start

    taken: dict[int, list[float]] = {count: [] for count in layers}
    for turn in range(repeats + 1):
        one = once(target, None)
        for count in layers:
            seconds = once(draft, None if count == draft.num_layers else (0, count))
            if turn:
                taken[count].append(seconds / one)
    return {count: statistics.median(ratios) for count, ratios in taken.items()}


def table(result: dict[str, Any]) -> str:
    """A row per draft."""
    lines = ["layers   bits   share of weights       c   1 - TV   best K   speed-up"]
    for one in result["points"]:
        lines.append(
            f"{one['layers']:3} / {one['of']:<3} {one['bits']:4} {one['share_of_weights']:18.1%} {one['c']:7.3f} "
            f"{one['acceptance']:8.3f} {one['best_K']:8} {one['speedup']:9.2f}x"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
