"""The forward alone: ours against `transformers`, call by call in one process, beside the memory's read bandwidth.

    python benchmarks/forward.py [MODEL] [--json FILE]

Three questions, each measured interleaved so that a machine that drifts drifts for all alike (medians are quoted):

    speed     a pass of n tokens behind 200, ours / plain `transformers` on the same weights, and GB/s of weights
    loss      where the time between the read bandwidth and the pass goes: matrix products, attention, the rest
    context   a pass behind 8,192 tokens / behind 200
    bits      rows of a chain that differ between widths, on both sides of a multiple of 512 keys
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from paceline.cache import KVCache
from paceline.kernels import native
from paceline.kernels.cpu import threads_available
from paceline.models import load_model, resolve
from paceline.target import HFTarget

SHORT, LONG = 200, 8192
WIDTHS = (1, 8, 16, 24, 32)
Times = dict[tuple[str, int], list[float]]


def main() -> None:
    """Measure, print a table for people, and the same as JSON on the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b-instruct-q4_k_m")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(threads_available())
    source = resolve(args.model, progress=True)
    target = HFTarget(load_model(source))
    plain = load_model(source)
    ids = torch.randint(0, 50_000, (1, SHORT + 600), generator=torch.Generator().manual_seed(0))
    result = {
        "model": source.name,
        "note": source.note,
        "kernel": target.kernel.name,
        "threads": torch.get_num_threads(),
        "weight_gb": target.weight_bytes / 1e9,
        **speed(target, plain, ids, args.repeats),
        "context_ratio": context(target, ids, args.repeats),
        "rows_that_differ": bits(target, ids),
    }
    show(result)
    text = json.dumps(result)
    if args.json:
        with open(args.json, "w") as file:
            file.write(text + "\n")
    print(text)


def speed(target: HFTarget, plain: Any, ids: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Milliseconds per pass of ours and of `transformers`, with our share in products and attention."""
    cache = filled(target, ids, SHORT)
    with torch.inference_mode():
        theirs = plain(ids[:, :SHORT], use_cache=True).cache
    spent = watch_kernels()
    block = torch.ones(1 << 27)
    times: Times = defaultdict(list)
    parts: dict[tuple[str, int], list[float]] = defaultdict(list)

    def transformers_pass(n: int) -> None:
        with torch.inference_mode():
            plain(ids[:, SHORT : SHORT + n], cache=theirs, use_cache=True)
        theirs.crop(-n)

    for repeat in range(repeats + 1):
        bandwidth = seconds(block.sum)
        for n in WIDTHS:
            spent.clear()
            passed = seconds(lambda n=n: one_pass(target, cache, ids, n))  # type: ignore[misc]
            there = seconds(lambda n=n: transformers_pass(n))  # type: ignore[misc]
            if repeat:
                times["ours", n].append(passed)
                times["transformers", n].append(there)
                for name, value in spent.items():
                    parts[name, n].append(value)
        if repeat:
            times["read", 0].append(block.nbytes / bandwidth / 1e9)
    read = statistics.median(times["read", 0])
    rows = []
    for n in WIDTHS:
        ours_ms = statistics.median(times["ours", n]) * 1e3
        rows.append(
            {
                "tokens": n,
                "ours_ms": ours_ms,
                "transformers_ms": statistics.median(times["transformers", n]) * 1e3,
                "ratio": statistics.median(
                    b / a for a, b in zip(times["ours", n], times["transformers", n], strict=True)
                ),
                "gb_per_s": target.weight_bytes / ours_ms / 1e6,
                "products_ms": statistics.median(parts["linear", n]) * 1e3 if parts else None,
                "attention_ms": statistics.median(parts["attention", n]) * 1e3 if parts else None,
            }
        )
    return {"read_gb_per_s": read, "passes": rows}


def context(target: HFTarget, ids: torch.Tensor, repeats: int) -> dict[int, float]:
    """A pass behind a long context over one behind a short one; the long cache holds random keys and values."""
    short, long = filled(target, ids, SHORT), filled(target, ids, SHORT)
    long._grow(LONG + 64)
    for k, v in long._kv:
        k[:, :, SHORT:LONG].normal_()
        v[:, :, SHORT:LONG].normal_()
    long.lengths = [LONG]
    ratios: dict[int, list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):
        for n in (1, 24):
            a = seconds(lambda n=n: one_pass(target, short, ids, n))  # type: ignore[misc]
            b = seconds(lambda n=n: one_pass(target, long, ids, n))  # type: ignore[misc]
            if repeat:
                ratios[n].append(b / a)
    return {n: statistics.median(values) for n, values in ratios.items()}


def bits(target: HFTarget, ids: torch.Tensor) -> dict[str, int]:
    """Rows of 24 whose logits differ from those read one at a time, by prefix and width."""
    found = {}
    for prefix in (SHORT, 500):
        alone = chain(target, ids, prefix, 1)
        for width in (2, 8, 24):
            found[f"{prefix}+{width}"] = int((chain(target, ids, prefix, width) != alone).any(-1).sum())
    return found


def chain(target: HFTarget, ids: torch.Tensor, prefix: int, width: int) -> torch.Tensor:
    """Logits of the 24 tokens behind a prefix, read `width` at a time."""
    cache, rows = filled(target, ids, prefix), []
    for begin in range(prefix, prefix + 24, width):
        seen = target.forward(ids[:, begin : begin + width], torch.arange(width)[None], None, cache)
        cache.commit([range(width)])
        rows.append(seen.logits[0].clone())
    return torch.cat(rows)


def filled(target: HFTarget, ids: torch.Tensor, length: int) -> KVCache:
    """A cache that has read the first `length` ids."""
    cache = target.new_cache(1, length + 64)
    target.forward(ids[:, :length], torch.arange(length)[None], None, cache, logits=False)
    cache.commit([range(length)])
    return cache


def one_pass(target: HFTarget, cache: KVCache, ids: torch.Tensor, n: int) -> None:
    """Read n tokens behind what is committed and drop them."""
    target.forward(ids[:, SHORT : SHORT + n], torch.arange(n)[None], None, cache)
    cache.unstage()


def watch_kernels() -> dict[str, float]:
    """Seconds spent in each compiled kernel, added up as they are called."""
    spent: dict[str, float] = defaultdict(float)

    def watched(name: str) -> Callable[..., Any]:
        run = getattr(native.Tiles, name)

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = run(*args)
            spent[name] += time.perf_counter() - began
            return result

        return timed

    for name in ("linear", "attention"):
        setattr(native.Tiles, name, watched(name))
    return spent


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    print(f"{result['model']}: {result['note']}; kernel {result['kernel']}, {result['threads']} threads")
    print(f"read bandwidth {result['read_gb_per_s']:.1f} GB/s, {result['weight_gb']:.2f} GB of weights per pass")
    print("tokens   ours ms   transformers ms   ratio   GB/s   products ms   attention ms   rest ms")
    for row in result["passes"]:
        products, attention = row["products_ms"] or 0.0, row["attention_ms"] or 0.0
        print(
            f"{row['tokens']:6} {row['ours_ms']:9.1f} {row['transformers_ms']:17.1f} {row['ratio']:7.2f}"
            f" {row['gb_per_s']:6.1f} {products:13.1f} {attention:14.1f} {row['ours_ms'] - products - attention:9.1f}"
        )
    print("behind 8,192 tokens / behind 200:", {n: round(r, 2) for n, r in result["context_ratio"].items()})
    print("rows of 24 that differ from one-at-a-time, by prefix+width:", result["rows_that_differ"])


if __name__ == "__main__":
    main()
