"""Ids of texts from remembered words, and renderings from frames: those of the tokenizer and of the
template."""

import importlib.util
import os
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.chat.words import LONG_TEXTS, WordEncoder, find_cuts
from jaxtrain.huggingface import chat_template
from jaxtrain.huggingface.plain_template import only_writes_contents

ROOT = Path(__file__).parents[2]
QWEN = (
    Path(os.environ.get("JAXTRAIN_TEST_DATA", ROOT.parent / "shared" / "data")) / "qwen2_tokenizer"
)
PARTS = (
    *("a", "don't", "I'LL", "x's", "'", '"', ".", ",", "...", "<<48/2=24>>24", "$0.2", "1234567"),
    *(" ", " ", " ", " ", "  ", "\n", "\n\n", " \n", "\t", "\r\n", "\x1c", "(a)", "a_b", "#", "é"),
    *("e\u0301", "\u0301", "中文", "🙂", "ſt", "x2y", "http://a.b/c?d=e", "<|im_end|>", "<think>"),
)


def write_texts(count: int = 1500) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(PARTS, k=rng.randrange(3, 60))) for _ in range(count)]


def check_ids(backend: Tokenizer) -> WordEncoder:
    encode = WordEncoder(backend)
    encode.countdown = 1  # the tests of borders come with the first long text
    for text in write_texts() * 2:
        assert encode(text) == backend.encode(text, add_special_tokens=False).ids, repr(text)
    return encode


@pytest.mark.parametrize("name", ["builtin", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_words_have_the_ids_of_the_tokenizer(name):
    if name == "qwen2" and not QWEN.exists():
        pytest.skip(f"no {QWEN}; JAXTRAIN_TEST_DATA names the folder")
    backend = load_tokenizer("builtin" if name == "builtin" else str(QWEN)).backend_tokenizer
    encode = check_ids(backend)
    assert encode.cuts is not None and len(encode.pieces) > 50


def make_bpe(*, pre_tokenizer, normalizer=None, merges=()) -> Tokenizer:
    letters = sorted({*pre_tokenizers.ByteLevel.alphabet(), "\u2581", " "})
    tokens = [*letters, *("".join(pair) for pair in merges)]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [*merges])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)


def test_a_token_over_a_space_forbids_the_cut():
    """Without a pattern of words, merges may cross spaces; the vocabulary says if they do."""
    crossing = make_bpe(pre_tokenizer=BYTES, merges=[("a", "\u0120"), ("a\u0120", "b")])
    assert find_cuts(crossing) is None
    check_ids(crossing)
    apart = make_bpe(pre_tokenizer=BYTES, merges=[("\u0120", "b"), ("4", "."), (".", "5")])
    spaces, inner = find_cuts(apart)
    assert spaces.split("a b") == ["a", "b"]
    assert inner.split("x4.5y") == ["x", "4.5", "y"]
    check_ids(apart)


@pytest.mark.parametrize(
    ("pre_tokenizer", "normalizer"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
        (pre_tokenizers.Metaspace(), None),
        (WORDS, normalizers.NFKC()),
        (WORDS, normalizers.Strip()),
    ],
)
def test_other_tokenizers_encode_texts_as_a_whole(pre_tokenizer, normalizer):
    tokenizer = make_bpe(pre_tokenizer=pre_tokenizer, normalizer=normalizer)
    assert find_cuts(tokenizer) is None
    check_ids(tokenizer)


def test_a_pattern_that_looks_behind_a_space_forbids_the_cut():
    """A pattern that joins what stands around a space, though no token does."""
    from tokenizers import Regex

    joined = pre_tokenizers.Split(Regex(r"x x|\S"), "isolated")
    tokenizer = make_bpe(
        pre_tokenizer=pre_tokenizers.Sequence([joined, BYTES]), merges=[("Q", "\u0120")]
    )
    assert find_cuts(tokenizer) is None
    check_ids(tokenizer)


def test_few_texts_need_no_tests_of_borders():
    encode = WordEncoder(load_tokenizer("builtin").backend_tokenizer)
    for _ in range(LONG_TEXTS - 1):
        encode("a text of more than a word or two")
    assert encode.cuts is None
    encode("a text of more than a word or two")
    assert encode.cuts is not None


def list_templates() -> dict[str, str]:
    files = [*(ROOT / "jaxtrain" / "assets" / "chat_templates").glob("*.jinja")]
    trl = importlib.util.find_spec("trl")
    if trl is not None and trl.origin is not None:
        files += (Path(trl.origin).parent / "chat_templates").glob("*.jinja")
    return {f"{file.parent.parent.name}/{file.stem}": file.read_text("utf-8") for file in files}


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
READERS = {
    "a test": "{% for m in messages %}{% if 'x' in m.content %}y{% endif %}{% endfor %}",
    "a length": "{% for m in messages %}{{ m.content | length }}{% endfor %}",
    "an index": "{% for m in messages %}{{ m.content[0] }}{% endfor %}",
    "a split": "{% for m in messages %}{{ m.content.split('x')[-1] }}{% endfor %}",
    "JSON": "{% for m in messages %}{{ m | tojson }}{% endfor %}",
    "items": "{% for m in messages %}{% for v in m.values() %}{{ v }}{% endfor %}{% endfor %}",
    "a neighbor": "{% for m in messages %}{{ loop.previtem.content | upper }}{% endfor %}",
    "a namespace": "{% set ns = namespace() %}{% set ns.x = messages[0].content %}{{ ns.x[0] }}",
    "a macro": "{% macro f(x) %}{{ x | upper }}{% endmacro %}{{ f(messages[0].content) }}",
    "a name": "{% for m in messages %}{% set c = m.content %}{{ c | upper }}{% endfor %}",
    "a later name": "{% for m in messages %}{{ c | upper }}{% set c = m.content %}{% endfor %}",
    "a trimmed sum": "{% for m in messages %}{{ (m.content + ' x ') | trim }}{% endfor %}",
    "the date": "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", READERS)
def test_templates_that_read_contents_have_no_frame(name):
    assert not only_writes_contents(READERS[name])
    assert only_writes_contents(CHATML)


def test_frames_write_what_templates_write(monkeypatch):
    """Compare every template with a frame on talks whose contents are blank, padded or tags."""
    rng, tokenizer, framed = random.Random(0), load_tokenizer("builtin"), 0
    contents = ("x", " x ", "\nx", "x\n\n", "<think>a</think>b", "", " ", "\n", "{{ 1 }}", "\x1fq")
    for text in [CHATML, *list_templates().values()]:
        tokenizer.chat_template = text
        if not only_writes_contents(text):
            continue
        for _ in range(12):
            count, first = rng.randrange(1, 6), rng.choice(("system", "user"))
            roles = [first, *("assistant" if i % 2 else "user" for i in range(first == "user", 6))]
            messages = [{"role": r, "content": rng.choice(contents)} for r in roles[:count]]
            generation = rng.random() < 0.5
            args = (tokenizer, messages, None, generation, None)
            frame = chat_template._find_frame(*args)
            other = [{**m, "content": m["content"] and rng.choice("abc") * 3} for m in messages]
            reply = chat_template._request(*args)
            if frame is None:
                assert reply.kind == "failed", text
                continue
            framed += 1
            assert frame.fill(messages) == reply.text == chat_template.render(*args)
            if all(m["content"].strip() for m in messages):
                reply = chat_template._request(tokenizer, other, None, generation)
                assert frame.fill(other) == reply.text
    assert framed > 100
