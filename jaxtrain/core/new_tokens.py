"""Rows that a model's tables need for tokens which section model adds, and who trains them."""

import dataclasses
from typing import Any

from jaxtrain.config import Config
from jaxtrain.data.chat.added_tokens import rows_needed
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.errors import UserError


def grow_tables(config: Config, architecture: Any, tokenizer: Any) -> tuple[Any, tuple[int, ...]]:
    """(the architecture with rows for the tokens that section model adds, and with their ids; the
    ids of those tokens whose rows nothing has ever trained).

    A model that is trained whole gets a number of rows that is cut over devices as before; beside
    an adapter there are as many as tokens, so that `resize_token_embeddings(len(tokenizer))` makes
    its base.
    """
    model, alone = config.model, config.adapter.kind == "none"
    roles = model.special_tokens.roles()
    wanted = [*model.added_tokens, *model.special_tokens.additional_special_tokens, *roles.values()]
    if not wanted:
        return architecture, ()
    carried = dict(architecture.carried_attributes)
    carried |= {f"{role}_id": str(int(getattr(tokenizer, f"{role}_id"))) for role in roles}
    architecture = dataclasses.replace(architecture, carried_attributes=tuple(carried.items()))
    stored = architecture.vocab_size
    rows = rows_needed(tokenizer, stored) if alone else max(stored, len(tokenizer))
    if rows > stored and config.rollout.engine == "vllm":
        raise UserError(
            f"model.added_tokens: the tokenizer has {len(tokenizer)} tokens, the model that servers"
            f" open {stored}; train and export (an adapter: merge) it once with the local engine or"
            " by task.kind sft, and name that folder as model.path"
        )
    known = load_tokenizer(model.tokenizer or str(model.path)).get_vocab()
    ids = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in wanted}
    new = sorted({ids[token] for token in wanted if token not in known or ids[token] >= stored})
    if rows > stored:
        architecture = dataclasses.replace(architecture, vocab_size=rows, grown=rows - stored)
        architecture.check()
    return architecture, tuple(new)
