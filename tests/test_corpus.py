"""Corpora: order and look-up against a search of the documents, files that are no corpus, and what `suffix` gains."""

import itertools
import json
import mmap
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase
from typer.testing import CliRunner, Result

from paceline import LLM, SamplingParams
from paceline.cli import app
from paceline.draft import SpeculativeConfig
from paceline.draft import corpus as corpora
from paceline.draft import corpus_build as builder
from paceline.draft.base import Ask, Step
from paceline.draft.corpus import AHEAD, DEPTH, LEVELS, SAMPLES, About, Continuations, Corpus, fingerprint
from paceline.draft.corpus_build import build, find_files, write
from paceline.draft.costs import Costs
from paceline.draft.suffix import CORPUS_HITS, CORPUS_LATER_HITS, HITS, Suffix, Text
from paceline.errors import BadRequest, IncompatibleDrafter, PacelineError
from paceline.sampling import Draws
from paceline.testing import check_drafter
from paceline.tree import TokenTree

FREE = Costs(target=((1, 1.0),))
Documents = Sequence[Sequence[int]]


def pieces_of(documents: Documents, border: int) -> list[np.ndarray]:
    return [np.array([*document, border], dtype=np.int64) for document in documents]


def about(border: int) -> Any:
    return lambda tokens, documents: About("toy", "0" * 64, border, tokens, documents)


def made(folder: Path, documents: Documents, border: int = 100) -> Corpus:
    """A corpus of documents given as ids."""
    path = folder / "toy.corpus"
    write(path, pieces_of(documents, border), border, about(border))
    return Corpus(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that property tests write to again and again."""
    return tmp_path_factory.mktemp("corpora")


@pytest.fixture(autouse=True, scope="module")
def _hasty() -> Iterator[None]:
    """Nobody pulls the plug here, and waiting for the disk takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


def behind(documents: Documents, string: Sequence[int]) -> list[list[int]]:
    """By search: what follows each place where a string ends inside of a document."""
    n, string = len(string), list(string)
    return [
        list(document[end:])
        for document in documents
        for end in range(n, len(document))
        if list(document[end - n : end]) == string
    ]


def first_tokens(rows: Iterable[Sequence[int]]) -> Counter[int]:
    return Counter(row[0] for row in rows if row)


DOCUMENTS = st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=6).filter(lambda found: any(found))
TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=24)
"""3 is the number of the border, and no token of the documents."""

# -- the order ---------------------------------------------------------------------------------------------------------


def expected_order(documents: Documents, border: int) -> list[int]:
    """Places of the joined text by the tokens before them, in plain Python."""
    joined = [border] * DEPTH
    for document in documents:
        joined += [*document, border]
    places = [p for p in range(1, len(joined)) if joined[p] != border and joined[p - 1] != border]
    return sorted(places, key=lambda p: (joined[p - DEPTH : p][::-1], p))


def check_order(folder: Path, documents: Documents, border: int, part: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "PART", part)
        patch.setattr(builder, "BLOCK", block)
        corpus = made(folder, documents, border)
    assert corpus.order.tolist() == expected_order(documents, border)
    firsts = Counter(corpus._before(place)[0] for place in corpus.order)
    starts = corpus.starts.tolist()
    assert [b - a for a, b in itertools.pairwise(starts)] == [firsts[token] for token in range(border)]
    assert corpus.tokens.dtype == (np.uint16 if border < 65536 else np.uint32)
    assert corpus.about.num_tokens == sum(map(len, documents))
    assert corpus.about.num_documents == sum(map(bool, documents))


@pytest.mark.usefixtures("unchecked")
@given(documents=DOCUMENTS, part=st.sampled_from([1, 2, 7, 1000]), block=st.sampled_from([1, 5, 1000]))
def test_places_are_sorted_by_what_stands_before_them(
    folder: Path, documents: list[list[int]], part: int, block: int
) -> None:
    check_order(folder, documents, 3, part, block)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("border", [3, 65535, 65536, 151_665])
@pytest.mark.parametrize("part", [16, 150, 1 << 24])
def test_order_of_long_repeats_and_large_vocabularies(tmp_path: Path, border: int, part: int) -> None:
    chance = random.Random(border)
    ids = [0, 1, border - 1]
    line = [chance.choice(ids) for _ in range(40)]
    documents = [[1] * 60, line + line, [border - 1, 0] * 30, [chance.choice(ids) for _ in range(150)], [2 % border]]
    check_order(tmp_path, documents, border, part, 64)


def test_the_order_does_not_depend_on_how_the_text_comes(tmp_path: Path) -> None:
    documents = [[1, 2, 3, 1, 2], [2, 3, 1], []]
    whole = np.concatenate(pieces_of(documents, 9))
    made(tmp_path, documents, 9)
    for cut in (1, 2, 5):
        again = tmp_path / "again.corpus"
        write(again, [whole[i : i + cut] for i in range(0, len(whole), cut)], 9, about(9))
        assert again.read_bytes() == (tmp_path / "toy.corpus").read_bytes()


# -- look-ups ----------------------------------------------------------------------------------------------------------


