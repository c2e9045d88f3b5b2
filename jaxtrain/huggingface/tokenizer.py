"""Load a folder's tokenizer: check its files, load it with transformers, compare it with
tokenizer.json.

transformers rebuilds some tokenizer classes from the vocabulary and silently drops other settings
of their tokenizer.json, such as another pre-tokenizer.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer

from jaxtrain.errors import UserError
from jaxtrain.huggingface.config_checks import check_names
from jaxtrain.huggingface.files import describe, read_object, read_text, shorten, spell
from jaxtrain.huggingface.patterns import check_patterns
from jaxtrain.text_safety import escape_control_chars

MAX_TOKENIZER_BYTES = 2**27
TEKKEN = "tekken.json"
NATIVE = {"mistral_format": False} if find_spec("mistral_common") else {}
"""Keeps AutoTokenizer from mistral-common's own class, which is no fast tokenizer."""
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(TOKENS, (str, dict)),
    "tokenizer_class": (str,),
    "model_max_length": (int, float),
    "added_tokens_decoder": (dict,),
    "additional_special_tokens": (list,),
    "extra_special_tokens": (dict, list),
    "chat_template": (str, list, dict),
    "auto_map": (dict,),
    "add_bos_token": (bool,),
    "add_eos_token": (bool,),
    "clean_up_tokenization_spaces": (bool,),
    "padding_side": (str,),
}
"""What transformers takes these keys of tokenizer_config.json and special_tokens_map.json for."""
PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens", "post_processor", "decoder")
PROBES = (
    "Hello world, don't I'LL we've",
    " lead  two   spaces\n\n lines\r\n\ttab  ",
    "1234567 3.14 2024-01-01 0x1F",
    "na\u00efve cafe\u0301 \uff21\uff22 \ufb01 \u00c5 \u0130 \u00df",
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \u0645\u0631\u062d\u0628\u0627",
    "\U0001f642\U0001f469\u200d\U0001f469 \u200b\u00a0x",
    "def f(x):\n    return x**2  # http://a.b/c?d=e",
    "<s></s> [INST] <|x|> __a__ ####",
)


def open_tokenizer(source: str) -> Any:
    """Load the fast tokenizer of a folder or a Hub id.

    Raises UserError with file and key for an invalid file.
    """
    # Slow to import, and slower by way of the name that transformers itself has for it.
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    check_files(Path(source))
    try:
        if is_tekken(Path(source)):
            tokenizer = convert_tekken(Path(source))
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                source, use_fast=True, trust_remote_code=False, **NATIVE
            )
        size = len(tokenizer) if tokenizer.is_fast else 0
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # foreign files in foreign code, whose Rust parts panic
        reason = _say(error)
        raise UserError(
            f"cannot load the tokenizer {source} (key model.tokenizer): {reason}\n"
            'Give a folder with tokenizer.json, a Hub id that can be reached, or "builtin".'
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer {source} is a slow one ({type(tokenizer).__name__}); jaxtrain needs a "
            "fast one: convert it to tokenizer.json with transformers and name that folder"
        )
    if not size:
        raise UserError(f"the tokenizer {source} (key model.tokenizer) has no tokens")
    if tokenizer.chat_template is None:
        tokenizer.chat_template = read_processor_template(source)
    check_template(tokenizer.chat_template, source)
    check_patterns(tokenizer.backend_tokenizer, source)
    return tokenizer


def read_processor_template(source: str) -> Any:
    """Return the chat template that the processor of a model with images has in a file of its own,
    as older folders do; None without one."""
    for name in ("chat_template.json", "processor_config.json"):
        file = _find_file(source, name)
        if file is not None and (template := read_object(file).get("chat_template")):
            return template
    return None


def is_tekken(folder: Path) -> bool:
    """Return whether a folder has its tokenizer as mistral-common's tekken.json alone."""
    return (folder / TEKKEN).is_file() and not (folder / "tokenizer.json").exists()


