"""What tests compare with: tiny random models run by unmodified `transformers`, and a decoding loop without a cache.

Nothing here uses the package's cache, masks, attention, laws or loop. The one thing shared is the noise of a seed,
`Draws.noise`, which has tests of its own.
"""

import functools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process

from paceline.cache import KVCache
from paceline.decode import Request, prefill, run, step
from paceline.draft.base import Drafter, NoDraft
from paceline.draft.costs import Costs
from paceline.kernels import Kernel
from paceline.sampling import Draws, SamplingParams
from paceline.target import HFTarget, Seen
from paceline.testing import ScriptedTree
from paceline.tree import TokenTree

VOCAB = 97
ARCHS = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt2", "phi")
WINDOWED = {"mistral": 6, "gemma3": 4}
"""Sliding windows in tokens; Gemma-3's second layer attends to everything."""

GREEDY = SamplingParams(temperature=0.0)


def named(value: object) -> str:
    """A name for a test's parameter that is the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


# -- models ------------------------------------------------------------------------------------------------------------


def tiny(arch: str, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any) -> PreTrainedModel:
    """A random model small enough for one millisecond a pass, as `transformers` makes it, with "eager" attention.

    The weights are wide enough for attention to matter (a wrong mask or position changes every logit), and lm_head is
    scaled so that the margins between tokens are far above float64 rounding.
    """
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    window = {"sliding_window": WINDOWED.get(arch)}
    made: dict[str, tuple[Any, dict[str, Any]]] = {
        "llama": (transformers.LlamaConfig, sizes),
        "qwen2": (transformers.Qwen2Config, sizes),
        "qwen3": (transformers.Qwen3Config, {**sizes, "head_dim": 16}),
        "mistral": (transformers.MistralConfig, {**sizes, **window}),
        "gemma3": (
            transformers.Gemma3TextConfig,
            {**sizes, **window, "head_dim": 12, "query_pre_attn_scalar": 12, "num_hidden_layers": 3}
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        ),
        "gpt2": (transformers.GPT2Config, {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256}),
        "phi": (transformers.PhiConfig, {**sizes, "partial_rotary_factor": 0.5}),
    }
    kind, own = made[arch]
    config = kind(**{**common, **own, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.1)
            model.get_output_embeddings().weight.mul_(3.0)
    return model


@functools.cache
def plain(arch: str = "llama", seed: int = 0, limit: int = 256) -> PreTrainedModel:
    """The model that oracles run: nothing of the package touches it."""
    return tiny(arch, seed, **_limit(arch, limit))


@functools.cache
def target(arch: str = "llama", seed: int = 0, limit: int = 256) -> HFTarget:
    """The same weights as a target."""
    return HFTarget(tiny(arch, seed, **_limit(arch, limit)))


def _limit(arch: str, limit: int) -> dict[str, int]:
    return {"n_positions" if arch == "gpt2" else "max_position_embeddings": limit}


@contextmanager
def float64_softmax() -> Iterator[None]:
    """`transformers`' eager attention rounds its weights to float32; inside here it does not."""
    rounded = torch.nn.functional.softmax

    def exact(input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return rounded(input, dim=dim, dtype=torch.float64 if input.dtype == torch.float64 else dtype, **kwargs)

    torch.nn.functional.softmax = exact
    try:
        yield
    finally:
        torch.nn.functional.softmax = rounded


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """[len(ids), V]: one forward over the whole text, batch 1, no cache."""
    with float64_softmax():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0]


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Equal in float64.

    A norm layer that rounds to float32 inside may once in a billion numbers turn the last bit of float64 into one of
    float32: the largest difference allows for that, the median does not.
    """
    assert found.shape == expected.shape
    difference = (found - expected).abs()
    assert float(difference.max()) < 1e-6, f"differs by {float(difference.max())}"
    assert float(difference.median()) < 1e-9, f"differs by {float(difference.median())} in the median"


# -- the loop without a cache ------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What plain decoding must say, and the least likely token at each of its positions."""

    ids: list[int]
    worst: list[int]
    laws: list[Tensor]
    """Processed logits at each position."""
    raw: Sequence[Tensor] = ()
    """Log-softmax of the model's own logits at each position."""


