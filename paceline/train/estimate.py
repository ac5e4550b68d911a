"""What a training will take, before it begins: disk, memory and time, from a few passes on this machine."""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from paceline.draft.losses import Batch, Mix
from paceline.progress import human
from paceline.train.data import Plan
from paceline.train.fresh import fresh, taps_of
from paceline.train.recipe import Recipe

__all__ = ["Estimate", "estimate"]

BEFORE = 64
"""Tokens of each text that stand in the cache when a pass is timed."""
LENGTH = 256
"""Tokens of the texts that a step is timed on."""
REPEATS = 3


@dataclass(frozen=True)
class Estimate:
    """Upper bounds: every question and answer as long as it may be."""

    num_texts: int
    num_tokens: int
    data_bytes: int
    num_weights: int
    memory_bytes: int
    """Beside the target: weights, gradients, moments, and the states of a step."""
    data_seconds: float
    epoch_seconds: float
    epochs: int

    def __str__(self) -> str:
        total = self.data_seconds + self.epochs * self.epoch_seconds
        return (
            f"data        {self.num_texts:,} texts of at most {self.num_tokens:,} tokens, {human(self.data_bytes)} on "
            f"disk, {_time(self.data_seconds)}\n"
            f"head        {self.num_weights / 1e6:.1f} million weights, {human(self.memory_bytes)} of memory beside "
            f"the target\n"
            f"training    {self.epochs} epochs of {_time(self.epoch_seconds)}, {_time(total)} with the data\n"
            "These are upper bounds: answers end when they are done, and what is nearly the same is dropped."
        )


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def data_bytes(llm: Any, plan: Plan) -> int:
    """What the data take on disk at most."""
    values = len(plan.taps) * int(llm.target.hidden_size) * int(llm.target.dtype.itemsize)
    return plan.most_tokens * (values + 9)  # two ids and a flag


def estimate(llm: Any, recipe: Recipe) -> Estimate:
    """Measure a few passes of the target and a few steps of a fresh head."""
    from paceline.train.loop import learner

    target, taps = llm.target, taps_of(recipe, llm.target)
    last = int(target.num_layers)
    plan = Plan.of(llm, recipe, sorted({*taps, last}))
    texts = sum(plan.count(name) for name in plan.names)
    tokens = plan.most_tokens
    size = recipe.draft_vocab_size
    trims = size is not None and size < target.vocab_size and recipe.method != "eagle"
    ids = torch.arange(size) if trims and size is not None else None
    dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
    head = fresh(recipe, target, ids, dtype)
    drafter, parameters = learner(head, target, dtype)
    weights = sum(p.numel() for p in parameters.values())
    width = int(target.hidden_size)
    length = min(LENGTH, int(target.max_positions), recipe.batch_tokens)
    shape = max(1, recipe.batch_tokens // length), length
    noise = torch.Generator().manual_seed(0)
    states = {tap: torch.randn(*shape, width, generator=noise).to(target.device, target.dtype) for tap in {*taps, last}}
    some = torch.randint(0, int(target.vocab_size) if ids is None else len(ids), shape, generator=noise)
    some = some.to(target.device)
    batch = Batch(
        some, torch.ones_like(some, dtype=torch.bool), torch.cat([states[t] for t in taps], -1), states[last], some
    )
    bf16 = (target.dtype == torch.bfloat16) if recipe.bfloat16 is None else recipe.bfloat16
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        with torch.autocast(target.device.type, torch.bfloat16) if bf16 else nullcontext():
            options: dict[str, Any] = {} if recipe.method == "medusa" else {"steps": recipe.steps}
            loss, _ = drafter.loss(batch, mix=Mix.read(recipe.loss), **options)
        loss.backward()
        seconds.append(time.perf_counter() - begun)
    epoch = median(seconds) * tokens / some.numel()
    unrolled = max(1, recipe.steps)
    inner = recipe.intermediate_size or 4 * width
    activations = recipe.batch_tokens * unrolled * (3 * inner + 16 * width) * 4
    return Estimate(
        texts, tokens, data_bytes(llm, plan), weights, 16 * weights + activations,
        _data_seconds(llm, recipe, plan, texts), epoch, recipe.epochs,
    )  # fmt: skip


def _data_seconds(llm: Any, recipe: Recipe, plan: Plan, texts: int) -> float:
    """Of passes in which as many rows as are written at once get a token each, or of reading texts as they are."""
    target = llm.target
    rows = min(recipe.num_rows, texts)
    before = min(BEFORE, int(target.max_positions) - REPEATS - 1)
    cache = target.new_cache(rows, before + REPEATS + 1)
    begun = time.perf_counter()
    tokens = torch.zeros(rows, before, dtype=torch.int64)
    target.forward(tokens, torch.arange(before)[None].expand(rows, -1), None, cache, plan.taps, logits=False)
    cache.commit([range(before)] * rows)
    reading = (time.perf_counter() - begun) / (rows * before)
    if plan.sources is not None and recipe.answers == "given":
        return reading * plan.most_tokens
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        target.forward(
            torch.zeros(rows, 1, dtype=torch.int64), torch.zeros(rows, 1, dtype=torch.int64), None, cache, plan.taps
        )
        cache.commit([range(1)] * rows)
        seconds.append(time.perf_counter() - begun)
    written = recipe.max_tokens + (recipe.max_question_tokens if plan.sources is None else 0)
    return median(seconds) * written * texts / rows + reading * (plan.most_tokens - texts * recipe.max_tokens)
