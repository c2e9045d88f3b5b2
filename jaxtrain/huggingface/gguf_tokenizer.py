"""Tokenizers of GGUF files: metadata to a tokenizer's folder, and back.

Two kinds: byte-level BPE ("gpt2"), whose pre-tokenizer is only named ("qwen2"), and SentencePiece's
BPE with byte fallback ("llama"), whose merges follow from scores. A tokenizer is written only if
what is read back gives its tokens for PROBES.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import shorten
from jaxtrain.huggingface.tokenizer import PROBES

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
"""tokenizer.ggml.token_type."""
KEY = "tokenizer.ggml."
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS, GPT2 = "digits", "gpt2"
PATTERNS = {
    "gpt-2": GPT2,
    "smollm": DIGITS,
    **dict.fromkeys(("refact", "command-r", "codeshell", "exaone", "starcoder"), DIGITS),
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "llama-bpe": LLAMA3,
    "dbrx": LLAMA3,
    "smaug-bpe": LLAMA3,
    "tekken": TEKKEN,
}
"""Names of pre-tokenizers in llama.cpp, and how they cut text."""
WHOLE = ("llama-bpe", "tekken")
"""Those of tokenizers that take a word that is a token without merging."""
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
ROLE_NAMES = {f"{role}_token": f"{KEY}{name}_token_id" for role, name in ROLES.items()}
SPACE = "\u2581"


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, source: str) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template that a file's metadata
    describes. Raises UserError for a kind that is not read."""
    tokens = metadata.get(f"{KEY}tokens")
    if not isinstance(tokens, list) or not tokens:
        raise UserError(f"{source} holds no tokenizer; name one with model.tokenizer")
    backend = build_tokenizer(metadata, source)
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, key in ROLE_NAMES.items():
        index = metadata.get(key)
        if type(index) is int and index < len(tokens):
            config[role] = tokens[index]
    config["clean_up_tokenization_spaces"] = False
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Build the tokenizer of a file's metadata."""
    tokens, kind = metadata[f"{KEY}tokens"], metadata.get(f"{KEY}model")
    types = metadata.get(f"{KEY}token_type") or [NORMAL] * len(tokens)
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens, source)
    elif kind == "llama":
        backend = _sentence_piece(metadata, tokens, types)
    else:
        raise UserError(
            f"{source}: a tokenizer of kind {shorten(kind)} is not read (gpt2 and llama are); name"
            " the one of the original folder with model.tokenizer"
        )
    named = {metadata.get(key) for key in ROLE_NAMES.values()}
    for index, (token, number) in enumerate(zip(tokens, types, strict=False)):
        if number in (CONTROL, USER) or (index in named and number == UNKNOWN):
            special = number != USER
            added = AddedToken(token, special=special, normalized=False)
            (backend.add_special_tokens if special else backend.add_tokens)([added])
    bos = metadata.get(f"{KEY}bos_token_id")
    default = kind == "llama"
    if type(bos) is int and metadata.get(f"{KEY}add_bos_token", default):
        text = tokens[bos]
        backend.post_processor = TemplateProcessing(
            single=[text, "$A"], pair=[text, "$A", text, "$B"], special_tokens=[(text, bos)]
        )
    return backend


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], source: str) -> Tokenizer:
    name = metadata.get(f"{KEY}pre", "gpt-2")
    pattern = PATTERNS.get(name)
    if pattern is None:
        raise UserError(
            f"{source}: the pre-tokenizer {shorten(name)} is not known here"
            f" ({', '.join(PATTERNS)} are); name the tokenizer of the original folder with"
            " model.tokenizer"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get(f"{KEY}merges") or []]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    known = [pair for pair in merges if len(pair) == 2 and _is_merge(pair, vocabulary)]
    backend = Tokenizer(models.BPE(vocabulary, known, ignore_merges=name in WHOLE))
    if pattern == QWEN2:
        backend.normalizer = normalizers.NFC()
    regex = pattern in (GPT2, DIGITS)
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)]
    if pattern == DIGITS:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif pattern != GPT2:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _is_merge(pair: tuple[str, ...], vocabulary: Mapping[str, int]) -> bool:
    return pair[0] in vocabulary and pair[1] in vocabulary and "".join(pair) in vocabulary


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    scores = metadata.get(f"{KEY}scores") or [0.0] * len(tokens)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, score, number in zip(tokens, scores, types, strict=False):
        if number in (NORMAL, USER):
            pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            known = [p for p in pairs if p[0] in vocabulary and p[1] in vocabulary]
            known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
            merges += [(score, pair) for pair in known]
    merges.sort(key=lambda merge: -merge[0])
    unknown = metadata.get(f"{KEY}unknown_token_id")
    backend = Tokenizer(
        models.BPE(
            vocabulary,
            [pair for _, pair in merges],
            unk_token=tokens[unknown] if type(unknown) is int else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get(f"{KEY}add_space_prefix", True))
    steps = [normalizers.Prepend(SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return backend


def describe_tokenizer(tokenizer: Any, rows: int) -> dict[str, Any]:
    """Return the metadata of a fast tokenizer of transformers for a vocabulary of `rows`. Raises
    UserError for one that the format cannot name."""
    backend = tokenizer.backend_tokenizer
    parts = json.loads(backend.to_str())
    model = parts["model"]
    if model.get("type") != "BPE":
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} is of kind {shorten(model.get('type'))}; GGUF"
            " is written with BPE ones only"
        )
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    names: list[str | None] = [None] * rows
    for token, index in tokenizer.get_vocab().items():
        names[index] = token
    added = {token["id"]: token for token in parts["added_tokens"]}
    pieces = bool(model.get("byte_fallback"))
    tokens = [name if name is not None else f"[PAD{index}]" for index, name in enumerate(names)]
    types = [
        UNUSED if names[index] is None else _type(token, added.get(index), pieces)
        for index, token in enumerate(tokens)
    ]
    raw: dict[str, Any] = {f"{KEY}tokens": tokens, f"{KEY}token_type": types}
    for role, key in ROLE_NAMES.items():
        index = getattr(tokenizer, f"{role}_id")
        if index is not None:
            raw[key] = int(index)
    sample = tokenizer("a")["input_ids"]
    raw[f"{KEY}add_bos_token"] = bool(sample) and sample[0] == tokenizer.bos_token_id
    if isinstance(tokenizer.chat_template, str):
        raw["tokenizer.chat_template"] = tokenizer.chat_template
    for candidate in _candidates(parts, tokens, merges, pieces):
        if _agrees(backend, build_tokenizer({**raw, **candidate}, "the file")):
            return {**raw, **candidate}
    raise UserError(
        f"the tokenizer {tokenizer.name_or_path} cuts text in a way that has no name in GGUF here:"
        f" none of {', '.join(PATTERNS)} gives its tokens"
    )


def _type(token: str, added: Mapping[str, Any] | None, pieces: bool) -> int:
    if added is not None:
        return CONTROL if added.get("special") else USER
    if pieces and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return BYTE
    return NORMAL


def _candidates(
    parts: Mapping[str, Any], tokens: list[str], merges: list[str], pieces: bool
) -> Iterator[dict[str, Any]]:
    """Yield the metadata that may describe a tokenizer, the likeliest first."""
    if not pieces:
        whole = bool(parts["model"].get("ignore_merges"))
        for name in sorted(PATTERNS, key=lambda name: (name in WHOLE) != whole):
            yield {f"{KEY}model": "gpt2", f"{KEY}pre": name, f"{KEY}merges": merges}
        return
    rank: dict[str, int] = {}
    for index, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), index)
    scores = [-float(rank.get(token, len(merges))) for token in tokens]
    for prefix in (True, False):
        yield {
            **{f"{KEY}model": "llama", f"{KEY}pre": "default", f"{KEY}scores": scores},
            f"{KEY}add_space_prefix": prefix,
        }


def _agrees(backend: Tokenizer, other: Tokenizer) -> bool:
    return all(
        backend.encode(text, add_special_tokens=special).ids
        == other.encode(text, add_special_tokens=special).ids
        for text in PROBES
        for special in (False, True)
    )
