"""Every number, table and drawing of the theory pages, by the name that the pages call it by.

    {{ name }}          a number
    {{ name: words }}   a table, with the heads of its columns; a drawing, with its caption

Both languages take the same ones, and words stand in the pages alone. Numbers come from `paceline.theory`, from
`exact`, which counts and plays through, and from benchmarks/results, which measurements wrote.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import exact
import numpy as np
import plots

from paceline import theory
from paceline.draft.costs import TILES

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
MARK = re.compile(r"\{\{ (\w+)(?:: ([^\n]*?))? \}\}")
Drawn = Callable[[str], str]


class Unknown(LookupError):
    """A page asks for what there is not."""


def fill(markdown: str, results: Path = RESULTS) -> str:
    """The page with all its marks replaced."""
    found = numbers(results)
    drawn = drawings(results)

    def replaced(match: re.Match[str]) -> str:
        name, words = match[1], match[2]
        known = found if words is None else drawn
        if name not in known:
            raise Unknown(f"{match[0]} stands for nothing")
        return found[name] if words is None else drawn[name](words)

    return MARK.sub(replaced, markdown)


@dataclass(frozen=True)
class Shape:
    """What a model's weights, keys and values are counted from."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    inner: int = 0
    vocab: int = 0

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Of a layer's matrices: queries and outputs, keys and values, three of the MLP. Norms are left out."""
        kv = self.kv_heads * self.head_dim
        return 2 * self.width**2 + 2 * self.width * kv + 3 * self.width * self.inner

    @property
    def weights(self) -> int:
        """All of them: layers, norms, the table that tokens are read by and the head."""
        norms = (2 * self.layers + 1) * self.width
        return self.layers * self.layer_weights + norms + 2 * self.vocab * self.width


SEVEN = Shape("LLaMA-2-7B", 32, 32, 32, inner=11008, vocab=32000)
SHAPES = (
    SEVEN,
    Shape("LLaMA-3-8B", 32, 32, 8),
    Shape("LLaMA-2-70B", 80, 64, 8),
    Shape("Qwen2.5-Coder-1.5B", 28, 12, 2),
)
BANDWIDTH = 2e12
"""The article's."""
LONG = 4096
"""Tokens of a text of middling length."""
DEVICES = {
    "A100 80 GB SXM": (312e12, 2.039e12),
    "H100 SXM": (989e12, 3.35e12),
    "RTX 4090": (165e12, 1.008e12),
}
"""FLOP/s of dense 16-bit matrix products and bytes/s, from data sheets."""
ALPHA, C, K = 0.6, 0.1, 3
"""The article's example."""
GRID = ((0.3, 0.05), (0.5, 0.05), (0.6, 0.1), (0.8, 0.1), (0.8, 0.05), (0.8, 0.02), (0.9, 0.05), (0.9, 0.02))
SIZES = {"article": (1.3, 70), "vicuna": (0.068, 7), "eagle_7b": (0.24, 7), "eagle_70b": (0.99, 70)}
KINDS = {"humaneval": "code", "gsm8k": "maths", "mt-bench:writing": "writing", "long": "summaries"}
RUNS = {
    "drafters.json": ("ngram", "suffix", "draft_model", "compose"),
    "more-drafters.json": ("recycle", "auto", "lookahead", "lookahead 7-5-7", "early_exit"),
}
"""Greedy runs that the pages quote."""


