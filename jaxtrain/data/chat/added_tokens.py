"""Tokens that a config adds to a tokenizer, and the rows that they need in the embedding."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken

from jaxtrain.errors import UserError
from jaxtrain.text_safety import show

ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


def add_tokens(
    tokenizer: Any,
    added: Sequence[str] = (),
    special: Sequence[str] = (),
    roles: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Add tokens to a tokenizer in place and return those that are new.

    added: ordinary tokens, spelled as in texts. special: control tokens, which only templates
    write. roles: {attribute of the tokenizer, such as "eos_token": control token}.
    """
    roles = roles or {}
    controls = [*special, *roles.values()]
    vocabulary = tokenizer.get_vocab()
    for token in (*added, *controls):
        if not token.strip():
            raise UserError(
                f"model.added_tokens or model.special_tokens: {show(token)} is no token"
            )
    if overlap := set(added) & set(controls):
        raise UserError(
            f"{show(min(overlap))} is in model.added_tokens and a control token; a token that texts"
            " spell is no control token"
        )
    new = tuple(dict.fromkeys(token for token in (*added, *controls) if token not in vocabulary))
    for tokens, is_control in ((controls, True), (added, False)):
        tokenizer.add_tokens(
            [AddedToken(token, special=is_control, normalized=False) for token in tokens],
            special_tokens=is_control,
        )
    for role, token in roles.items():
        setattr(tokenizer, role, token)
    return new


def rows_needed(tokenizer: Any, rows: int) -> int:
    """Return the embedding rows for a tokenizer, at least `rows`.

    The new number is divisible by the same power of 2 as the old one, up to 64, so that the table
    shards over devices as before.
    """
    size = len(tokenizer)
    if size <= rows:
        return rows
    step = next(step for step in (64, 32, 16, 8, 4, 2, 1) if rows % step == 0)
    return -(-size // step) * step
