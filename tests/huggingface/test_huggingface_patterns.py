"""Regular expressions of tokenizers: those in use pass, those that may run without end do not."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from jaxtrain.data.chat.named_templates import BUILTIN
from jaxtrain.errors import UserError
from jaxtrain.huggingface.patterns import check_pattern, check_patterns
from jaxtrain.huggingface.tokenizer import open_tokenizer

IN_USE = [
    # GPT-2; GPT-4 and Qwen; Llama 3; o200k and Llama 4; DeepSeek; BLOOM; groups of three digits
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    " ?[^(\\s|[.,!?…。，、।۔،])]+",
    r"\d{1,3}(?=(?:\d{3})*\b)",
    r"[\p{Han}&&[^a-z]]+|(?<=x)y{2,}|(?>a+)+|(?:a|b|\.)*",
]
WITHOUT_END = [
    *("(a+)+b", "(a*)*", "(?:a|a)*b", "(a|ab)+c", "((a{2,}))*x", r"(?:\s*\p{L}+)+$", "(a?){40}b"),
    *(
        "a*a*a*a*a*b",
        r"(a)\1+",
        r"(?<n>a)\g<n>",
        "(?~x)",
        "(a{0,1000}){0,1000}",
        "(" * 60 + ")" * 60,
    ),
    *("(a", "a)", "[a", "(?", "(?#", "\\", "a" * 30_000, "(?:a{1,9}){20}b", "(a{2,3}+)+"),
]


@pytest.mark.parametrize("pattern", IN_USE)
def test_patterns_in_use_pass(pattern):
    check_pattern(pattern)
    Regex(pattern)  # they are what the library takes


@pytest.mark.parametrize("pattern", WITHOUT_END, ids=lambda text: text[:20])
def test_patterns_without_end_are_refused(pattern):
    with pytest.raises(ValueError):
        check_pattern(pattern)


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("ab()[]{}|*+?\\^.,:=!<>#p{L}123-&"), max_size=30))
def test_any_text_is_judged(pattern):
    try:
        check_pattern(pattern)
    except ValueError as reason:
        assert len(str(reason)) < 300


def test_a_tokenizer_is_refused_by_its_part_before_its_first_use(tmp_path):
    for name in ("tokenizer_config.json",):
        (tmp_path / name).write_bytes((BUILTIN / name).read_bytes())
    payload = json.loads((BUILTIN / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated"}
    split["invert"] = False
    payload["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, payload["pre_tokenizer"]],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(payload))
    with pytest.raises(UserError, match=r"pre_tokenizer of tokenizer.json.*\(x\+x\+\)\+y"):
        open_tokenizer(str(tmp_path))
    open_tokenizer(str(BUILTIN))

    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Replace(Regex("(a|a)*"), "b")])
    with pytest.raises(UserError, match="normalizer"):
        check_patterns(backend, "here")
    backend.normalizer = normalizers.Replace("(a+)+", "b")  # a plain text
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    check_patterns(backend, "here")