def expected_levels(documents: Documents, text: Sequence[int]) -> list[tuple[int, int]]:
    """(tokens, occurrences) of the suffixes that are to be looked at, by search."""
    found: list[tuple[int, int]] = []
    for n in range(min(DEPTH, len(text)), 0, -1):
        count = len(behind(documents, text[-n:]))
        if count and (not found or count >= 2 * found[-1][1]) and len(found) < LEVELS:
            found.append((n, count))
    return found


@pytest.mark.usefixtures("unchecked")
@given(documents=DOCUMENTS, text=TEXT)
def test_the_longest_match_and_shorter_ones_against_a_search(
    folder: Path, documents: list[list[int]], text: list[int]
) -> None:
    corpus = made(folder, documents, 3)
    found = corpus.matches(text)
    assert [(n, high - low) for n, low, high in found] == expected_levels(documents, text)
    for n, low, high in found:
        rows = corpus._behind(low, high)
        assert sorted(rows) == sorted(row[:AHEAD] for row in behind(documents, text[-n:]))


@pytest.mark.usefixtures("unchecked")
@given(documents=DOCUMENTS, text=TEXT, path=st.lists(st.integers(0, 2), max_size=5), most=st.integers(1, 8))
def test_walking_on_behind_a_match_against_a_search(
    folder: Path, documents: list[list[int]], text: list[int], path: list[int], most: int
) -> None:
    """Every occurrence is read here, so counts are exact for each of the lengths that are looked at."""
    found = made(folder, documents, 3).find(text)
    levels = [n for n, _ in expected_levels(documents, text)]
    state, length = found.match()
    for walked in range(len(path) + 1):
        strings = [[*text[-n:], *path[:walked]] for n in levels]
        known = [string for string in strings if occurs(documents, string)]
        chain, at = [], state
        while at > 0:
            chain.append((found.length[at], Counter(dict(found.followers(at, 99)))))
            at = found.link[at]
        assert chain == [(len(string), first_tokens(behind(documents, string))) for string in known]
        assert length == (len(known[0]) if known else 0)
        counts = [count for _, count in found.followers(state, 99)]
        assert counts == sorted(counts, reverse=True)
        if known:
            cut, kept = found.shorten(state, length, most)
            assert kept == min(length, most)
            assert found.length[found.link[cut]] < kept or found.length[found.link[state]] >= kept
        if walked < len(path):
            state, length = found.step(state, length, path[walked])


def occurs(documents: Documents, string: Sequence[int]) -> bool:
    n = len(string)
    return any(
        list(document[end - n : end]) == list(string) for document in documents for end in range(n, len(document) + 1)
    )


def test_a_match_of_many_occurrences_is_sampled_evenly(tmp_path: Path) -> None:
    """5 follows nine times as often as 6: so it does among those that are read, wherever in the order they stand."""
    documents = [[i + 10, 1, 2, 6 if i < 50 else 5, 7] for i in range(500)]
    corpus = made(tmp_path, documents, 1000)
    ((length, low, high),) = corpus.matches([1, 2])[:1]
    assert (length, high - low) == (2, 500)
    found = corpus.find([999, 1, 2])
    counts = dict(found.followers(found.match()[0], 9))
    assert sum(counts.values()) == SAMPLES
    assert counts[5] > 0.8 * SAMPLES
    assert 0 < counts[6] < 0.2 * SAMPLES


def test_no_more_than_what_is_asked_for_is_read(tmp_path: Path) -> None:
    corpus = made(tmp_path, [list(range(90))], 100)
    assert [len(row) for row in corpus._behind(0, 3)] == [AHEAD] * 3
    assert len(corpus.matches(list(range(40)))[0:1]) == 1
    assert corpus.matches(list(range(40)))[0][0] == DEPTH
    assert corpus.matches([]) == corpus.matches([95]) == corpus.matches([100]) == corpus.matches([-1]) == []
    assert corpus.matches([89]) == []  # nothing follows the last token of a document
    nothing = corpus.find([95])
    assert nothing.match() == (0, 0)
    assert nothing.step(0, 0, 5) == (0, 0)
    assert nothing.followers(0, 5) == []


# -- files that are no corpus ------------------------------------------------------------------------------------------


def refused(path: Path) -> str:
    with pytest.raises(BadRequest) as error:
        Corpus(path)
    assert repr(str(path)) in str(error.value)
    return str(error.value)


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "missing.corpus")
    assert "Is a directory" in refused(tmp_path)
    other = tmp_path / "other"
    for content in (b"", b"PaceCorp", b"def main(): ...\n" * 99, bytes(500)):
        other.write_bytes(content)
        assert "is no corpus; make one with: paceline corpus build" in refused(other)


def test_other_versions_are_refused(tmp_path: Path) -> None:
    path = made(tmp_path, [[1, 2, 3]]).path
    content = bytearray(path.read_bytes())
    content[8] = 7
    path.write_bytes(content)
    assert "is of version 7; this one reads version 1" in refused(path)


def test_a_file_that_was_cut_is_refused_wherever(tmp_path: Path) -> None:
    whole = made(tmp_path, [[1, 2, 3] * 20, [4] * 9]).path.read_bytes()
    path = tmp_path / "cut.corpus"
    for size in (*range(130), *range(130, len(whole), 7), len(whole) - 1):
        path.write_bytes(whole[:size])
        message = refused(path)
        assert "is no corpus" in message or f"it has {size} bytes and should have {len(whole)}" in message
    path.write_bytes(whole + b"x")
    assert "is damaged" in refused(path)


