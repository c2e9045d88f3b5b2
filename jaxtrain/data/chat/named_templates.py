"""Chat templates that model.chat_template can name, for tokenizers without a template.

They write the texts of a conversation in the format of that model family. Tools and thinking need a
model's own template; rows with parts that a template omits are refused (see template.py).
"""

import json
from pathlib import Path
from typing import Any

from jaxtrain.config.bundled import recipes_folder
from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import read_text
from jaxtrain.text_safety import show

ASSETS = Path(__file__).parents[2] / "assets"
BUILTIN = ASSETS / "tokenizer"
FOLDER = ASSETS / "chat_templates"

TOKENS: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": ("[INST]", "[/INST]"),
    "mistral_v1": (),
    "mistral_v3_tekken": ("[INST]", "[/INST]"),
    "mistral_v7_tekken": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
    "phi3": ("<|user|>", "<|assistant|>", "<|end|>"),
    "phi4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "zephyr": (),
    "alpaca": (),
    "vicuna": (),
}
"""Control tokens of each template besides bos and eos. chatml is "builtin"."""


def read_template(name: str) -> str:
    """Return the text of a named template or of a file; UserError if there is neither."""
    if name in ("builtin", "chatml"):
        config = json.loads((BUILTIN / "tokenizer_config.json").read_text(encoding="utf-8"))
        return config["chat_template"]
    if name in TOKENS:
        return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    # A config that comes with jaxtrain names a template beside it, from wherever it is used.
    file = next((f for f in (Path(name), recipes_folder().parent / name) if f.is_file()), None)
    if file is None:
        raise UserError(
            f"model.chat_template: no such file: {show(name)}, and no template of that name; named"
            f" are {', '.join(TOKENS)}"
        )
    return read_text(file)


def require_tokens(tokenizer: Any, name: str) -> None:
    """Raise UserError if the tokenizer lacks a control token of a named template.

    It would be encoded letter by letter, and the end of a turn would be no special token.
    """
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in TOKENS.get(name, ()) if token not in vocabulary]
    if missing:
        fitting = [
            template
            for template, tokens in TOKENS.items()
            if all(token in vocabulary for token in tokens)
        ]
        raise UserError(
            f"model.chat_template {name!r} writes {', '.join(missing)}, which the tokenizer"
            f" {tokenizer.name_or_path} does not have; templates that it has the tokens for:"
            f" {', '.join(fitting)}. Or add them: model.special_tokens.additional_special_tokens"
        )
    if name in TOKENS and "eos_token" in read_template(name) and tokenizer.eos_token is None:
        raise UserError(
            f"model.chat_template {name!r} ends turns with the eos token, which the tokenizer"
            f" {tokenizer.name_or_path} does not name"
        )


def set_template(tokenizer: Any, name: str) -> None:
    """Replace a tokenizer's template by a named one or a file's; UserError if it lacks the tokens
    that a named template writes."""
    require_tokens(tokenizer, name)
    tokenizer.chat_template = read_template(name)
