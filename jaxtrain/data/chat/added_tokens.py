"""Tokens that a config adds to a tokenizer, and what they ask of the model's tables."""

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
    """Put tokens into a tokenizer, which then has those that are new; returns these.

    added: as texts spell them. special: control tokens, which only templates write. roles: the
    control tokens that begin, end, pad and stand for what is unknown.
    """
    roles = roles or {}
    controls = [*special, *roles.values()]
    known = tokenizer.get_vocab()
    for token in (*added, *controls):
        if not token.strip():
            raise UserError(
                f"model.added_tokens or model.special_tokens: {show(token)} is no token"
            )
    if both := set(added) & set(controls):
        raise UserError(
            f"{show(min(both))} is in model.added_tokens and a control token; a token that texts"
            " spell is no control token"
        )
    new = tuple(dict.fromkeys(token for token in (*added, *controls) if token not in known))
    for tokens, is_control in ((controls, True), (added, False)):
        tokenizer.add_tokens(
            [AddedToken(token, special=is_control, normalized=False) for token in tokens],
            special_tokens=is_control,
        )
    for role, token in roles.items():
        setattr(tokenizer, role, token)
    return new


def rows_needed(tokenizer: Any, rows: int) -> int:
    """Rows that the tables of a model with `rows` need; as often divisible by 2 as they were, up to
    64, so that they are cut over devices as before."""
    size = len(tokenizer)
    if size <= rows:
        return rows
    step = next(step for step in (64, 32, 16, 8, 4, 2, 1) if rows % step == 0)
    return -(-size // step) * step