def with_header(path: Path, change: Any) -> None:
    """The same file with a changed header."""
    content = path.read_bytes()
    _, _, begin, size = corpora.PREAMBLE.unpack(content[: corpora.PREAMBLE.size])
    header = change(json.loads(content[begin : begin + size]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(corpora.preamble(begin, len(text)) + content[corpora.PREAMBLE.size : begin] + text)


def test_the_header_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = made(tmp_path, [[1, 2, 3]]).path
    before = path.read_bytes()
    with_header(path, lambda header: header)
    assert path.read_bytes() == before


def put(name: str, value: Any) -> Any:
    return lambda header: header | {name: value}


def tell(name: str, value: Any) -> Any:
    return lambda header: header | {"about": header["about"] | {name: value}}


@pytest.mark.parametrize(
    "change",
    [
        lambda header: b"{",
        lambda header: b"\xff\xff",
        lambda header: b"[" * 100_000,
        lambda header: [],
        lambda header: {},
        put("tokens", [0, 1 << 40, "uint16"]),
        put("tokens", [64, 1 << 62, "uint16"]),
        put("tokens", [-64, 20, "uint16"]),
        put("tokens", [1, 20, "uint16"]),
        put("tokens", [64, 20.0, "uint16"]),
        put("tokens", [64, True, "uint16"]),
        put("tokens", [64, 20]),
        put("tokens", [64, 3, "uint16"]),
        put("tokens", [64, 0, "uint16"]),
        put("tokens", [64, 20, "float64"]),
        put("tokens", [64, 20, "object"]),
        put("tokens", None),
        put("order", [64, 10_000, "uint32"]),
        put("order", [64, 90, "uint16"]),
        put("starts", [64, 3, "uint32"]),
        tell("vocab_size", 1 << 70),
        tell("vocab_size", -1),
        tell("vocab_size", "many"),
        tell("vocab_size", None),
        tell("num_tokens", "7"),
        tell("fingerprint", 5),
        tell("colour", "red"),
        put("about", None),
        put("about", {}),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, change: Any) -> None:
    path = made(tmp_path, [[1, 2, 3, 4]]).path
    with_header(path, change)
    assert "is damaged" in refused(path)


@pytest.mark.usefixtures("unchecked")
@given(seed=st.integers(0, 10_000))
def test_damaged_numbers_lead_to_no_nonsense(folder: Path, seed: int) -> None:
    """Any bytes may stand where tokens, order and starts were: what is drafted are still ids."""
    chance = random.Random(seed)
    corpus = made(folder, [[chance.randrange(40) for _ in range(60)]], chance.choice([40, 70_000]))
    content = bytearray(corpus.path.read_bytes())
    end = corpora.PREAMBLE.unpack(content[: corpora.PREAMBLE.size])[2]
    for _ in range(chance.choice([1, 50, 2000])):
        content[chance.randrange(64, end)] = chance.choice([0, 1, 255, chance.randrange(256)])
    damaged = folder / "damaged.corpus"
    damaged.write_bytes(content)
    drafter = Suffix(corpus=damaged, costs=FREE)
    for _ in range(3):
        text = [chance.randrange(40) for _ in range(12)]
        tree = drafted(drafter, text, 60)
        assert all(0 <= token < corpus.about.vocab_size for token in tree.ids)


# -- what suffix makes of it -------------------------------------------------------------------------------------------


def ask(pending: int, budget: int = 23, depth: int = 23) -> Ask:
    return Ask(pending, 0, budget, depth, lambda logits, path: logits, lambda *_: [], Draws(0))


def begun(drafter: Suffix, ids: Sequence[int]) -> Text:
    return drafter.begin(Step(list(ids[:-1]), list(ids[1:])))


def drafted(drafter: Suffix, ids: Sequence[int], budget: int = 23, depth: int = 23) -> TokenTree:
    (tree,) = drafter.propose([begun(drafter, ids)], [ask(ids[-1], budget, depth)])
    return tree


def tokens_per_pass(drafter: Suffix, prompt: Sequence[int], text: Sequence[int]) -> float:
    """What a target that writes `text` needs."""
    state, position, passes = begun(drafter, prompt), 0, 0
    whole = [*prompt, *text]
    at = len(prompt) - 1
    while at < len(whole) - 1:
        left = len(whole) - 1 - at
        (tree,) = drafter.propose([state], [ask(whole[at], 23, max(0, left - 1))])
        node, kept = 0, 0
        while found := [n for n in tree.children[node] if tree.ids[n] == whole[at + kept + 1]]:
            node, kept = found[0], kept + 1
            if kept + 1 >= left:
                break
        drafter.observe([state], [Step(whole[at : at + kept + 1], whole[at + 1 : at + kept + 2])])
        at += kept + 1
        passes += 1
    assert position == 0
    return len(text) / passes


def test_a_text_that_continues_a_document_is_drafted_from_it(tmp_path: Path) -> None:
    chance = random.Random(5)
    documents = [chance.sample(range(5000), 400) for _ in range(10)]
    corpus = made(tmp_path, documents, 5000)
    prompt, text = documents[3][:20], documents[3][20:]
    with_corpus, without = (tokens_per_pass(Suffix(corpus=one), prompt, text) for one in (corpus, None))
    assert without < 1.1
    assert with_corpus > 15
    assert tokens_per_pass(Suffix(corpus=tmp_path / "toy.corpus"), prompt, text) == with_corpus


def test_nothing_is_drafted_across_documents(tmp_path: Path) -> None:
    corpus = made(tmp_path, [[1, 2, 3], [4, 5, 6], [7]], 10)
    drafter = Suffix(corpus=corpus, min_score=1e-6, costs=FREE)
    assert drafted(drafter, [9, 1, 2], 200).ids == [2, 3]
    assert drafted(drafter, [9, 2, 3], 200).ids == [3]
    assert drafted(drafter, [3, 4], 200).ids == [4, 5, 6]
    assert drafted(drafter, [6, 7], 200).ids == [7]


def test_the_most_frequent_continuation_comes_first(tmp_path: Path) -> None:
    documents = [[i, 1, 2, third, fourth] for i, (third, fourth) in enumerate([(3, 5), (4, 6), (4, 6), (4, 7)], 10)]
    tree = drafted(Suffix(corpus=made(tmp_path, documents), min_score=1e-3, costs=FREE), [50, 1, 2], 200, 2)
    paths = {tuple(tree.ids[n] for n in tree.path(node)[1:]): node for node in range(1, tree.num_nodes)}
    assert next(iter(paths)) == (4,)
    assert set(paths) == {(4,), (3,), (4, 6), (4, 7), (3, 5)}
    assert tree.score is not None
    score = {path: float(tree.score[node]) for path, node in paths.items()}
    assert score[4,] == pytest.approx(3 * score[3,])
    assert score[4, 6] == pytest.approx(2 * score[4, 7])


def test_the_surer_match_goes_first(tmp_path: Path) -> None:
    """What a corpus knows is somebody else's: a longer match in it is as good as a shorter one in the own text."""
    corpus = made(tmp_path, [[*range(20, 28), 1, 2, 50, 51]])
    own = [1, 2, 60, 61, 9]
    assert drafted(Suffix(corpus=corpus), [*own, 1, 2]).ids[1] == 60
    assert drafted(Suffix(corpus=corpus), [*own, 27, 1, 2]).ids[1] == 60
    assert drafted(Suffix(corpus=corpus), [2, 60, *range(20, 28), 1, 2]).ids[1] == 50
    assert drafted(Suffix(corpus=corpus, max_depth=2), [2, 60, *range(20, 28), 1, 2]).ids[1] == 60  # two tokens count
    for ids in ([*own, 1, 2], [*own, 27, 1, 2]):
        (tree,) = [drafted(Suffix(corpus=corpus, min_score=1e-4, costs=FREE), ids, 200)]
        assert {tree.ids[node] for node in tree.children[0]} == {60, 50}  # the other one stands beside it


@pytest.mark.parametrize(
    ("followers", "kind"),
    [([5], 0), ([5, 5, 5, 6], 0), ([5, 5, 5, 6, 7], 1), ([5, 5, 5, 6, 6, 6], 1), ([5, 5, 6, 6, 7], 2)],
)
def test_scores_by_hand(tmp_path: Path, followers: list[int], kind: int) -> None:
    """Chances are those of the match's length and of how often its followers were seen, shared by their counts."""
    corpus = made(tmp_path, [[10 + i, 1, 2, 3, token] for i, token in enumerate(followers)])
    tree = drafted(Suffix(corpus=corpus, min_score=1e-3, costs=FREE), [99, 1, 2, 3], 200, 1)
    assert tree.score is not None
    found = {tree.ids[node]: float(tree.score[node]) for node in range(1, tree.num_nodes)}
    hit = CORPUS_HITS[2][kind]
    assert found == pytest.approx({token: hit * n / len(followers) for token, n in Counter(followers).items()})


def test_what_the_own_text_leaves_over_goes_to_the_corpus(tmp_path: Path) -> None:
    corpus = made(tmp_path, [[7, 1, 2, 50], [8, 1, 2, 60], [9, 1, 2, 50]])
    tree = drafted(Suffix(corpus=corpus, min_score=1e-4, costs=FREE), [1, 2, 60, 5, 1, 2], 200, 1)
    assert tree.score is not None
    found = {tree.ids[node]: float(tree.score[node]) for node in range(1, tree.num_nodes)}
    own = HITS[1][0]  # two tokens, seen once
    assert found == pytest.approx({60: own, 50: (1 - own) * CORPUS_LATER_HITS[1][0]})  # 60 was there already


def test_an_own_draft_is_followed_into_the_corpus_and_both_stand_side_by_side(tmp_path: Path) -> None:
    drafter = Suffix(corpus=made(tmp_path, [[1, 2, 3, 50]]), min_score=1e-4, costs=FREE)
    tree = drafted(drafter, [2, 60, 61, 9, 1, 2], 200, 2)
    assert {3, 60} <= {tree.ids[node] for node in tree.children[0]}


def test_what_is_ahead_knows_the_corpus(tmp_path: Path) -> None:
    drafter = Suffix(corpus=made(tmp_path, [list(range(10, 40))]))
    state = begun(drafter, [7, 10, 11, 12])
    assert [token for token, _ in drafter.ahead(state, 12, [], 5)] == [13, 14, 15, 16, 17]
    assert [token for token, _ in drafter.ahead(state, 12, [13, 14], 2)] == [15, 16]
    assert drafter.ahead(state, 12, [30], 2) == []
    drafter.observe([state], [Step([12, 13], [13, 14])])  # the text went on, and so does what is looked up
    assert [token for token, _ in drafter.ahead(state, 14, [], 2)] == [15, 16]


@pytest.mark.usefixtures("unchecked")
def test_luck_with_the_corpus_is_learnt_apart_from_the_own_text(tmp_path: Path) -> None:
    drafter = Suffix(corpus=made(tmp_path, [[100 + i, 200 + i, 300 + i] for i in range(40)], 1000))
    text, fresh = begun(drafter, [1, 100]), begun(drafter, [1, 100])
    before = list(text.tests)
    for i in range(12):
        drafter.propose([text], [ask(text.ids[-1])])
        drafter.observe([text], [Step([text.ids[-1], 500 + i], [500 + i, 101 + i])])
    half = len(before) // 2
    assert text.tests[:half] == before[:half]
    assert text.tests[half:] != before[half:]
    scores = []
    for state in (text, fresh):
        (tree,) = drafter.propose([state], [ask(state.ids[-1])])
        assert tree.score is not None
        scores.append(float(tree.score[1]))
    assert scores[0] < 0.6 * scores[1]


def test_ids_that_a_target_does_not_have_are_not_proposed(tmp_path: Path) -> None:
    drafter = Suffix(corpus=made(tmp_path, [[1, 2, 3, 90, 4]]))
    assert drafted(drafter, [1, 2, 3]).ids[1] == 90
    drafter.bind(type("Target", (), {"vocab_size": 50})())
    assert drafted(drafter, [1, 2, 3]).ids == [3]


@pytest.mark.usefixtures("unchecked")
def test_the_contract_of_drafters_holds(tmp_path: Path) -> None:
    chance = random.Random(1)
    corpus = made(tmp_path, [[chance.randrange(7) for _ in range(300)] for _ in range(3)], 7)
    check_drafter(Suffix(corpus=corpus)).verify()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("corpus", [5, True, ["a"], b"a"])
def test_impossible_settings_are_refused(corpus: Any) -> None:
    with pytest.raises(BadRequest, match=r"corpus=.* was given; the path of a corpus file"):
        Suffix(corpus=corpus)
    with pytest.raises(BadRequest, match=r"corpus=.* was given; the path of a corpus file"):
        SpeculativeConfig(method="suffix", corpus=corpus)


def test_the_key_reaches_suffix_and_nobody_else(tmp_path: Path) -> None:
    corpus = made(tmp_path, [[1, 2, 3]])
    for config in ({}, {"method": "suffix"}, {"method": "compose", "drafters": ["ngram", "suffix"]}):
        for value in (corpus, corpus.path, str(corpus.path)):
            drafter: Any = SpeculativeConfig.read(config | {"corpus": value}).drafter()
            members = getattr(drafter, "drafters", [drafter])
            (found,) = [one.corpus for one in members if isinstance(one, Suffix)]
            assert found is corpus if value is corpus else found.path == corpus.path
    with pytest.raises(BadRequest, match="corpus is for method 'suffix'; the method is 'ngram'"):
        SpeculativeConfig.read({"method": "ngram", "corpus": str(corpus.path)})
    with pytest.raises(BadRequest, match="No such file"):  # before any model is loaded
        SpeculativeConfig.read({"corpus": str(tmp_path / "no")})


# -- memory ------------------------------------------------------------------------------------------------------------


def root_of(array: Any) -> Any:
    """What an array's memory belongs to."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array.obj if isinstance(array, memoryview) else array


def test_a_corpus_lies_in_its_file(tmp_path: Path) -> None:
    corpus = made(tmp_path, [[1, 2, 3]])
    for part in (corpus.tokens, corpus.order, corpus.starts):
        assert type(part) is np.ndarray
        assert not part.flags.owndata
        assert not part.flags.writeable
        assert isinstance(root_of(part), mmap.mmap)


def test_opening_reads_no_more_than_the_header(tmp_path: Path) -> None:
    """A file of a terabyte, most of it a hole, is open at once, and look-ups in it work."""
    path = made(tmp_path, [[1, 2, 3, 1, 2, 4]]).path
    content = path.read_bytes()
    _, _, begin, size = corpora.PREAMBLE.unpack(content[: corpora.PREAMBLE.size])
    header = json.loads(content[begin : begin + size])
    offset, _, kind = header["tokens"]
    hole = 1 << 40
    with path.open("r+b") as file:
        for name in ("order", "starts"):
            old, count, wide = header[name]
            header[name] = [old + hole, count, wide]
            file.seek(old + hole)
            file.write(content[old : old + count * np.dtype(wide).itemsize])
        header["tokens"] = [offset, hole // 4, kind]
        text = json.dumps(header).encode()
        file.seek(begin + hole)
        file.write(text)
        file.seek(0)
        file.write(corpora.preamble(begin + hole, len(text)))
    corpus = Corpus(path)
    assert corpus.num_bytes > hole
    assert drafted(Suffix(corpus=corpus), [9, 2, 3, 1]).ids[1] == 2


# -- building ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def texts_of(corpus: Corpus, tokenizer: Any) -> list[str]:
    """The documents of a corpus as text, in their order."""
    found, ids = [], list[int]()
    for token in corpus.tokens.tolist()[DEPTH:]:
        if token == corpus.about.vocab_size:
            if ids:
                found.append(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            ids = []
        else:
            ids.append(token)
    return found


def test_every_file_is_a_document(tmp_path: Path, tokenizer: Any) -> None:
    words = {"a.py": "def add(a, b):\n    return a + b\n", "b.txt": "  grün\r\n\n\tand more…", "c/d.md": "over the dog"}
    for name, text in words.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    told: list[int] = []
    files = find_files([tmp_path / "in"])
    corpus = build(files, tokenizer, tmp_path / "x.corpus", name="tiny", tick=told.append)
    assert texts_of(corpus, tokenizer) == list(words.values())
    sizes = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in words.values()]
    total = sum(len(text.encode()) for text in words.values())
    expected = About("tiny", fingerprint(tokenizer), len(tokenizer), sum(sizes), 3, 0, total)
    assert corpus.about == expected
    assert told == sorted(told)
    assert told[-1] == files.num_bytes == total


def test_which_files_are_found(tmp_path: Path, tokenizer: Any) -> None:
    contents = {
        "b.txt": b"bee",
        "a/z.txt": b"zed",
        "a/empty.txt": b"",
        "a/latin.txt": "gr\u00fcn".encode("latin-1"),
        "a/zeros.bin": b"text\0text",
        "a/cut.txt": "grü".encode()[:-1],
        "a/.hidden.txt": b"hidden",
        ".git/config": b"hidden too",
        "a.txt": b"\xef\xbb\xbfmarked",
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "a" / "again.txt").hardlink_to(tmp_path / "b.txt")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "a" / "nowhere").symlink_to(tmp_path / "missing")
    os.mkfifo(tmp_path / "a" / "pipe")
    files = find_files([tmp_path / "b.txt", tmp_path])
    names = [str(path.relative_to(tmp_path)) for path in files.paths]
    assert names == ["b.txt", "a.txt", "a/cut.txt", "a/empty.txt", "a/latin.txt", "a/z.txt", "a/zeros.bin"]
    corpus = build(files, tokenizer, tmp_path / "x.corpus", name="tiny")
    assert texts_of(corpus, tokenizer) == ["bee", "marked", "zed"]
    assert corpus.about.num_documents == 3
    assert corpus.about.num_skipped == 3
    assert [path.name for path in find_files([tmp_path / "a" / ".hidden.txt"]).paths] == [".hidden.txt"]  # it was named


@pytest.mark.parametrize("piece", [1, 7, 40])
def test_long_files_are_read_in_pieces(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(builder, "PIECE", piece)
    monkeypatch.setattr(builder, "BATCH", 90)
    texts = ["def add(a, b):\n    return a + b\n\n\ndef ü():\n  pass\r\n" * 9, "fox" * 50, "x"]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_bytes(text.encode())
    corpus = build(find_files([tmp_path]), tokenizer, tmp_path / "x.corpus", name="tiny")
    assert texts_of(corpus, tokenizer) == texts
    if piece == 40:  # cut between lines, nothing is encoded otherwise than in one piece
        assert corpus.about.num_tokens < 1.2 * sum(len(tokenizer(t).input_ids) for t in texts)


def test_lines_are_cut_where_tokens_end() -> None:
    assert builder._cut("one\n  two\nthree\n  four\n") == len("one\n  two\n")
    assert builder._cut("one two") == 7
    assert builder._cut("\n\n\n") == 3
    assert builder._cut("a\nb") == 2
    assert builder._cut("x") == 1


def special_text(tokenizer: Any) -> str:
    return "".join(f"one {token} two{token}{token}" for token in tokenizer.all_special_tokens)


def test_special_tokens_in_a_text_are_text(tmp_path: Path, tokenizer: Any) -> None:
    text = special_text(tokenizer)
    (tmp_path / "a.txt").write_text(text)
    corpus = build(find_files([tmp_path]), tokenizer, tmp_path / "x.corpus", name="tiny")
    assert not set(corpus.tokens.tolist()) & set(tokenizer.all_special_ids)
    assert texts_of(corpus, tokenizer) == [text]
    assert set(tokenizer(text).input_ids) & set(tokenizer.all_special_ids)  # so it was worth a test


def test_the_callers_tokenizer_stays_as_it_was_and_cuts_nothing(tmp_path: Path, tiny_model: Path) -> None:
    own: Any = AutoTokenizer.from_pretrained(tiny_model)
    own.backend_tokenizer.enable_truncation(5)
    own.backend_tokenizer.enable_padding(length=5)
    before = own.backend_tokenizer.to_str()
    (tmp_path / "a.txt").write_text("the quick brown fox\n" * 5)
    (tmp_path / "b.txt").write_text("a")
    corpus = build(find_files([tmp_path]), own, tmp_path / "x.corpus", name="tiny")
    assert texts_of(corpus, own) == ["the quick brown fox\n" * 5, "a"]
    assert own.backend_tokenizer.to_str() == before
    assert not own.backend_tokenizer.encode_special_tokens


class Stubborn(ByT5Tokenizer):
    """A tokenizer that sees special tokens wherever they are spelt."""

    def __call__(self, *args: Any, split_special_tokens: bool = False, **options: Any) -> Any:
        return super().__call__(*args, **options)


def test_slow_tokenizers_and_one_that_sees_special_tokens_everywhere(tmp_path: Path) -> None:
    text = "plain <pad> text</s>!"
    (tmp_path / "a.txt").write_text(text)
    for slow, documents in ((ByT5Tokenizer(), [text]), (Stubborn(), ["plain ", " text", "!"])):
        assert getattr(slow, "backend_tokenizer", None) is None
        corpus = build(find_files([tmp_path / "a.txt"]), slow, tmp_path / "x.corpus", name="bytes")
        assert not set(corpus.tokens.tolist()) & set(slow.all_special_ids)
        assert [part.strip() for part in texts_of(corpus, slow)] == [part.strip() for part in documents]
        assert corpus.about.fingerprint == fingerprint(ByT5Tokenizer())


def test_texts_without_a_token_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(BadRequest, match="there is no file or folder"):
        find_files([tmp_path / "missing"])
    with pytest.raises(BadRequest, match="no file is there"):
        find_files([tmp_path])
    with pytest.raises(BadRequest, match="no file is there"):
        find_files([])
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    output = tmp_path / "x.corpus"
    with pytest.raises(BadRequest, match="2 files were given, and none holds text in UTF-8"):
        build(find_files([tmp_path]), tokenizer, output, name="tiny")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["binary", "empty.txt"]


def test_a_file_that_is_no_corpus_is_not_replaced(tmp_path: Path) -> None:
    notes, corpus = tmp_path / "notes.md", made(tmp_path, [[1, 2, 3]])
    notes.write_text("irreplaceable")
    with pytest.raises(BadRequest, match=r"notes.md.* exists and is no corpus, so it is not replaced"):
        builder.check_output(notes)
    assert notes.read_text() == "irreplaceable"
    builder.check_output(corpus.path)  # a corpus may be built again
    (tmp_path / "empty").touch()
    builder.check_output(tmp_path / "empty")


def test_where_a_corpus_cannot_be_written(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    files = find_files([tmp_path])
    with pytest.raises(BadRequest, match="is a folder; a corpus is one file"):
        build(files, tokenizer, tmp_path, name="tiny")
    with pytest.raises(BadRequest, match="there is no folder"):
        build(files, tokenizer, tmp_path / "no" / "x.corpus", name="tiny")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(builder, "_append", full)
    with pytest.raises(PacelineError, match=r"building the corpus .* failed: No space left on device"):
        build(files, tokenizer, tmp_path / "x.corpus", name="tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "overwritten"])
@pytest.mark.parametrize("step", ["ordered", "header_bytes", "preamble"])
def test_a_build_that_is_killed_leaves_no_corpus(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, step: str, is_there: bool
) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox")
    output = tmp_path / "x.corpus"
    files = find_files([tmp_path / "a.txt"])
    if is_there:
        build(files, tokenizer, output, name="before")
    child = os.fork()
    if child == 0:
        setattr(builder, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        build(files, tokenizer, output, name="after")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = [path for path in tmp_path.iterdir() if path.name not in ("a.txt", "x.corpus")]
    assert len(left) == 1
    assert "is no corpus" in refused(left[0])
    assert output.exists() == is_there
    if is_there:
        assert Corpus(output).about.tokenizer == "before"
    corpus = build(files, tokenizer, output, name="after")
    assert corpus.about.tokenizer == "after"


def test_an_open_corpus_outlives_its_file(tmp_path: Path) -> None:
    corpus = made(tmp_path, [[1, 2, 3]])
    made(tmp_path, [[4, 5, 6]] * 50)
    assert drafted(Suffix(corpus=corpus), [9, 1, 2]).ids == [2, 3]
    corpus.path.unlink()
    assert drafted(Suffix(corpus=corpus), [9, 1, 2]).ids == [2, 3]


# -- tokenizers --------------------------------------------------------------------------------------------------------


def changed(tokenizer: Any, change: Any) -> Any:
    """The tokenizer with its file changed."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    change(content)
    return type(tokenizer)(tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token="<|im_end|>")


def test_a_tokenizer_is_known_by_its_words_and_merges(tmp_path: Path, tiny_model: Path, tokenizer: Any) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(tiny_model, moved)
    assert fingerprint(AutoTokenizer.from_pretrained(moved)) == fingerprint(tokenizer)
    AutoTokenizer.from_pretrained(moved).save_pretrained(tmp_path / "saved")
    assert fingerprint(AutoTokenizer.from_pretrained(tmp_path / "saved")) == fingerprint(tokenizer)
    same = changed(tokenizer, lambda content: None)
    assert fingerprint(same) == fingerprint(tokenizer)

    def swap_words(content: Any) -> None:
        vocab = content["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    def swap_merges(content: Any) -> None:
        merges = content["model"]["merges"]
        merges[0], merges[1] = merges[1], merges[0]

    others = [changed(tokenizer, change) for change in (swap_words, swap_merges)]
    more = changed(tokenizer, lambda content: None)
    more.add_tokens(["<another>"])
    assert len({fingerprint(one) for one in (tokenizer, *others, more)}) == 4


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Corpus:
    """A corpus for the tiny model."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "a.py").write_text("def add(a, b):\n    return a + b\n" * 3)
    return build(find_files([folder]), tokenizer, folder / "x.corpus", name="tiny")


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path, tiny_model: Path, built: Corpus) -> None:
    (tmp_path / "a.txt").write_text("some text")
    other = build(find_files([tmp_path]), ByT5Tokenizer(), tmp_path / "other.corpus", name="byt5-small")
    said = rf"built with the tokenizer of byt5-small \(.*384 ids\); {re.escape(str(tiny_model))} has another one"
    for config in (
        {"method": "suffix", "corpus": str(other.path)},
        {"corpus": other},
        {"method": Suffix(corpus=other)},
        {"method": "compose", "drafters": ["ngram", {"method": "suffix", "corpus": other.path}]},
    ):
        with pytest.raises(IncompatibleDrafter, match=said):
            LLM(str(tiny_model), config)
    llm = LLM(str(tiny_model), {"corpus": str(built.path)})
    with pytest.raises(IncompatibleDrafter, match=said):
        llm.generate(["a"], speculative_config={"corpus": str(other.path)})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rule", ["coupled", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_models_and_sooner_written(
    tmp_path: Path, tiny_model: Path, tokenizer: Any, rule: str, temperature: float
) -> None:
    """The corpus holds the very ids that the model will write: nearly every guess is right."""
    llm = LLM(str(tiny_model))
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60)
    plain = llm.generate(["def add"], params, speculative_config=None)[0]
    path = tmp_path / "own.corpus"
    ids = [*plain.prompt_token_ids, *plain.token_ids]
    border = len(tokenizer)
    write(path, pieces_of([ids], border), border, lambda *n: About("tiny", fingerprint(tokenizer), border, *n))
    config = {"method": "suffix", "corpus": path, "rejection_sample_method": rule}
    out = llm.generate(["def add"], params, speculative_config=config)[0]
    if rule == "coupled":
        assert out.token_ids == plain.token_ids
        assert out.stats.mean_acceptance_length > 6
    assert len(out.token_ids) == 60


# -- the command line --------------------------------------------------------------------------------------------------


def command(*words: "str | Path") -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_build_info_and_generate(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.py").write_text("def add(a, b):\n    return a + b\n" * 3)
    (tmp_path / "in" / "b.bin").write_bytes(b"\0\1")
    output = tmp_path / "x.corpus"
    done = command("corpus", "build", tmp_path / "in", "-o", output, "--model", tiny_model)
    assert done.exit_code == 0, done.output
    about = Corpus(output).about
    assert f"{about.num_tokens:,} tokens in 1 documents" in done.stdout
    assert "1 files left out that are not UTF-8 text" in done.stdout
    assert "building the corpus" in done.stderr
    shown = command("corpus", "info", output)
    assert shown.exit_code == 0
    assert f"tokenizer of {tiny_model}: {about.vocab_size:,} ids, fingerprint {about.fingerprint[:12]}" in shown.stdout
    parsed = json.loads(command("corpus", "info", output, "--json").stdout)
    assert parsed == asdict(about) | {"num_bytes": output.stat().st_size}
    words = ("generate", tiny_model, "def add(a,", "--max-tokens", "12", "--temperature", "0", "--json")
    texts = [
        json.loads(command(*words, *more).stdout)["text"]
        for more in (("--method", "suffix", "--corpus", output), ("--method", "none"))
    ]
    assert texts[0] == texts[1]


def test_wrong_use_is_told_in_a_line(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for words, said in (
        (("build", tmp_path / "no.txt", "-o", tmp_path / "x"), "there is no file or folder"),
        (("build", tmp_path / "a.txt", "-o", tmp_path), "is a folder; a corpus is one file"),
        (("build", tmp_path / "a.txt", "-o", tmp_path / "no" / "x"), "there is no folder"),
        (("build", tmp_path / "a.txt"), "Missing option"),
        (("build", "-o", tmp_path / "x"), "Missing argument"),
        (("info", tmp_path / "a.txt"), "is no corpus"),
        (("info", tmp_path / "x"), "No such file"),
    ):
        done = command("corpus", *words)
        assert done.exit_code == 2, words
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) <= 2
    done = command("generate", tiny_model, "a", "--method", "suffix", "--corpus", tmp_path / "a.txt")
    assert done.exit_code == 2
    assert "is no corpus" in done.stderr


def test_states_are_made_as_they_are_asked_for() -> None:
    found = Continuations([(3, [[1, 2], [1, 3]]), (1, [[1, 2], [1, 3], [4], []])])
    state, length = found.match()
    assert (length, found.followers(state, 5)) == (3, [(1, 2)])
    before = len(found.link)
    assert found.step(state, length, 1)[1] == 4
    made = len(found.link)
    assert made > before
    assert found.step(state, length, 1)[1] == 4
    assert len(found.link) == made
    state, length = found.step(state, length, 4)  # only the shorter one knows it
    assert (length, found.followers(state, 5)) == (2, [])
    assert found.step(state, length, 1) == (0, 0)
