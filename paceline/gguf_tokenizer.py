"""Tokenizers from the vocabulary in a GGUF file.

Byte-level vocabularies come with their merges; `transformers` rebuilds them. SentencePiece vocabularies, Gemma's, come
with a score for each piece and nothing else; `sentencepiece` gives the text-to-ids rule that these scores mean.
"""

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from .gguf_file import Header, unsupported

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
"""What ``tokenizer.ggml.token_type`` says of a token."""
SPACE = "\u2581"
"""How pieces spell a space."""
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""The file's words for what `transformers` calls so."""


def write_tokenizer(header: Header, config: "PreTrainedConfig", folder: Path) -> None:
    """The file's tokenizer and chat template as ``transformers`` keeps them; `UnsupportedModel` if that cannot be."""
    try:
        tokenizer = _gemma(header) if header.architecture == "gemma3" else _rebuilt(header, config)
    except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
        raise unsupported(header, f"its tokenizer cannot be rebuilt ({error})") from error
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def _rebuilt(header: Header, config: "PreTrainedConfig") -> "PreTrainedTokenizerFast":
    from tokenizers.normalizers import NFC
    from transformers import PreTrainedTokenizerFast

    with TemporaryDirectory() as empty:  # beside the file there may be another model's tokenizer, which would win
        (Path(empty) / "model.gguf").symlink_to(header.path.absolute())
        tokenizer = PreTrainedTokenizerFast.from_pretrained(empty, gguf_file="model.gguf")
    if config.model_type.startswith("qwen"):  # their text is normalised before it is split; the file does not say so
        tokenizer.backend_tokenizer.normalizer = NFC()
    return tokenizer  # type: ignore[no-any-return]


def _gemma(header: Header) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    said: dict[str, Any] = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in header.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    if said.get("model") != "llama" or said.get("add_space_prefix", True) or said.get("remove_extra_whitespaces"):
        raise unsupported(header, "its tokenizer is not SentencePiece's BPE that takes text as it is, as Gemma's is")
    backend = sentencepiece(header)
    named = {name: said.get(f"{key}_token_id") for name, key in NAMED.items()}
    if named["bos_token"] is None or named["eos_token"] is None:
        raise unsupported(header, "its tokenizer names no token that begins a text, or none that ends one")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{name: said["tokens"][token] for name, token in named.items() if token is not None},
        # llama.cpp's defaults for vocabularies of this kind
        add_bos_token=bool(said.get("add_bos_token", True)),
        add_eos_token=bool(said.get("add_eos_token", False)),
        chat_template=header.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def sentencepiece(header: Header) -> "Tokenizer":
    """Text to ids as SentencePiece's BPE does it, from the pieces and scores in the file.

    Control tokens and user-defined ones are found first, the longest at each place. In the text between them, of all
    neighbours that are a piece together, those join that make the piece with the highest score, the leftmost first,
    until none are left. Characters that are no piece become one byte token for each of their bytes.

    ``tokenizers`` knows ranked merges instead of scores: each way to cut a piece in two is one, in the order of scores.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pieces, scores, kinds = _vocabulary(header)
    normal = {piece for piece, kind in zip(pieces, kinds) if kind == NORMAL}
    ranked = sorted((i for i, kind in enumerate(kinds) if kind == NORMAL), key=lambda i: -scores[i])
    merges = [
        (piece[:cut], piece[cut:])
        for piece in (pieces[i] for i in ranked)
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [p for p, kind in zip(pieces, kinds) if kind in (UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    user = [p for p, kind in zip(pieces, kinds) if kind == USER]
    tokenizer.add_tokens([AddedToken(piece, normalized=True) for piece in user])  # as they are spelled behind spaces
    return tokenizer


def _vocabulary(header: Header) -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and kinds, checked: what follows would otherwise be another tokenizer than the model's."""
    found = [header.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "scores", "token_type")]
    if not all(isinstance(values, list) for values in found) or len({len(values) for values in found if values}) != 1:
        raise unsupported(header, "its tokenizer lacks a text, a score or a kind for some tokens")
    tokens, scores, kinds = (values or [] for values in found)
    pieces = [str(token).replace(" ", SPACE) for token in tokens]  # files spell runs of spaces out
    rows = header.tensors["token_embd.weight"].shape[0]
    if len(pieces) != rows:
        raise unsupported(header, f"its tokenizer has {len(pieces)} tokens, its embedding has {rows}")
    if len(set(pieces)) != len(pieces):
        raise unsupported(header, "two tokens of its tokenizer have the same text")
    if {p for p, kind in zip(pieces, kinds) if kind == BYTE} != {f"<0x{byte:02X}>" for byte in range(256)}:
        raise unsupported(header, "its tokenizer has not one token for each byte")
    normal = {p for p, kind in zip(pieces, kinds) if kind == NORMAL}
    if not {char for piece in normal for char in piece} <= set(pieces):
        raise unsupported(header, "its tokenizer has pieces with characters that are no pieces")
    ranks = [score for piece, score, kind in zip(pieces, scores, kinds) if kind == NORMAL and len(piece) > 1]
    if not all(map(math.isfinite, ranks)) or len(set(ranks)) != len(ranks):
        raise unsupported(header, "its tokenizer gives two pieces the same score, or one none")
    if strange := set(kinds) - {NORMAL, UNKNOWN, CONTROL, USER, BYTE}:
        raise unsupported(header, f"nothing is known about its tokens of kind {', '.join(map(str, sorted(strange)))}")
    return pieces, scores, kinds
