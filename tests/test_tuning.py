"""How a draft model is set up: what is measured once and stored, and the choice, recomputed by trying every depth.

Nothing here looks at a clock: passes take the seconds that a test says.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
import transformers
from torch import Tensor

from paceline.draft import tuning
from paceline.draft.costs import Costs
from paceline.draft.tuning import GUESSED_BY, READ_BY, Tuning, tune
from paceline.errors import BadRequest, UnsupportedModel
from paceline.kernels import native
from paceline.target import HFTarget

needs_tiles = pytest.mark.skipif(
    bool(native.tiles().why), reason=f"no tiles, so nothing in few bits: {native.tiles().why}"
)
VOCAB = 256
IDS = [(7 * i * i + 3 * i) % VOCAB for i in range(40)]
SHARES = (1.0, 0.65)


def a_model(seed: int, dtype: torch.dtype = torch.bfloat16, vocab_size: int = VOCAB) -> HFTarget:
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return HFTarget(transformers.AutoModelForCausalLM.from_config(config).to(dtype))


class Machine:
    """What passes take and what the models say here: made up from a seed, by the way the draft model runs."""

    def __init__(self, patch: pytest.MonkeyPatch, target: HFTarget, draft: HFTarget, seed: int = 0) -> None:
        self.target, self.draft, self.rng = target, draft, np.random.default_rng(seed)
        self.measured = 0
        self.noise = {16: 0.5, 8: 0.6, 4: self.rng.choice([0.7, 1.0, 1.5])}
        """How far the draft's logits are from the target's."""
        self.seconds = {(bits, scored): self.rng.uniform(0.1, 0.6) for bits in (16, 8, 4) for scored in self.sizes()}
        for bits in (16, 8, 4):  # fewer ids never take longer
            taken = sorted(self.seconds[bits, scored] for scored in self.sizes())
            self.seconds |= {(bits, scored): s for scored, s in zip(sorted(self.sizes()), taken, strict=True)}
        base = self.rng.normal(size=(len(IDS), VOCAB)) * 2
        noise = self.rng.normal(size=(len(IDS), VOCAB))
        self.says = {0: base} | {bits: base + far * noise for bits, far in self.noise.items()}
        patch.setattr(tuning, "SMALL", 0)
        patch.setattr(tuning, "_timed", self.timed)
        patch.setattr(tuning, "_logits", self.logits)

    @staticmethod
    def sizes() -> list[int]:
        """Ids that are scored, in whole blocks."""
        return [int(VOCAB * share) // 16 * 16 for share in SHARES]

    def way(self, model: HFTarget) -> int:
        if model is self.target:
            return 0
        return 16 if model.few is None else model.few.bits

    def timed(
        self, model: HFTarget, ids: list[int], widths: Sequence[int], guesses: bool = False
    ) -> list[tuple[int, float]]:
        assert guesses == (model is not self.target)
        self.measured += 1
        assert ids == IDS
        if model is self.target:
            return [(n, 2.0 * (1 + n / 40)) for n in widths]  # two seconds a pass
        return [(n, 2.0 * self.seconds[self.way(model), model.num_scored] * (1 + (n - 1) / 30)) for n in widths]

    def logits(self, model: HFTarget, ids: list[int], width: int) -> Tensor:
        self.measured += 1
        assert ids == IDS
        return torch.from_numpy(self.says[self.way(model)][:, : model.num_scored])

    # -- by hand ---------------------------------------------------------------------------------------------------

    def overlap(self, bits: int, share: float) -> float:
        scored = int(VOCAB * share)
        p = np.exp(self.says[0]) / np.exp(self.says[0]).sum(1, keepdims=True)
        q = np.exp(self.says[bits][:, :scored]) / np.exp(self.says[bits][:, :scored]).sum(1, keepdims=True)
        q = np.pad(q, ((0, 0), (0, VOCAB - scored)))
        return float(1 - np.abs(p - q).sum(1).mean() / 2)  # the total variation, the other way round

    def rate(self, bits: int, share: float) -> float:
        """Tokens of a round by its time, at the best depth."""
        alpha = self.overlap(bits, share)
        cost = self.seconds[bits, int(VOCAB * share) // 16 * 16]
        verify = [(n, (1 + n / 40) / (1 + 1 / 40)) for n in READ_BY]
        best = 1.0
        for depth in range(1, 17):
            tokens = (1 - alpha ** (depth + 1)) / (1 - alpha)
            best = max(best, tokens / (np.interp(depth + 1, *np.array(verify).T) + depth * cost / (1 + 1 / 40)))
        return float(best)

    def best(self, kinds: Sequence[int] = (16, 8, 4)) -> tuple[int, float]:
        """(bits, share) that brings most; what brings as much within 1% and guesses better comes first."""
        ways = [(bits, share) for bits in kinds for share in (SHARES if bits != 16 else SHARES[:1])]
        rates = {way: self.rate(*way) for way in ways}
        good = [way for way in ways if rates[way] * 1.01 >= max(rates.values())]
        return max(good, key=lambda way: self.overlap(*way))


@pytest.fixture(scope="module")
def pair() -> tuple[HFTarget, HFTarget]:
    return a_model(0), a_model(1)


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what is measured. The compiled kernel was found before, where it always lies."""
    native.tiles()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "costs"