def convert_tekken(folder: Path) -> Any:
    """Return the fast tokenizer of a folder's tekken.json, with its chat_template.jinja if there is
    one."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.mistral.tokenizer import MistralConverter

    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    backend = MistralConverter(str(folder / TEKKEN)).converted()
    roles = {role: text for role, text in roles.items() if backend.token_to_id(text) is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path=str(folder), **roles)
    if (file := folder / "chat_template.jinja").exists():
        tokenizer.chat_template = read_text(file)
    return tokenizer


def check_files(folder: Path) -> None:
    """Raise UserError if a file of a tokenizer's folder, or a key in one, has the wrong type."""
    if not folder.is_dir():
        return  # a Hub id: transformers downloads it
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            _check_config(folder / name, read_object(folder / name))
    if (file := folder / "added_tokens.json").exists():
        for token, number in read_object(file).items():
            if type(number) is not int or number < 0:
                raise UserError(f"{file}: {spell(token)} is {describe(number)}; it must be an id")
    if (folder / "config.json").exists():  # it may name the class of the tokenizer
        check_names(read_object(folder / "config.json"), str(folder / "config.json"))
    if (file := folder / "tokenizer.json").exists():
        _check_tokenizer(file, read_object(file, MAX_TOKENIZER_BYTES))
    if is_tekken(folder):
        content = read_object(folder / TEKKEN, MAX_TOKENIZER_BYTES)
        for key, kind in (("config", dict), ("vocab", list), ("special_tokens", list)):
            if not isinstance(content.get(key), kind):
                raise UserError(
                    f"{folder / TEKKEN}: {key} is {describe(content.get(key))}; it must be"
                    f" {_KINDS[kind]}"
                )
    if (file := folder / "chat_template.jinja").exists():
        read_text(file)


def _check_config(file: Path, config: dict[str, Any]) -> None:
    for key, kinds in TYPES.items():
        value = config.get(key)
        if value is not None and not (
            isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        ):
            allowed = " or ".join(dict.fromkeys(_KINDS[kind] for kind in kinds))
            raise UserError(f"{file}: {key} is {describe(value)}; it must be {allowed}")
    for key in (*TOKENS, "additional_special_tokens", "extra_special_tokens"):
        value = config.get(key)
        several = list(value.values()) if isinstance(value, dict) and key not in TOKENS else value
        for token in several if isinstance(several, list) else [value]:
            _check_token(f"{file}: {key}", token)
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        key_path = f"{file}: added_tokens_decoder.{spell(number)}"
        if not number.isascii() or not number.isdigit() or not isinstance(token, dict):
            raise UserError(f"{key_path} is {describe(token)}; it must be the object of an id")
        _check_token(key_path, token)
    templates = config.get("chat_template")
    for entry in templates if isinstance(templates, list) else []:
        texts = entry if isinstance(entry, dict) else {}
        if not all(isinstance(texts.get(key), str) for key in ("name", "template")):
            raise UserError(
                f"{file}: chat_template holds {describe(entry)}; each of several must be an object"
                " with the texts name and template"
            )


def _check_token(source: str, token: Any) -> None:
    content = token.get("content") if isinstance(token, dict) else token
    if (
        content is not None
        and not isinstance(content, str)
        or content is None
        and token is not None
    ):
        raise UserError(
            f"{source} is {describe(token)}; a token is a text, or an object with content"
        )


def _check_tokenizer(file: Path, content: dict[str, Any]) -> None:
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list) or not vocabulary:
        raise UserError(
            f"{file}: model is {describe(model)}; it must be an object with the vocabulary, vocab"
        )
    added = content.get("added_tokens")
    if not isinstance(added, list):
        raise UserError(f"{file}: added_tokens is {describe(added)}; it must be a list")
    for token in added:
        fits = isinstance(token, dict) and isinstance(token.get("content"), str)
        if not fits or type(token.get("id")) is not int:
            raise UserError(
                f"{file}: added_tokens holds {describe(token)}; each has an id and a content"
            )
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if not isinstance(content.get(part), dict | None):
            raise UserError(f"{file}: {part} is {describe(content[part])}; it is an object or null")


def check_template(template: Any, source: str) -> None:
    """Raise UserError unless a chat template is a text or several by name."""
    several = isinstance(template, dict) and all(isinstance(t, str) for t in template.values())
    if not (template is None or isinstance(template, str) or several):
        raise UserError(
            f"the tokenizer {source}: chat_template is {describe(template)}; it must be a text, or"
            " a list of {name, template}"
        )


