"""Mask token, which replaces the tokens to predict; never a token that occurs in texts."""

from typing import Any, NamedTuple

from tokenizers import AddedToken

from jaxtrain.data.chat.control_tokens import find_control
from jaxtrain.data.chat.template import end_of_turn_ids
from jaxtrain.errors import UserError

NEW = "<|diffusion_mask|>"
"""Name of a new mask token."""


class MaskToken(NamedTuple):
    """Mask token and the embedding rows that it needs."""

    id: int
    rows: int
    """Required rows of the embedding."""
    note: str
    """Description for the log."""


def choose_mask_token(
    tokenizer: Any, rows: int, mask_id: int | None = None, name: str | None = None
) -> MaskToken:
    """Choose the mask token of a tokenizer whose model has an embedding of `rows`.

    mask_id: its id in the full vocabulary, which includes added tokens and unused rows. name: a
    special token. By default the tokenizer's own mask token, else a new one, which is added to the
    tokenizer. Raises UserError for a token that occurs in texts or ends them.
    """
    if mask_id is not None:
        return MaskToken(check_id(tokenizer, rows, mask_id), rows, f"mask token {mask_id}")
    name = name or tokenizer.mask_token
    name = str(name or NEW)
    existing_id = tokenizer.get_vocab().get(name)
    if existing_id is not None:
        check_id(tokenizer, rows, existing_id, f"task.mask_token {name!r}")
        return MaskToken(existing_id, rows, f"mask token {existing_id}, {name!r}")
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False)], special_tokens=True)
    tokenizer.mask_token = name
    new_id = int(tokenizer.convert_tokens_to_ids(name))
    if new_id < rows:
        note = f"mask token {new_id}, new as {name!r}, in an unused row of the embedding"
        return MaskToken(new_id, rows, note)
    note = (
        f"mask token {new_id}, new as {name!r}: the embedding grows from {rows} to {new_id + 1}"
        " rows"
    )
    return MaskToken(new_id, new_id + 1, note)


def check_id(tokenizer: Any, rows: int, mask_id: int, key: str = "task.mask_token_id") -> int:
    """Return the id if it can be a mask token; UserError otherwise."""
    words = {index: word for word, index in tokenizer.get_vocab().items()}
    if not 0 <= mask_id < rows:
        raise UserError(
            f"{key} is {mask_id}, outside of the embedding's {rows} rows; give an unused row, or a"
            " new name as task.mask_token, for which the embedding grows"
        )
    if mask_id not in words:
        return mask_id
    controls = set(find_control(tokenizer).values()) | set(tokenizer.all_special_ids)
    if mask_id not in controls:
        raise UserError(
            f"{key} is {mask_id}, {words[mask_id]!r}, which texts hold; give a special token, an"
            " unused row, or a new name as task.mask_token"
        )
    used = {tokenizer.bos_token_id, tokenizer.pad_token_id, *end_of_turn_ids(tokenizer)}
    if mask_id in used:
        raise UserError(
            f"{key} is {mask_id}, {words[mask_id]!r}, which begins, ends or pads texts; give"
            " another special token, or a new name as task.mask_token"
        )
    return mask_id