class _CountPenalties(LogitsProcessor):
    """vLLM's presence and frequency penalty: tokens of the output alone."""

    def __init__(self, params: SamplingParams, num_prompt: int) -> None:
        self.params, self.num_prompt = params, num_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, self.num_prompt :], minlength=scores.shape[-1]).to(scores)
        scores = scores - self.params.frequency_penalty * counts
        return scores - self.params.presence_penalty * (counts > 0).to(scores)


class _Allowed(LogitsProcessor):
    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = set(ids)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        banned = torch.tensor([[token not in self.ids for token in range(scores.shape[-1])]])
        return scores.masked_fill(banned, -float("inf"))


class _Plain(LogitsProcessor):
    """A function (list of ids, logits) -> logits."""

    def __init__(self, function: Callable[[list[int], Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.function(input_ids[0].tolist(), scores[0].clone())[None]


Encode = Callable[[str], list[list[int]]]


def processors(
    params: SamplingParams, num_prompt: int, ends: Iterable[int] = (), encode: Encode | None = None
) -> list[LogitsProcessor]:
    """The settings as `transformers` applies them, in its order; off settings are left out.

    `ends` are the ids that `min_tokens` bans; `encode` spells the strings among `bad_words`.
    """
    found: list[LogitsProcessor] = []
    if params.logit_bias:
        found.append(logits_process.SequenceBiasLogitsProcessor({(i,): b for i, b in params.logit_bias.items()}))
    if params.repetition_penalty != 1.0:
        found.append(logits_process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        found.append(_CountPenalties(params, num_prompt))
    if params.no_repeat_ngram_size:
        found.append(logits_process.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if params.bad_words:
        words: list[list[int]] = []
        for word in params.bad_words:
            if isinstance(word, str):
                assert encode is not None, "banned strings need `encode`"
                words += encode(word)
            else:
                words.append(list(word))
        found.append(logits_process.NoBadWordsLogitsProcessor(words))
    if params.allowed_token_ids is not None:
        found.append(_Allowed(params.allowed_token_ids))
    ids = sorted(ends)
    if params.min_tokens and ids:
        found.append(logits_process.MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, ids))
    of_transformers = (LogitsProcessor, LogitsProcessorList)
    found += [p if isinstance(p, of_transformers) else _Plain(p) for p in params.logits_processors]
    if params.temperature == 0.0:
        return found
    if params.temperature != 1.0:
        found.append(logits_process.TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        found.append(logits_process.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        found.append(logits_process.TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        found.append(logits_process.MinPLogitsWarper(params.min_p))
    return found


def reference(
    model: PreTrainedModel,
    prompt: Sequence[int],
    max_new: int,
    params: SamplingParams = GREEDY,
    eos: Iterable[int] = (),
    *,
    encode: Encode | None = None,
    sample: int = 0,
) -> Answer:
    """Plain decoding in a few lines: the whole text is read again for every token; ends behind the first stop id.

    `eos` ends nothing, and `min_tokens` does not ban it, under `ignore_eos`. Stop strings are not looked for.
    """
    raw: list[Tensor] = []
    ids, answer = list(prompt), Answer([], [], [], raw)
    stops = {*(() if params.ignore_eos else eos), *params.stop_token_ids}
    chain = processors(params, len(prompt), stops, encode)
    while len(answer.ids) < max_new and not stops & set(answer.ids[-1:]):
        scores = logits_of(model, ids)[-1:]
        raw.append(torch.log_softmax(scores[0], 0))
        for processor in chain:
            scores = processor(torch.tensor([ids]), scores)
        keys = scores[0]
        if params.temperature > 0.0:
            assert params.seed is not None, "a sampled reference needs a seed"
            noise = Draws(params.seed, sample).noise(len(ids), vocab_size=keys.shape[0])
            keys = torch.log_softmax(keys, 0) + noise
        token = int((keys == keys.max()).nonzero()[0])
        answer.ids.append(token)
        answer.worst.append(int(scores[0].argmin()))
        answer.laws.append(scores[0])
        ids.append(token)
    return answer


@functools.cache
def _answer(
    arch: str, limit: int, prompt: tuple[int, ...], max_new: int, eos: tuple[int, ...], settings: tuple[Any, ...]
) -> Answer:
    params = SamplingParams(**{name: _thaw(value) for name, value in settings})
    return reference(plain(arch, limit=limit), prompt, max_new, params, eos)


def answer(
    prompt: Sequence[int], max_new: int, arch: str = "llama", limit: int = 256, eos: Iterable[int] = (), **settings: Any
) -> Answer:
    """`reference` of a shared model, remembered between tests; settings are those of `SamplingParams`, else greedy.

    With `logits_processors`, which may hold a state, nothing is remembered.
    """
    settings = {"temperature": 0.0, **settings}
    if settings.get("logits_processors"):
        return reference(plain(arch, limit=limit), prompt, max_new, SamplingParams(**settings), eos)
    frozen = tuple(sorted((name, _frozen(value)) for name, value in settings.items()))
    return _answer(arch, limit, tuple(prompt), max_new, tuple(eos), frozen)


class _Items(tuple[Any, ...]):
    """A mapping that can be hashed."""


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return _Items(value.items())
    return tuple(_frozen(one) for one in value) if isinstance(value, list | tuple) else value


def _thaw(value: Any) -> Any:
    return dict(value) if isinstance(value, _Items) else value


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random ids, with a repeated stretch so that look-ups find something."""
    rng = random.Random(f"{length} {seed}")
    ids = [rng.randrange(VOCAB) for _ in range(length)]
    return ids if length < 8 else [*ids[: length - 4], *ids[1:5]]


# -- drafters ----------------------------------------------------------------------------------------------------------


@dataclass
class Known:
    """Prompts and what follows them, so that scripts know what is right and what is wrong at any point of a text."""

    prompts: list[list[int]]
    answers: list[Answer]

    def coming(self, ids: list[int]) -> Answer:
        """The rest of the answer after a text so far; an assertion when the text is not a beginning of any."""
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            done = len(ids) - len(prompt)
            if done >= 0 and ids == [*prompt, *answer.ids[:done]]:
                return Answer(answer.ids[done:], answer.worst[done:], answer.laws[done:])
        raise AssertionError(f"the text has left the reference: {ids}")

    def oracle(self, depth: int) -> ScriptedTree:
        """Everything right."""
        return ScriptedTree(lambda ids: [self.coming(ids).ids[:depth]])

    def anti(self, depth: int) -> ScriptedTree:
        """The least likely token at every place."""
        return ScriptedTree(lambda ids: [self.coming(ids).worst[:depth]])

    def mix(self, depth: int) -> ScriptedTree:
        """right, right, wrong, right, wrong, …"""
        return self.accepting([2, 1, 0], depth)

    def accepting(self, counts: Sequence[int], depth: int) -> ScriptedTree:
        """Chains whose k-th has exactly `counts[k]` right tokens, again and again; the depth is always the same."""
        turns: dict[int, int] = {}

        def script(ids: list[int]) -> list[list[int]]:
            turn = turns.setdefault(len(ids), len(turns))
            right, coming = counts[turn % len(counts)], self.coming(ids)
            chain = coming.ids[:depth] + [0] * (depth - len(coming.ids))
            if right < min(depth, len(coming.ids)):
                chain[right] = coming.worst[right]
            return [chain]

        return ScriptedTree(script)

    def wild(self, depth: int, num_nodes: int, seed: int = 0) -> ScriptedTree:
        """Random trees: right and wrong tokens at every depth, repeated siblings, wide here and deep there."""

        def script(ids: list[int]) -> TokenTree:
            coming, rng = self.coming(ids).ids, random.Random(f"{len(ids)} {seed}")
            tokens, parents, depths = [ids[-1]], [-1], [0]
            while len(tokens) < num_nodes:
                recent = len(tokens) - 1 - rng.randrange(min(3, len(tokens)))
                parent = recent if rng.random() < 0.6 else rng.randrange(len(tokens))
                if depths[parent] == depth:
                    continue
                at = depths[parent]
                likely = [coming[at]] if at < len(coming) else []
                pool = [*likely * 4, *tokens[-2:], rng.randrange(VOCAB)]
                tokens.append(rng.choice(pool))
                parents.append(parent)
                depths.append(at + 1)
            return TokenTree(torch.tensor(tokens), torch.tensor(parents))

        return ScriptedTree(script)


# -- running the package -----------------------------------------------------------------------------------------------


class Spy:
    """A target that writes down what it is asked; `spoil(logits, positions, tokens)` may change what it answers."""

    def __init__(self, target: HFTarget, spoil: "Callable[[Tensor, Tensor, Tensor], None] | None" = None) -> None:
        self.target, self.spoil = target, spoil
        self.vocab_size, self.hidden_size, self.max_positions = (
            target.vocab_size,
            target.hidden_size,
            target.max_positions,
        )
        self.kernel = target.kernel
        self.positions: list[list[list[int]]] = []
        """Positions of every slot, per forward and row."""
        self.tokens: list[list[list[int]]] = []
        self.begins: list[list[int]] = []
        """Committed length of each row, per forward."""
        self.caches: list[KVCache] = []
        """The cache of each forward."""

    def new_cache(self, rows: int, size: int) -> KVCache:
        return self.target.new_cache(rows, size)

    def forward(
        self,
        tokens: Tensor,
        offsets: Tensor,
        mask: Tensor | None,
        cache: KVCache,
        taps: Sequence[int] = (),
        *,
        logits: bool = True,
    ) -> Seen:
        positions = torch.tensor(cache.lengths)[:, None] + offsets
        self.positions.append(positions.tolist())
        self.tokens.append(tokens.tolist())
        self.begins.append(list(cache.lengths))
        self.caches.append(cache)
        seen = self.target.forward(tokens, offsets, mask, cache, taps, logits=logits)
        if self.spoil is not None and logits:
            spoilt = seen.logits.clone()
            self.spoil(spoilt, positions, tokens)
            seen = Seen(spoilt, seen.hidden)
        return seen

    @property
    def furthest(self) -> int:
        """The highest position that was ever read."""
        return max(max(max(row) for row in rows) for rows in self.positions)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.target.embed(tokens)

    def unembed(self, hidden: Tensor) -> Tensor:
        return self.target.unembed(hidden)


class Table:
    """A target whose next-token law depends on the last token alone: logits = log P[last]."""

    def __init__(self, probs: Sequence[Sequence[float]], limit: int = 10_000) -> None:
        self.logits = torch.tensor(probs, dtype=torch.float64).log()
        self.vocab_size = self.logits.shape[1]
        self.hidden_size, self.max_positions, self.kernel = 0, limit, Kernel("plain")
        self.given: list[tuple[Tensor, Tensor]] = []
        """The logits handed out, and copies of them: what reads them must not change them."""

    def new_cache(self, rows: int, size: int) -> KVCache:
        return KVCache(rows, self.max_positions)

    def forward(
        self,
        tokens: Tensor,
        offsets: Tensor,
        mask: Tensor | None,
        cache: KVCache,
        taps: Sequence[int] = (),
        *,
        logits: bool = True,
    ) -> Seen:
        cache.start(offsets)
        cache.finish()
        found = self.logits[tokens]
        self.given.append((found, found.clone()))
        return Seen(found, None)

    def embed(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

    def unembed(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


def requests(
    target: Any,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter[Any] | Sequence[Drafter[Any]] | None = None,
    *,
    depth: int = 23,
    budget: int | None = None,
    rule: str = "coupled",
    eos: Iterable[int] = (),
    costs: Costs | None = None,
    settings: Sequence[dict[str, Any]] | None = None,
    **common: Any,
) -> list[Request]:
    """Requests for prompts, one drafter for all or one each.

    Settings, common and of each row, are those of `SamplingParams`, greedy if none; `eos` may stand among the latter.
    """
    drafters = list(drafter) if isinstance(drafter, Sequence) else [drafter or NoDraft()] * len(prompts)
    made = []
    for i, prompt in enumerate(prompts):
        own = {"temperature": 0.0, "eos": eos, **common, **(settings[i] if settings else {})}
        ends = frozenset(own.pop("eos"))
        made.append(
            Request(
                list(prompt),
                SamplingParams(**own),
                drafters[i],
                vocab_size=target.vocab_size,
                max_positions=target.max_positions,
                eos_ids=ends,
                rule=rule,
                depth=depth,
                budget=depth if budget is None else budget,
                costs=costs,
            )
        )
    return made


def decode(target: Any, prompts: Sequence[Sequence[int]], drafter: Any = None, **options: Any) -> list[Request]:
    """The requests, run to their ends as one batch."""
    made = requests(target, prompts, drafter, **options)
    for _ in run(target, made):
        pass
    return made


def walk(target: Any, request: Request) -> Iterator[KVCache]:
    """One request step by step, for tests that look at the cache in between; first after the prompt was read."""
    cache = prefill(target, request)
    yield cache
    while request.finish_reason is None:
        step(target, cache, [request])
        yield cache
