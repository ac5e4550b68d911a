"""Records turned into figures. Pure arithmetic, checked by hand-computed values in the tests.

Speed is Spec-Bench's (Xia et al. 2024): a prompt's speed is its new tokens over its wall time, reading the prompt
included; a contender's is the mean over prompts; a speed-up is the ratio of two such means. Intervals resample prompts,
the same ones for both sides, and take the 2.5 and 97.5 percent quantiles.
"""

from collections.abc import Sequence
from math import log
from typing import Any

import numpy as np

from paceline.bench.measure import BASELINE, first_difference
from paceline.bench.peers import NOTE, PEERS
from paceline.bench.records import Record, Settings
from paceline.output import Stats, combined

RESAMPLES = 10_000


def summarise(records: Sequence[Record], settings: Settings, environment: dict[str, Any]) -> dict[str, Any]:
    """The result as it is written: environment, settings, drift of the baseline, and one run per contender."""
    base = [r for r in records if r.contender == BASELINE]
    spread = drift(base, settings)
    runs = []
    for name in [*settings.methods, *settings.peers]:
        ours = [r for r in records if r.contender == name]
        run: dict[str, Any] = {"method": name, "set": settings.set, "temperature": settings.temperature}
        run |= speed(ours, base, settings) | speculation(ours, environment.get("weight_bytes"))
        run |= identity(ours, base, settings) | {"near_ties_per_1000": None}
        run["within_drift"] = within(run["speedup"], spread["spread"]) if name != BASELINE else None
        run["note"] = NOTE if name in PEERS else None
        runs.append(run)
    return {"environment": environment, "settings": settings.to_dict(), "drift": spread, "runs": runs}


def by_prompt(records: Sequence[Record], settings: Settings) -> list[float]:
    """New tokens per second of each prompt, all repeats taken together."""
    speeds = []
    for prompt in settings.prompts:
        own = [r for r in records if r.prompt == prompt]
        seconds = sum(r.seconds for r in own)
        speeds.append(sum(len(r.token_ids) for r in own) / seconds if seconds > 0 else 0.0)
    return speeds


def speed(ours: Sequence[Record], base: Sequence[Record], settings: Settings) -> dict[str, Any]:
    """Tokens per second and the speed-up over the baseline, in the three ways people compute it.

    ``speedup`` is the ratio of means with its interval, ``speedup_mean_of_ratios`` averages each prompt's own ratio,
    ``speedup_total_time`` divides tokens in all by seconds in all, which is the ratio of times where texts are equal.
    """
    own, none = by_prompt(ours, settings), by_prompt(base, settings)
    seconds, tokens = sum(r.seconds for r in ours), sum(len(r.token_ids) for r in ours)
    prefills = [r.prefill_seconds for r in ours if r.prefill_seconds is not None]
    decoding = seconds - sum(prefills) if len(prefills) == len(ours) else None
    firsts = [r.first_token_seconds for r in ours if r.first_token_seconds is not None]
    ratios = [a / b for a, b in zip(own, none) if b > 0]
    return {
        "tokens_per_second": float(np.mean(own)),
        "decode_tokens_per_second": tokens / decoding if decoding else None,
        "speedup": ratio_of_means([own], [none]),
        "speedup_ci95": interval([own], [none]),
        "speedup_mean_of_ratios": float(np.mean(ratios)) if ratios else None,
        "speedup_total_time": _total(ours) / _total(base) if _total(base) else None,
        "tokens": tokens,
        "seconds": seconds,
        "seconds_to_first_token": float(np.mean(firsts)) if firsts else None,
        "peak_rss_mb": max((r.peak_rss_mb for r in ours if r.peak_rss_mb is not None), default=None),
        "tokens_per_second_by_prompt": own,
    }


def _total(records: Sequence[Record]) -> float:
    seconds = sum(r.seconds for r in records)
    return sum(len(r.token_ids) for r in records) / seconds if seconds > 0 else 0.0


