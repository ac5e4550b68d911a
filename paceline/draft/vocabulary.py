"""Do ids mean the same words to a target and its draft model?"""

from typing import Any

from paceline.errors import IncompatibleDrafter


def check_vocabularies(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Passes when every id that both tokenizers have means the same; one may go on longer than the other.

    Args:
        target_tokenizer: anything with `get_vocab()`; `eos_token_id` is compared where both have one.

    Raises:
        IncompatibleDrafter: names the first id that differs, with both strings, or the end tokens.
    """
    target, draft = ({i: token for token, i in t.get_vocab().items()} for t in (target_tokenizer, draft_tokenizer))
    advice = "guesses would be other words than the target reads: use a draft model of the target's own family"
    if not target or not draft:
        raise IncompatibleDrafter(f"the vocabularies have {len(target)} and {len(draft)} tokens; both need some")
    for token_id in range(min(max(target), max(draft)) + 1):
        ours, theirs = target.get(token_id), draft.get(token_id)
        if ours != theirs:
            raise IncompatibleDrafter(
                f"token id {token_id} is {_quoted(ours)} for the target and {_quoted(theirs)} for the draft; {advice}"
            )
    end, other = (getattr(tokenizer, "eos_token_id", None) for tokenizer in (target_tokenizer, draft_tokenizer))
    if end is not None and other is not None and end != other:
        raise IncompatibleDrafter(
            f"texts end with id {end} ({_quoted(target.get(end))}) for the target and with id {other} "
            f"({_quoted(draft.get(other))}) for the draft; {advice}, trained for the same kind of text"
        )


def _quoted(token: str | None) -> str:
    return "no token" if token is None else repr(token)
