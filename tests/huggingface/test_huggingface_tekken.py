"""tekken.json, mistral-common's form of a tokenizer: against merges by rank, and refused."""

import base64
import json
import re

import pytest

from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.errors import UserError

PATTERN = r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+"
WORDS = [b"th", b"the", b" th", b" the", b"he", b"in", b"ing", b"er", b" c", b" ca", b"\xc3\xa9"]
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
FILLED = 8
"""Ids of special tokens, of which the last have no name in the file."""


def tekken(**changes):
    pieces = [bytes([byte]) for byte in range(256)] + WORDS
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(pieces)
    ]
    special = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)
    ]
    config = {
        "pattern": PATTERN, "version": "v7", "num_vocab_tokens": len(vocab) + 5,
        "default_vocab_size": len(vocab) + FILLED, "default_num_special_tokens": FILLED,
    }  # fmt: skip
    return {"config": config, "vocab": vocab, "special_tokens": special, **changes}


def by_rank(text):
    """Byte pairs joined in the order of their ranks, as tiktoken does, behind the special ids."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {piece: 256 + number for number, piece in enumerate(WORDS)}
    ids = []
    for word in re.findall(PATTERN, text):
        parts = [bytes([byte]) for byte in word.encode()]
        if (whole := b"".join(parts)) in ranks:
            parts = [whole]
        while len(parts) > 1:
            pairs = [ranks.get(a + b, 1 << 30) for a, b in zip(parts, parts[1:], strict=False)]
            place = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[place] == 1 << 30:
                break
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        ids += [FILLED + ranks[part] for part in parts]
    return ids


def test_a_folder_with_tekken_json_alone_has_its_tokens(tmp_path):
    (tmp_path / "tekken.json").write_text(json.dumps(tekken()))
    tokenizer = load_tokenizer(str(tmp_path), "mistral_v3_tekken")
    assert tokenizer.is_fast and len(tokenizer) == 256 + len(WORDS) + FILLED
    for text in ("the other thing", " the cat in 12 caf\u00e9s!", "\u00e9\t\n  then \U0001f642"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == by_rank(text) and tokenizer.decode(ids) == text
    assert tokenizer.bos_token_id == 1 and tokenizer.eos_token == "</s>"
    assert tokenizer.convert_tokens_to_ids("[INST]") == 3
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert "[INST]" in shown
    tokenizer.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert again.encode("[INST]the other[/INST]") == tokenizer.encode("[INST]the other[/INST]")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab": {}}, "tekken.json: vocab is"),
        ({"special_tokens": None}, "tekken.json: special_tokens is"),
        ({"config": {}}, "cannot load the tokenizer"),
        ({"vocab": [{"token_bytes": 3}]}, "cannot load the tokenizer"),
    ],
)
def test_a_broken_tekken_json_is_named(tmp_path, changes, message):
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(**changes)))
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(tmp_path))