def table(words: str, rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; words are the heads of its columns with | between."""
    heads = [word.strip() for word in words.split("|")]
    lines = [heads, ["---"] * len(heads), *rows]
    assert all(len(line) == len(heads) for line in lines), f"the table has not {len(heads)} columns: {words}"
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def times(value: Any) -> str:
    """A factor."""
    return f"{float(value):.2f}×"


def share(value: Any, digits: int = 1) -> str:
    return f"{100 * float(value):.{digits}f}%"


# -- numbers -----------------------------------------------------------------------------------------------------------


@cache
def numbers(results: Path = RESULTS) -> dict[str, str]:
    """The numbers that stand in sentences."""
    return (
        bandwidth(results) | drafting() | lengths() | laws() | trees() | sizes() | methods(results) | features(results)
    )


def bandwidth(results: Path) -> dict[str, str]:
    """1: what a token costs at least."""
    read = 2.0 * SEVEN.weights
    step = float(theory.step_seconds(read, BANDWIDTH))
    square = float(theory.article.step_seconds(SEVEN.width, BANDWIDTH))
    per_token = float(theory.kv_bytes(1, SEVEN.layers, SEVEN.kv_heads, SEVEN.head_dim))
    passes = json.loads((results / "forward.json").read_text(encoding="utf-8"))
    single = passes["passes"][0]["ours_ms"]
    floor = float(theory.step_seconds(passes["weight_gb"], passes["read_gb_per_s"])) * 1e3
    return {
        "intensity": f"{float(theory.arithmetic_intensity(1)):g}",
        "article_intensity": f"{theory.article.arithmetic_intensity():g}",
        "intensity_4bit": f"{float(theory.arithmetic_intensity(1, 0.5)):g}",
        "ridge": f"{float(theory.ridge_tokens(*DEVICES['A100 80 GB SXM'])):.0f}",
        "seven_weights": f"{SEVEN.weights:,}",
        "seven_billions": f"{SEVEN.weights / 1e9:.2f}",
        "seven_gb": f"{read / 1e9:.2f}",
        "layer_squares": f"{SEVEN.layer_weights / SEVEN.width**2:.2f}",
        "seven_layers": f"{SEVEN.layers}",
        "seven_width": f"{SEVEN.width:,}",
        "floor_ms": f"{step * 1e3:.2f}",
        "floor_seconds_1000": f"{step * 1000:.1f}",
        "floor_per_second": f"{1 / step:.0f}",
        "floor_table_ms": f"{2 * SEVEN.vocab * SEVEN.width / BANDWIDTH * 1e3:.2f}",
        "square_us": f"{square * 1e6:.1f}",
        "article_ms": f"{square * SEVEN.layers * 1e3:.2f}",
        "article_off": f"{step / (square * SEVEN.layers):.1f}",
        "formula_off": f"{step / square:.0f}",
        "kv_token": f"{per_token:,.0f}",
        "kv_article": f"{2 * SEVEN.head_dim * 2:,}",
        "kv_article_off": f"{per_token / (2 * SEVEN.head_dim * 2):,.0f}",
        "kv_at": f"{LONG:,}",
        "kv_at_gb": f"{per_token * LONG / 1e9:.2f}",
        "kv_at_ms": f"{float(theory.step_seconds(per_token * LONG, BANDWIDTH)) * 1e3:.2f}",
        "kv_even": f"{read / per_token:,.0f}",
        "kv_read_1000_gb": f"{_read_in_all(1000) / 1e9:,.0f}",
        "kv_read_2000_gb": f"{_read_in_all(2000) / 1e9:,.0f}",
        "kv_read_ratio": f"{_read_in_all(2000) / _read_in_all(1000):.1f}",
        "here_gb": f"{passes['weight_gb']:.2f}",
        "here_bandwidth": f"{passes['read_gb_per_s']:.1f}",
        "here_floor_ms": f"{floor:.0f}",
        "here_pass_ms": f"{single:.0f}",
        "here_share": f"{100 * floor / single:.0f}%",
    }


def _read_in_all(tokens: Any) -> Any:
    """Bytes of keys and values that all passes of a text have read: pass t reads those of t tokens."""
    per_token = theory.kv_bytes(1, SEVEN.layers, SEVEN.kv_heads, SEVEN.head_dim)
    return float(per_token) * tokens * (tokens + 1) / 2


def drafting() -> dict[str, str]:
    """2: what drafting brings."""
    tokens = float(theory.tokens_per_pass(ALPHA, K))
    played = exact.played_tokens(K)
    cost = 1 + C * K
    return {
        "alpha": f"{ALPHA:g}",
        "c": f"{C:g}",
        "k": f"{K}",
        "tokens": f"{tokens:.3f}",
        "article_tokens": f"{1 + K * ALPHA:.1f}",
        "passes_article": f"{1000 / K:.0f}",
        "passes_right": f"{1000 / tokens:.0f}",
        "passes_best": f"{1000 / (K + 1):.0f}",
        "speedup_article": times(theory.article.speedup(ALPHA, K, C)),
        "speedup_right": times(theory.speedup(ALPHA, K, C)),
        "speedup_steps": times(theory.speedup(ALPHA, K, C, TILES.verify(K + 1))),
        "verify_4": f"{TILES.verify(K + 1):g}",
        "played_passes": f"{exact.PASSES:,}",
        "played_tokens": f"{played.mean:.3f}",
        "played_error": f"{played.error:.3f}",
        "played_speedup": f"{played.mean / cost:.3f} ± {played.error / cost:.3f}",
        "played_away": f"{(float(theory.article.speedup(ALPHA, K, C)) - played.mean / cost) * cost / played.error:.0f}",
        "least_gain": times((1 + ALPHA) / (1 + C)),
    }


def lengths() -> dict[str, str]:
    """3: the best K."""
    best = theory.best_length(ALPHA, C)
    worst = max(((*_at_root(a, c), a, c) for a, c in GRID), key=lambda row: row[0].speedup / row[2])
    return {
        "root": f"{float(theory.article.best_length(ALPHA, C)):.2f}",
        "best_k": f"{best.num_drafted}",
        "best_speedup": times(best.speedup),
        "best_below": times(theory.speedup(ALPHA, K - 1, C)),
        "best_above": times(theory.speedup(ALPHA, K + 1, C)),
        "article_limit": f"{ALPHA / C:g}×",
        "article_10": times(theory.article.speedup(ALPHA, 10, C)),
        "article_1000": times(theory.article.speedup(ALPHA, 1000, C)),
        "right_limit": f"{1 / (1 - ALPHA):g}",
        "root_worst_loss": share(1 - worst[2] / worst[0].speedup, 0),
        "root_worst_alpha": f"{worst[3]:g}",
        "root_worst_c": f"{worst[4]:g}",
        "root_worst_k": f"{worst[1]}",
        "root_worst_best": f"{worst[0].num_drafted}",
    }


def _at_root(alpha: float, c: float) -> tuple[theory.Best, int, float]:
    """The best K, the root as a whole number, and the speed-up there."""
    root = max(1, round(float(theory.article.best_length(alpha, c))))
    return theory.best_length(alpha, c), root, float(theory.speedup(alpha, root, c))


def laws() -> dict[str, str]:
    """4: what the rules keep."""
    single, rejected = exact.single_position()
    whole, slips, same = exact.whole_passes(), exact.mistakes(), exact.same_noise()
    pairs = exact.random_pairs()
    bound, most = np.asarray(theory.coupled_bound(pairs[:, 0])), 1 - pairs[:, 0]
    inside = int(((pairs[:, 1] >= bound - 1e-12) & (pairs[:, 1] <= most + 1e-12)).sum())
    tv = exact.distance(exact.P, exact.Q)
    p, q = np.array(exact.P, float), np.array(exact.Q, float)
    return {
        "pairs": f"{single.cases}",
        "pairs_equal": f"{single.equal}",
        "pairs_tv": f"{rejected.equal}",
        "joint_cases": f"{whole.cases}",
        "joint_equal": f"{whole.equal}",
        "example_tv": f"{float(tv):g}",
        "example_kept": f"{float(1 - tv):g}",
        "example_coupled": f"{float(theory.coupled_acceptance(p, q)):.3f}",
        "example_bound": f"{float(theory.coupled_bound(float(tv))):.3f}",
        "slip_none": f"{slips['none']}",
        "slip_from_p": f"{float(slips['from_p']):.3f}",
        "slip_argmax": f"{float(slips['argmax']):.3f}",
        "slip_shared": f"{float(slips['shared']):.3f}",
        "same_length": f"{exact.LENGTH}",
        "same_texts": f"{same.texts}",
        "same_equal": f"{same.equal}",
        "same_tokens": f"{same.tokens_per_pass:.2f}",
        "random_pairs": f"{len(pairs)}",
        "random_inside": f"{inside}",
        "random_cost": f"{float((most - pairs[:, 1]).mean()):.3f}",
    }


def trees() -> dict[str, str]:
    """5: the example tree."""
    chain, best = exact.likeliest_chain(3), exact.best_first(3)
    return {
        "tree_chain": ", ".join(chain),
        "tree_chain_tokens": f"{exact.tokens_of(chain):.3f}",
        "tree_best": ", ".join(best),
        "tree_best_tokens": f"{exact.tokens_of(best):.3f}",
        "tree_nodes": f"{len(exact.TREE)}",
        "tree_a": f"{exact.TREE['A']:g}",
        "tree_b": f"{exact.TREE['B']:g}",
        "tree_ba": f"{exact.TREE['BA']:g}",
    }


def sizes() -> dict[str, str]:
    """6: how large published drafts are, in the target's weights."""
    trade = {"base": (0.8, 0.1), "half": (0.8, 0.05), "better": (0.9, 0.1)}
    return {f"size_{name}": share(draft / target) for name, (draft, target) in SIZES.items()} | {
        f"trade_{name}": times(theory.best_length(*pair).speedup) for name, pair in trade.items()
    }


def methods(results: Path) -> dict[str, str]:
    """7: what this repository measured, greedy, by kind of text and over all kinds; and what published numbers mean."""
    found: dict[str, str] = {}
    for file, names in RUNS.items():
        runs = _runs(results / file)
        for name in names:
            key = name.replace(" ", "_").replace("-", "")
            for kind in KINDS.values():
                found[f"{key}_{kind}_tokens"] = f"{runs[name, kind]['mean_acceptance_length']:.2f}"
                found[f"{key}_{kind}_speedup"] = times(runs[name, kind]["speedup"])
            for what, field in (("tokens", "mean_acceptance_length"), ("speedup", "speedup")):
                values = [runs[name, kind][field] for kind in KINDS.values()]
                found[f"{key}_{what}"] = f"{min(values):.2f}–{max(values):.2f}" + ("×" if what == "speedup" else "")
        if file == "drafters.json":
            best = {kind: max(runs[name, kind]["speedup"] for name in names) for kind in KINDS.values()}
            found |= {f"best_{kind}": times(value) for kind, value in best.items()}
            found["best_low"], found["best_high"] = times(min(best.values())), times(max(best.values()))
    wide = [float(found[f"lookahead_757_{kind}_tokens"]) for kind in KINDS.values()]
    alphas = [theory.equivalent_alpha(tokens, 4) for tokens in wide]
    return found | {
        "lookahead_alpha": f"{min(alphas):.2f}–{max(alphas):.2f}",
        "lookahead_alpha_published": f"{theory.equivalent_alpha(1.65, 4):.2f}",
        "lookahead_tokens_claimed": f"{float(theory.tokens_per_pass(0.55, 4)):.2f}",
        "lookahead_width": f"{1 + (7 + 7) * (5 - 1)}",
        "medusa_tokens_claimed": f"{float(theory.tokens_per_pass(0.75, 4)):.2f}",
        "eagle_tokens_claimed": f"{float(theory.tokens_per_pass(0.82, 5)):.2f}",
    }


def _runs(path: Path) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Greedy runs by method and kind of text."""
    data = json.loads(path.read_text(encoding="utf-8"))
    runs = [run for result in data["results"] for run in result["runs"]]
    return {(run["method"], KINDS[run["set"]]): run for run in runs if run["temperature"] == 0}


# -- tables and drawings -----------------------------------------------------------------------------------------------


@cache
def drawings(results: Path = RESULTS) -> dict[str, Drawn]:
    """What takes words: heads of columns, or a caption."""
    measured = _truncated(results)
    return {
        "table_floors": _floors,
        "table_kv": _kv,
        "table_best": _best,
        "table_example": _example,
        "table_tree": _tree,
        "plot_roofline": lambda words: _roofline(words, results),
        "plot_kv": _plot_kv,
        "plot_speedup": _plot_speedup,
        "plot_best": _plot_best,
        "plot_coupled": lambda words: plots.coupled(exact.random_pairs(), theory.coupled_bound, words),
        "plot_costs": _plot_costs,
        "table_truncated": lambda words: _table_truncated(words, measured),
        "plot_truncated": lambda words: plots.truncated(_first_layers(measured), words) if measured else "",
        "plot_features": lambda words: plots.features(_features(results), words),
        "without_truncated": lambda words: "" if measured else words,
        "with_truncated": lambda words: words if measured else "",
    }


def _floors(words: str) -> str:
    rows = []
    for name, (flops, speed) in DEVICES.items():
        ridge = float(theory.ridge_tokens(flops, speed))
        ridge_4 = float(theory.ridge_tokens(flops, speed, 0.5))
        floor = float(theory.step_seconds(2.0 * SEVEN.weights, speed)) * 1e3
        rows.append(
            [name, f"{flops / 1e12:.0f}", f"{speed / 1e12:.3f}", f"{ridge:.0f}", f"{ridge_4:.0f}", f"{floor:.1f}"]
        )
    return table(words, rows)


def _kv(words: str) -> str:
    rows = []
    for shape in SHAPES:
        one, long = (float(theory.kv_bytes(t, shape.layers, shape.kv_heads, shape.head_dim)) for t in (1, 32_768))
        rows.append([shape.name, f"{shape.layers}", f"{shape.kv_heads}", f"{one:,.0f}", f"{long / 1e9:.2f}"])
    return table(words, rows)


def _best(words: str) -> str:
    rows = []
    for a, c in GRID:
        best, root, at_root = _at_root(a, c)
        steps = theory.best_length(a, c, TILES.verify)
        rows.append(
            [
                f"{a:g}",
                f"{c:g}",
                f"{float(theory.article.best_length(a, c)):.1f}",
                f"**{best.num_drafted}**",
                times(best.speedup),
                f"{times(at_root)} (K = {root})",
                times(theory.article.speedup(a, best.num_drafted, c)),
                f"**{steps.num_drafted}**",
                times(steps.speedup),
            ]
        )
    return table(words, rows)


def _example(words: str) -> str:
    p, q = exact.P, exact.Q
    rest = exact.residual(p, q)
    kept = [min(a, b) for a, b in zip(p, q, strict=True)]
    tv = exact.distance(p, q)
    rows = []
    for i, name in enumerate("abcd"):
        values = (p[i], q[i], kept[i], p[i] - kept[i], rest[i], kept[i] + tv * rest[i])
        rows.append([name, *(f"{float(x):g}" for x in values)])
    sums = [float(sum(p)), float(sum(q)), float(1 - tv), float(tv), float(sum(rest)), 1.0]
    return table(words, [*rows, ["∑", *(f"{x:g}" for x in sums)]])


def _tree(words: str) -> str:
    rows = []
    for size in range(1, 8):
        nodes = exact.best_first(size)
        best, count = exact.best_of_all(size)
        chain = f"{exact.tokens_of(exact.likeliest_chain(size)):.3f}" if size <= 3 else "–"
        rows.append([f"{size}", ", ".join(nodes), f"{exact.tokens_of(nodes):.3f}", f"{best:.3f}", f"{count}", chain])
    return table(words, rows)


def _roofline(words: str, results: Path) -> str:
    flops, speed = DEVICES["A100 80 GB SXM"]
    curves = []
    for name, size in (("A100, 16 bits", 2.0), ("A100, 4 bits", 0.5)):
        read = size * SEVEN.weights

        def seconds(n: float, read: float = read, size: float = size) -> float:
            return float(theory.pass_seconds(n, read, speed, flops, size))

        curves.append((name, seconds, float(theory.ridge_tokens(flops, speed, size))))
    passes = json.loads((results / "forward.json").read_text(encoding="utf-8"))["passes"]
    here = [(one["tokens"], one["ours_ms"] / passes[0]["ours_ms"]) for one in passes]
    return plots.roofline(curves, here, words)


def _plot_kv(words: str) -> str:
    def held(tokens: float) -> float:
        return float(theory.kv_bytes(tokens, SEVEN.layers, SEVEN.kv_heads, SEVEN.head_dim))

    return plots.keys_and_values(held, _read_in_all, words)


def _plot_speedup(words: str) -> str:
    return plots.speedups(
        lambda k: float(theory.article.speedup(ALPHA, k, C)),
        lambda k: float(theory.speedup(ALPHA, k, C)),
        lambda k: float(theory.speedup(ALPHA, k, C, TILES.verify(k + 1))),
        [(k, exact.played_tokens(k).mean / (1 + C * k)) for k in range(0, 21, 2)],
        ALPHA / C,
        words,
    )


def _plot_best(words: str) -> str:
    alphas = np.arange(0.2, 0.951, 0.01)
    curves = [(c, [(float(a), theory.best_length(float(a), c).num_drafted) for a in alphas]) for c in (0.02, 0.05, 0.1)]
    return plots.best_lengths(curves, lambda a, c: float(theory.article.best_length(a, c)), words)


def _plot_costs(words: str) -> str:
    costs = np.geomspace(0.01, 0.99, 50)
    curves = [(a, [(float(c), theory.best_length(a, float(c)).speedup) for c in costs]) for a in (0.5, 0.7, 0.8, 0.9)]
    return plots.costs_and_rates(curves, words)


# -- drafts of a few layers --------------------------------------------------------------------------------------------


def _features(results: Path) -> dict[str, Any]:
    """What benchmarks/features.py measured."""
    found: dict[str, Any] = json.loads((results / "features.json").read_text(encoding="utf-8"))
    return found


def features(results: Path) -> dict[str, str]:
    """How near states must be to say nearly the same."""
    found = _features(results)
    return {
        "feature_states": f"{found['num_states']:,}",
        "feature_error_random": share(found["largest_error"]["random"], 0),
        "feature_error_towards": share(found["largest_error"]["towards"], 0),
        "feature_nearest_distance": share(found["nearest"]["distance"], 0),
        "feature_nearest_kept": share(found["nearest"]["kept"], 0),
        "feature_steps_kept": share(found["steps"]["kept"], 0),
        "feature_correlation": f"{found['rank_correlation']:.2f}".replace("-", "−"),
    }


def _truncated(results: Path) -> list[dict[str, Any]]:
    """What benchmarks/truncated.py measured; nothing where it was not run."""
    path = results / "truncated.json"
    return list(json.loads(path.read_text(encoding="utf-8"))["points"]) if path.exists() else []


def _first_layers(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [point for point in points if point["bits"] == 16]


def _table_truncated(words: str, points: Sequence[dict[str, Any]]) -> str:
    if not points:
        return ""
    rows = [
        [
            f"{one['layers']} / {one['of']}",
            f"{one['bits']}",
            share(one["share_of_weights"]),
            f"{one['c']:.3f}",
            f"{one['acceptance']:.3f}",
            f"{one['best_K']}",
            times(one["speedup"]),
        ]
        for one in points
    ]
    return table(words, rows)
