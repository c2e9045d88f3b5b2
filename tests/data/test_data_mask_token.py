"""Which token stands for what is masked: never one that texts hold."""

import copy

import pytest

from jaxtrain.data.chat.control_tokens import encoder_of
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.methods.diffusion.mask_token import NEW, choose_mask_token

LOADED = load_tokenizer("builtin", None)
SIZE = len(LOADED)


@pytest.fixture
def tokenizer():
    return copy.deepcopy(LOADED)


def test_a_new_token_takes_an_unused_row_or_the_embedding_grows(tokenizer):
    mask_token = choose_mask_token(copy.deepcopy(tokenizer), SIZE + 5)
    assert (mask_token.id, mask_token.rows) == (SIZE, SIZE + 5) and "unused row" in mask_token.note
    mask_token = choose_mask_token(tokenizer, SIZE)
    assert (mask_token.id, mask_token.rows) == (SIZE, SIZE + 1) and "grows" in mask_token.note
    assert tokenizer.mask_token_id == SIZE and tokenizer.convert_ids_to_tokens(SIZE) == NEW
    # A text that spells it is text, and the next run finds the same token.
    assert SIZE not in encoder_of(tokenizer).text(f"a {NEW} b")
    assert choose_mask_token(tokenizer, SIZE + 1)[:2] == (SIZE, SIZE + 1)


def test_ids_count_in_the_whole_vocabulary(tokenizer):
    """Tokens that were added to the base vocabulary are real ones, too."""
    tokenizer.add_tokens(["ordinary"])
    tokenizer.add_tokens(["<|mine|>"], special_tokens=True)
    assert choose_mask_token(tokenizer, SIZE + 2, mask_id=SIZE + 1).id == SIZE + 1
    assert choose_mask_token(tokenizer, SIZE + 9, mask_id=SIZE + 4).id == SIZE + 4
    assert choose_mask_token(tokenizer, SIZE + 2, name="<|mine|>").id == SIZE + 1
    for wrong, output in (
        ({"mask_id": SIZE}, "texts hold"),
        ({"mask_id": 3 + tokenizer.get_vocab()["a"]}, "texts hold"),
        ({"mask_id": tokenizer.eos_token_id}, "ends or pads"),
        ({"mask_id": SIZE + 2}, "outside"),
        ({"name": "ordinary"}, "texts hold"),
    ):
        with pytest.raises(UserError, match=output):
            choose_mask_token(tokenizer, SIZE + 2, **wrong)
    assert choose_mask_token(tokenizer, SIZE + 2, name="<|another|>").rows == SIZE + 3