def ratio_of_means(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> float | None:
    """Product of the means in ``above`` over the product of those in ``below``; None where that divides by zero."""
    bottom = np.prod([np.mean(x) for x in below])
    return float(np.prod([np.mean(x) for x in above]) / bottom) if bottom > 0 else None


def interval(
    above: Sequence[Sequence[float]], below: Sequence[Sequence[float]], resamples: int = RESAMPLES
) -> list[float] | None:
    """95% bootstrap interval of `ratio_of_means`; all lists run over the same prompts, which are drawn together.

    None with fewer than two prompts: one prompt says nothing about others.
    """
    count = len(above[0])
    if count < 2:
        return None
    rows = np.random.default_rng(0).integers(0, count, (resamples, count))
    top = np.prod([np.asarray(x)[rows].mean(axis=1) for x in above], axis=0)
    bottom = np.prod([np.asarray(x)[rows].mean(axis=1) for x in below], axis=0)
    ratios = top[bottom > 0] / bottom[bottom > 0]
    return [float(q) for q in np.quantile(ratios, (0.025, 0.975))] if ratios.size else None


def speculation(ours: Sequence[Record], weight_bytes: int | None) -> dict[str, Any]:
    """Passes, acceptance and the time split; a peer tells its passes only, which give its tokens per pass.

    ``share_outside_forwards`` is the share of wall time spent outside the target's forwards. ``gigabytes_per_second``
    is the rate at which passes read the weights, to be held against the machine's read bandwidth.
    """
    passes, seconds = sum(r.passes for r in ours), sum(r.seconds for r in ours)
    tokens = sum(len(r.token_ids) for r in ours)
    if not ours or any(r.stats is None for r in ours):
        known: dict[str, Any] = dict.fromkeys(Stats().to_dict())
        known |= {"time_share": None, "share_outside_forwards": None, "gigabytes_per_second": None}
        length = tokens / passes if passes else None
        return known | {"target_passes": passes, "mean_acceptance_length": length}
    stats = combined([Stats(**r.stats) for r in ours if r.stats is not None])
    target = stats.time["target"]
    forwards = stats.time["prefill"] + target
    figures = stats.to_dict() | {
        "target_passes": passes,
        "time_share": {name: t / seconds for name, t in stats.time.items()} if seconds else None,
        "share_outside_forwards": max(0.0, 1 - forwards / seconds) if seconds else None,
        "gigabytes_per_second": weight_bytes * passes / target / 1e9 if weight_bytes and target else None,
    }
    return figures


def identity(ours: Sequence[Record], base: Sequence[Record], settings: Settings) -> dict[str, Any]:
    """Whether the ids are those of the baseline, which prompts differ, and at which new token they part.

    None for a peer that samples: its random numbers are its own, so equal texts are not to be expected.
    """
    peer = bool(ours) and ours[0].contender in PEERS
    if peer and settings.temperature >= 1e-5:
        return {"outputs_identical": None, "num_different": None, "first_differences": None, "repeatable": None}
    plain = {(r.prompt, r.repeat): r.token_ids for r in base}
    parted: dict[str, int] = {}
    for r in ours:
        at = first_difference(r.token_ids, plain[r.prompt, r.repeat])
        if at is not None:
            parted[r.prompt] = min(at, parted.get(r.prompt, at))
    texts = {prompt: {tuple(r.token_ids) for r in ours if r.prompt == prompt} for prompt in settings.prompts}
    return {
        "outputs_identical": not parted,
        "num_different": len(parted),
        "first_differences": parted,
        "repeatable": all(len(t) <= 1 for t in texts.values()) if settings.repeats > 1 else None,
    }


def drift(base: Sequence[Record], settings: Settings) -> dict[str, Any]:
    """The baseline's mean speed in each repeat, and the largest over the smallest: the machine's own drift."""
    speeds = [
        float(np.mean([r.tokens_per_second for r in base if r.repeat == repeat])) for repeat in range(settings.repeats)
    ]
    spread = max(speeds) / min(speeds) if len(speeds) > 1 and min(speeds) > 0 else None
    return {"none_tokens_per_second_by_repeat": speeds, "spread": spread}


def within(speedup: float | None, spread: float | None) -> bool | None:
    """Whether a speed-up is no further from 1 than the drift, in ratio; None when the drift was not measured."""
    if speedup is None or spread is None:
        return None
    return speedup <= 0 or abs(log(speedup)) <= log(spread)