def files(store: Path) -> list[Path]:
    return sorted(store.glob("*")) if store.exists() else []


def no_measuring(*args: Any) -> Any:
    raise AssertionError("something was measured")


# -- small models ------------------------------------------------------------------------------------------------------


@needs_tiles
def test_small_models_are_not_measured(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_measured", no_measuring)
    target, draft = a_model(0), a_model(1)
    assert tune(target, draft, IDS) is None
    assert draft.few is None
    assert tune(target, draft, IDS, dtype="bfloat16") is None
    assert draft.few is None
    for dtype, bits in (("int8", 8), ("int4", 4)):
        assert tune(target, draft, IDS, dtype=dtype) is None
        assert draft.few.bits == bits
        assert draft.num_scored == VOCAB
        assert tune(target, draft, IDS, dtype=dtype, vocab_size=100) is None
        assert draft.num_scored == 96
    assert target.few is None
    assert files(store) == []


# -- what was asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("small", [True, False])
def test_what_cannot_be_had_is_refused(small: bool, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(tuning, "SMALL", 0)
    monkeypatch.setattr(tuning, "_measured", no_measuring)
    target, draft = a_model(0), a_model(1, torch.float32)
    for dtype in ("int4", "int8"):
        for vocab_size in (None, 64):
            with pytest.raises(UnsupportedModel, match=f"no weights in {dtype[3:]} bits here.*leave draft_dtype out"):
                tune(target, draft, IDS, dtype=dtype, vocab_size=vocab_size)
    for dtype in ("auto", "bfloat16"):
        with pytest.raises(BadRequest, match="draft_vocab_size=64 is for weights in few bits, and there are none here"):
            tune(target, draft, IDS, dtype=dtype, vocab_size=64)
    if not native.tiles().why:
        with pytest.raises(BadRequest, match=r"draft_vocab_size=64 .*: draft_dtype is bfloat16"):
            tune(target, a_model(1), IDS, dtype="bfloat16", vocab_size=64)
    assert draft.few is None
    assert files(store) == []


@needs_tiles
@pytest.mark.parametrize("small", [True, False])
def test_ids_to_score_are_never_dropped_silently(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is best here, `vocab_size` is honoured or refused."""
    target, draft = a_model(0), a_model(1)
    if not small:
        machine = Machine(monkeypatch, target, draft)
        machine.seconds = {(bits, n): 0.1 if bits == 16 else 0.9 for bits, n in machine.seconds}
        assert machine.best() == (16, 1.0)
    try:
        tune(target, draft, IDS, vocab_size=64)
    except BadRequest:
        return
    assert draft.num_scored == 64


@needs_tiles
@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 16), ("int8", 8), ("int4", 4)])
def test_a_dtype_that_was_asked_for_is_taken(
    dtype: str, bits: int, pair: tuple[HFTarget, HFTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    machine = Machine(monkeypatch, target, draft)
    for other in (16, 8, 4):
        if other != bits:
            machine.seconds |= {(other, n): 0.01 for n in machine.sizes()}  # all others would be better
    found = tune(target, draft, IDS, dtype=dtype)
    assert found.variants[0].bits == bits
    assert (16 if draft.few is None else draft.few.bits) == bits
    assert draft.num_scored == int(VOCAB * machine.best([bits])[1]) // 16 * 16
    if bits != 16:
        tune(target, draft, IDS, dtype=dtype, vocab_size=48)
        assert (draft.few.bits, draft.num_scored) == (bits, 48)


# -- the choice --------------------------------------------------------------------------------------------------------


@needs_tiles
@pytest.mark.parametrize("seed", range(12))
def test_the_best_variant_is_chosen(
    seed: int, pair: tuple[HFTarget, HFTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    machine = Machine(monkeypatch, target, draft, seed)
    found = tune(target, draft, IDS)
    bits, share = machine.best()
    chosen = found.variants[0]
    assert (chosen.bits, chosen.vocab_size) == (bits, int(VOCAB * share))
    assert (16 if draft.few is None else draft.few.bits) == bits
    assert draft.num_scored == int(VOCAB * share) // 16 * 16
    assert target.few is None
    ways = {(v.bits, v.vocab_size): v for v in found.variants}
    assert set(ways) == {(16, VOCAB)} | {(bits, int(VOCAB * share)) for bits in (8, 4) for share in SHARES}
    assert len(found.variants) == len(ways)
    for (bits, scored), variant in ways.items():
        share = next(share for share in SHARES if int(VOCAB * share) == scored)
        assert variant.overlap == pytest.approx(machine.overlap(bits, share), abs=1e-6)
        assert variant.rate(found.costs) == pytest.approx(machine.rate(bits, share), rel=1e-6)
        # Passes of several tokens save what a single one saves by scoring fewer ids.
        one = 1 + 1 / 40
        full, cut = machine.seconds[bits, VOCAB] / one, machine.seconds[bits, scored // 16 * 16] / one
        assert [n for n, _ in variant.curve] == list(GUESSED_BY)
        for n, cost in variant.curve:
            assert cost == pytest.approx(max(0.0, full * (1 + (n - 1) / 30) - (full - cut)))
    assert found.costs.draft == chosen.curve
    assert found.costs.verify(1) == 1.0
    assert [cost for _, cost in found.costs.target] == pytest.approx([(1 + n / 40) / (1 + 1 / 40) for n in READ_BY])


@needs_tiles
@pytest.mark.parametrize(("faster", "bits"), [(1.0, 16), (0.99, 16), (0.5, 8)])
def test_among_equals_the_more_exact_one_is_chosen(
    faster: float, bits: int, pair: tuple[HFTarget, HFTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 bits guess a little worse: they are taken where they are faster by more than the noise of measuring."""
    target, draft = pair
    machine = Machine(monkeypatch, target, draft)
    machine.says[8] = machine.says[16] + 0.001 * machine.rng.normal(size=machine.says[16].shape)
    machine.seconds = {(b, n): {16: 0.2, 8: 0.2 * faster, 4: 0.9}[b] for b, n in machine.seconds}
    tune(target, draft, IDS)
    assert machine.best()[0] == bits
    assert (16 if draft.few is None else draft.few.bits) == bits


# -- the store ---------------------------------------------------------------------------------------------------------


@needs_tiles
def test_what_was_measured_is_read_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = a_model(0), a_model(1)
    machine = Machine(monkeypatch, target, draft, 3)
    first = tune(target, draft, IDS)
    (file,) = files(store)
    written = file.read_bytes()
    again_target, again = a_model(0), a_model(1)  # another process, so to speak
    monkeypatch.setattr(tuning, "_measured", no_measuring)
    assert tune(again_target, again, IDS) == first
    assert again.num_scored == draft.num_scored
    assert (again.few is None) == (draft.few is None)
    for dtype, bits in (("int8", 8), ("int4", 4), ("bfloat16", 16)):
        found = tune(again_target, a_model(1), IDS, dtype=dtype)
        assert found.variants[0].bits == bits
        assert set(found.variants) == set(first.variants)
        assert found.costs.target == first.costs.target
    assert files(store) == [file]
    assert file.read_bytes() == written
    assert machine.measured > 0


@needs_tiles
def test_other_models_and_other_threads_are_measured_by_themselves(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = a_model(0), a_model(1)
    Machine(monkeypatch, target, draft)
    tune(target, draft, IDS)
    other = a_model(2)
    Machine(monkeypatch, target, other)
    tune(target, other, IDS)
    assert len(files(store)) == 2
    torch.set_num_threads(2)
    tune(target, other, IDS)
    assert len(files(store)) == 3


def broken(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def made(text: str) -> str:
        held = json.loads(text)
        found = change(held)
        return json.dumps(held if found is None else found)

    return made


BROKEN: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut off": lambda text: text[: len(text) // 2],
    "no object": lambda text: "[1, 2]",
    "null": lambda text: "null",
    "no variants": broken(lambda held: held | {"variants": []}),
    "variants of another kind": broken(lambda held: held | {"variants": "int4"}),
    "a variant without its overlap": broken(lambda held: held["variants"][1].pop("overlap") and None),
    "a curve of words": broken(lambda held: held | {"target": [["one", "cheap"]]}),
    "a curve of numbers": broken(lambda held: held | {"target": [1, 2, 3]}),
    "a curve without points": broken(lambda held: held | {"target": []}),
    "no costs": broken(lambda held: held.pop("target") and None),
    "no cost of reading": broken(lambda held: held | {"reading": None}),
}


@needs_tiles
@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_file_is_measured_anew(
    how: str, pair: tuple[HFTarget, HFTarget], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    machine = Machine(monkeypatch, target, draft)
    first = tune(target, draft, IDS)
    (file,) = files(store)
    file.write_text(BROKEN[how](file.read_text()))
    before = machine.measured
    second = tune(target, draft, IDS)
    assert machine.measured == 2 * before
    assert second.variants == first.variants
    assert files(store) == [file]
    monkeypatch.setattr(tuning, "_measured", no_measuring)
    assert tune(target, draft, IDS) == second


@needs_tiles
def test_bytes_that_are_no_text_are_measured_anew(
    pair: tuple[HFTarget, HFTarget], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, *pair)
    tune(*pair, IDS)
    files(store)[0].write_bytes(b"\xff\xfe\x00")
    before = machine.measured
    assert isinstance(tune(*pair, IDS), Tuning)
    assert machine.measured == 2 * before


@needs_tiles
def test_a_folder_that_cannot_be_written_costs_the_store_only(
    pair: tuple[HFTarget, HFTarget], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that cannot be kept are as good for this process."""
    Machine(monkeypatch, *pair)
    store.parent.mkdir()
    store.write_text("a file where the folder should be")
    assert isinstance(tune(*pair, IDS), Tuning)


@needs_tiles
def test_weights_in_few_bits_may_become_possible_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured on a machine without a compiler, read with one; models whose kernel is the same either way."""
    target, draft = a_model(0, vocab_size=VOCAB + 8), a_model(1, vocab_size=VOCAB + 8)
    monkeypatch.setattr(tuning, "SMALL", 0)
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "why_not", lambda model: "no compiler")
        found = tune(target, draft, IDS)
        assert [variant.bits for variant in found.variants] == [16]
    assert tune(target, draft, IDS, dtype="int8").variants[0].bits == 8
    assert draft.few.bits == 8


# -- measuring ---------------------------------------------------------------------------------------------------------


@needs_tiles
@pytest.mark.parametrize("vocab_size", [VOCAB, VOCAB + 8], ids=["whole blocks of ids", "a block begun"])
def test_measuring_runs_on_any_vocabulary(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing: whatever passes take, costs are numbers, never fall, and overlaps are shares."""
    monkeypatch.setattr(tuning, "SMALL", 0)
    target, draft = a_model(0, vocab_size=vocab_size), a_model(1, vocab_size=vocab_size)
    found = tune(target, draft, IDS)
    assert len(found.variants) == 1 + 2 * len(SHARES)
    for variant in found.variants:
        assert 0 < variant.overlap < 1
        costs = [cost for _, cost in variant.curve]
        assert costs == sorted(costs)
        assert costs[0] >= 0
    assert found.costs.target[0] == (1, 1.0)
    assert all(math.isfinite(cost) for _, cost in found.costs.target)
    assert found.costs.reading > 0
    # The same model is its own best draft: what few bits lose is small.
    twin = tune(target, a_model(0, vocab_size=vocab_size), IDS, dtype="int8")
    whole, *cut = sorted((v for v in twin.variants if v.bits == 8), key=lambda v: -v.vocab_size)
    assert whole.overlap > 0.95
    assert next(v for v in twin.variants if v.bits == 16).overlap > 0.999
    for variant, share in zip(cut, SHARES[1:], strict=True):
        assert variant.vocab_size == int(vocab_size * share)
        assert abs(variant.overlap - share) < 0.2  # the law of a random model lies evenly on its ids


@pytest.mark.parametrize("width", [1, 5, 16, 30])
def test_logits_are_those_after_each_token(width: int) -> None:
    ids = oracles.prompt_of(30)
    found = tuning._logits(oracles.target("llama"), ids, width)
    assert found.shape == (30, oracles.VOCAB)
    said = oracles.logits_of(oracles.plain("llama"), ids)
    torch.testing.assert_close(found.double(), said, rtol=0, atol=1e-4)


def test_times_are_medians_in_turns_and_never_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves when the model runs: by the width, by the turn, and far too much in the first turn."""
    model, now, read = HFTarget(oracles.tiny("llama")), [0.0], []
    seconds = {1: [9.0, 1, 5, 2, 3, 4], 4: [9.0, 2, 2, 2, 2, 2], 8: [9.0, 4, 4, 100, 7, 0]}
    plain = model.forward

    def forward(tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        width = tokens.shape[1]
        read.append(width)
        if width in seconds:
            now[0] += seconds[width].pop(0)
        return plain(tokens, *args, **kwargs)

    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr(tuning, "perf_counter", lambda: now[0])
    assert tuning._timed(model, oracles.prompt_of(12), (1, 4, 8)) == [(1, 3.0), (4, 3.0), (8, 4.0)]
    assert read == [12, *([1, 4, 8] * 6)]


def test_the_rate_of_a_variant_by_hand() -> None:
    """At depth 1: 1.5 tokens for 1.1 + 0.5; at depth 2: 1.75 tokens for 1.2 + 1: never more than without a draft."""
    costs = Costs(target=((1, 1.0), (11, 2.0)))
    assert tuning.Variant(4, 10, 0.5, ((1, 0.5),)).rate(costs) == 1.0
    assert tuning.Variant(4, 10, 0.5, ((1, 0.1),)).rate(costs) == pytest.approx(1.75 / 1.4)
    assert tuning.Variant(4, 10, 1.0, ((1, 0.0),)).rate(costs) == pytest.approx(17 / 2.6)
