"""Do states that lie near each other say nearly the same? EAGLE's first idea is to guess the next state by itself.

    python benchmarks/features.py [MODEL] [--sets humaneval,gsm8k,mt-bench:writing] [--num-prompts 4] [--json FILE]

The model answers prompts, and its last states behind the tokens of the answers are compared:

    errors   each state is moved by a part r of its own length: along a random direction, and towards another state of
             the same answers, as a head that has learnt what states look like would err. What is left of 1 - TV between
             the laws of both, and how often the likeliest token stays.
    pairs    1 - TV of two states' laws over the distance between them, in tenths of all pairs by distance; and the
             nearest other state of each.
    steps    the same of a state and the one behind it in the text: what a drafter that repeats the last state brings.

The pages docs/theory*.md show benchmarks/results/features.json.
"""

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.bench import prompts
from paceline.files import write_atomically

PARTS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
"""How far states are moved, in their own lengths."""
TENTHS = 10
KEPT = 0.8
"""The share of guesses for which the largest error is named."""


def main() -> None:
    """Answer, compare, print a table for people, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-0.5b-instruct-q4_k_m")
    parser.add_argument("--sets", default="humaneval,gsm8k,mt-bench:writing", help="with commas")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, default=Path("features.json"))
    args = parser.parse_args()
    llm = LLM(args.model, None)
    states = []
    for name in args.sets.split(","):
        for prompt in prompts.load(name)[: args.num_prompts]:
            ids = llm.chat_ids(first_turn(prompt))
            (answer,) = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=args.max_tokens))
            states.append(states_of(llm.target, [*ids, *answer.token_ids])[len(ids) - 1 :])
    result = {
        "model": llm.source.name,
        "sets": args.sets,
        "num_prompts": args.num_prompts,
        "max_tokens": args.max_tokens,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **measure(states, lambda part: llm.target.unembed(part.to(llm.target.dtype)).float()),
    }
    write_atomically(args.json, json.dumps(result, indent=1) + "\n")
    print(table(result))


def first_turn(prompt: prompts.Prompt) -> list[dict[str, str]]:
    """A prompt's first turn alone."""
    return prompt.messages()[:1] if len(prompt.turns) > 1 else prompt.messages()


def states_of(target: Any, ids: list[int]) -> Float[Tensor, "T H"]:
    """The last states behind the tokens of a text."""
    cache, last = target.new_cache(1, len(ids)), target.num_layers
    seen = target.forward(torch.tensor([ids]), torch.arange(len(ids))[None], None, cache, (last,), logits=False)
    return seen.hidden[0].float()


@torch.inference_mode()
def measure(texts: Sequence[Float[Tensor, "T H"]], score: Any) -> dict[str, Any]:
    """Everything that is shown, of the states of some answers.

    Args:
        score: from states to logits.
    """
    states = torch.cat(list(texts))
    count, noise = len(states), torch.Generator().manual_seed(0)
    laws = _laws(score, states)
    lengths = states.norm(dim=-1, keepdim=True)
    random = torch.nn.functional.normalize(torch.randn(states.shape, generator=noise), dim=-1)
    others = states[torch.randint(0, count, (count,), generator=noise)] - states
    towards = torch.nn.functional.normalize(others, dim=-1)
    errors = []
    for part in PARTS:
        row: dict[str, float] = {"error": part}
        for name, direction in (("random", random), ("towards", towards)):
            moved = _laws(score, states + part * lengths * direction)
            row[f"kept_{name}"] = _mean(torch.minimum(laws, moved).sum(-1))
            row[f"same_{name}"] = _mean((laws.argmax(-1) == moved.argmax(-1)).float())
        errors.append(row)
    distances, kept = _pairs(states, laws)
    order = distances.argsort()
    pairs = [{"distance": _mean(distances[part]), "kept": _mean(kept[part])} for part in order.chunk(TENTHS)]
    nearest = torch.cdist(states, states).fill_diagonal_(torch.inf).argmin(-1)
    near = (states - states[nearest]).norm(dim=-1) / lengths[:, 0]
    following = torch.cat(
        [torch.minimum(*(_laws(score, own[at]) for at in (slice(1, None), slice(-1)))).sum(-1) for own in texts]
    )
    return {
        "num_states": count,
        "errors": errors,
        "pairs": pairs,
        "rank_correlation": _ranks(distances, kept),
        "nearest": {"distance": _mean(near), "kept": _mean(torch.minimum(laws, laws[nearest]).sum(-1))},
        "steps": {"kept": _mean(following)},
        "largest_error": {"kept": KEPT, **{name: _largest(errors, f"kept_{name}") for name in ("random", "towards")}},
    }


def _laws(score: Any, states: Tensor) -> Float[Tensor, "N V"]:
    return torch.cat([torch.softmax(score(part), -1) for part in states.split(128)])


def _pairs(states: Tensor, laws: Tensor) -> tuple[Float[Tensor, "P"], Float[Tensor, "P"]]:
    """Distance, in lengths of states, and 1 - TV of all pairs of some states."""
    some = torch.linspace(0, len(states) - 1, min(len(states), 300)).long()
    chosen, own = states[some], laws[some]
    scale = chosen.norm(dim=-1)
    rows, columns = torch.triu_indices(len(some), len(some), 1)
    distances = torch.cdist(chosen, chosen)[rows, columns] / torch.sqrt(scale[rows] * scale[columns])
    kept = torch.cat([torch.minimum(own[i], own[i + 1 :]).sum(-1) for i in range(len(some) - 1)])
    return distances, kept


def _ranks(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def _largest(errors: Sequence[dict[str, float]], key: str) -> float:
    """The error at which as many are kept as `KEPT` says, on the line between the measured ones."""
    before, above = 0.0, 1.0
    for row in errors:
        if row[key] < KEPT:
            return before + (row["error"] - before) * (above - KEPT) / (above - row[key])
        before, above = row["error"], row[key]
    return before


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def table(result: dict[str, Any]) -> str:
    """Errors, then pairs."""
    lines = [f"{result['num_states']} states", "error    kept: random, towards     same token: random, towards"]
    for row in result["errors"]:
        lines.append(
            f"{row['error']:5.2f} {row['kept_random']:15.3f} {row['kept_towards']:8.3f} {row['same_random']:19.3f} "
            f"{row['same_towards']:8.3f}"
        )
    lines.append("distance    kept")
    lines += [f"{row['distance']:8.3f} {row['kept']:7.3f}" for row in result["pairs"]]
    lines.append(
        f"rank correlation {result['rank_correlation']:.2f}; nearest {result['nearest']}; steps {result['steps']}"
    )
    lines.append(f"largest error {result['largest_error']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