def find_differences(tokenizer: Any) -> str | None:
    """Describe the difference between the tokenizer that transformers loaded and its
    tokenizer.json.

    A sentence with both token sequences of a text and the parts that differ; None if both are alike
    or there is no such file here.
    """
    from tokenizers import Tokenizer

    source = str(tokenizer.name_or_path)
    file = _find_file(source)
    if file is None:
        return None
    try:
        stored = Tokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # as above
        return f"{file} cannot be read by itself ({_say(error)}), though transformers loads it"
    check_patterns(stored, source)
    stored.no_truncation()
    stored.no_padding()
    loaded = tokenizer.backend_tokenizer
    added = [token.content for token in stored.get_added_tokens_decoder().values()][:40]
    for text in (*PROBES, *(f"a {token} b{token}c" for token in added)):
        for special in (False, True):
            loaded_ids = loaded.encode(text, add_special_tokens=special).ids
            stored_ids = stored.encode(text, add_special_tokens=special).ids
            if loaded_ids != stored_ids:
                parts = ", ".join(_compare(loaded, stored)) or "no part by name"
                return (
                    f"transformers ({type(tokenizer).__name__}) does not tokenize as {file} says:"
                    f" {shorten(text)} becomes {_cut(loaded_ids)}, by the file"
                    f" {_cut(stored_ids)}; they"
                    f" differ in {parts}. This run goes on"
                    " with the first; if the model was trained with the second, set tokenizer_class"
                    ' to "PreTrainedTokenizerFast" in tokenizer_config.json'
                )
    return None


def _find_file(source: str, name: str = "tokenizer.json") -> Path | None:
    if Path(source).is_dir():
        file = Path(source) / name
        return file if file.is_file() else None
    try:
        cached = try_to_load_from_cache(source, name)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def _compare(first: Any, second: Any) -> list[str]:
    loaded, stored = (json.loads(tokenizer.to_str()) for tokenizer in (first, second))
    return [part for part in PARTS if loaded.get(part) != stored.get(part)]


def _cut(ids: list[int]) -> str:
    return f"[{', '.join(map(str, ids[:12]))}{', ...' if len(ids) > 12 else ''}]"


def _say(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return escape_control_chars(lines[0])[:300]


_KINDS = {
    str: "a text",
    dict: "an object",
    list: "a list",
    bool: "true or false",
    int: "a number",
    float: "a number",
}


def remove_tokens_beyond(tokenizer: Any, rows: int) -> list[str]:
    """Remove the added tokens with ids from `rows` on, which the model has no embeddings for, and
    return them: texts that spell them are text. Gemma 3's models of text alone name the token of
    images so. Nothing is removed if other tokens, bos or eos are beyond."""
    if max(tokenizer.added_tokens_decoder, default=0) < rows:
        return []  # the state below is megabytes, which take a second
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    beyond = [token for token in state["added_tokens"] if token["id"] >= rows]
    needed = {tokenizer.bos_token, tokenizer.eos_token}.intersection(t["content"] for t in beyond)
    if not beyond or needed or len(tokenizer) - len(beyond) > rows:
        return []
    state["added_tokens"] = [token for token in state["added_tokens"] if token not in beyond]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    return [token["content"] for token in beyond]


def compare_vocabularies(tokenizer: Any, reference: Any) -> str | None:
    """Describe the token ids that differ between two tokenizers, as a part of a sentence; None if
    all agree. Tokens that only the reference has, behind all others, are never asked about."""
    token_of, reference_token_of = (
        {i: token for token, i in table.get_vocab().items()} for table in (tokenizer, reference)
    )
    differs = sorted(
        i
        for i in token_of.keys() | reference_token_of.keys()
        if token_of.get(i) != reference_token_of.get(i) and i <= max(token_of)
    )
    if not differs:
        return None
    first = differs[0]
    first_token, reference_token = (
        shorten(repr(table[first])) if first in table else "no token"
        for table in (token_of, reference_token_of)
    )
    return (
        f"{len(differs):,} of {max(len(token_of), len(reference_token_of)):,} ids differ, the"
        f" first of them {first}:"
        f" {escape_control_chars(first_token)} here, {escape_control_chars(reference_token)} there"
    )
