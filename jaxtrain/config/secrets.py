"""Keys and passwords in a config: never written anywhere, and named instead of repeated.

A text under a name like `api_key`, `token`, `password` or `authorization` (in the options of
rewards, environments and engines) is a secret, and so is what stands before the @ of a URL.
Whatever keeps or shows a config (config.json, checkpoints, sinks, --print-config) gets `redact` of
it.

    options = {api_key = "$JUDGE_KEY"}      or "env:JUDGE_KEY": the environment variable, read where
                                            the option is used; only its name is kept
    options = {api_key = "sk-..."}          used, but kept as HIDDEN: who opens the run again gives
                                            it again, by its config file or an override
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.text_safety import HIDDEN as HIDDEN
from jaxtrain.text_safety import REFERENCE, URL
from jaxtrain.text_safety import redact_text as redact_text

_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_SECRET = {
    *("password", "passwords", "passwd", "passphrase", "pwd", "secret", "secrets", "apikey"),
    *("apikeys", "credential", "credentials", "authorization", "auth", "bearer", "cookie"),
}
_MAYBE = {"key", "keys", "token"}
"""Words that also name columns and tokens of a vocabulary."""
_PLAIN = {
    *("column", "row", "json", "dict", "sort", "group", "primary", "prompt", "answer", "field"),
    *("label", "target", "eos", "bos", "pad", "end", "start", "stop", "begin", "mask", "special"),
    *(
        "think",
        "sep",
        "unk",
        "tool",
        "new",
        "estimate",
        "max",
        "min",
        "num",
        "per",
        "first",
        "last",
        "next",
    ),
}
_NAMES = {"var", "env", "file", "path", "name", "variable"}
"""Last words of keys that say where a secret is, not what it is."""


def is_secret(name: str) -> bool:
    """Return whether a key of this name holds a secret: api_key, hf_token, Authorization,
    X-Api-Key."""
    words = [word.lower() for word in _WORDS.findall(name[:200])]
    if not words or words[-1] in _NAMES:
        return False
    if _SECRET & set(words):
        return True
    return bool(_MAYBE & set(words)) and not _PLAIN & set(words)


def hides(location: Sequence[Any]) -> bool:
    """Return whether the value at a location of the config (keys from the root) must be hidden."""
    return any(isinstance(part, str) and is_secret(part) for part in location)


def redact(value: Any, secret: bool = False, *, references: bool = False) -> Any:
    """Return a dumped config with HIDDEN in place of secrets. Names of environment variables stay,
    but with `references` go as well, so that two configs can be compared."""
    if isinstance(value, Mapping):
        return {
            key: redact(entry, secret or is_secret(str(key)), references=references)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(entry, secret, references=references) for entry in value]
    if not isinstance(value, str) or (REFERENCE.match(value) and not references):
        return value
    return HIDDEN if secret and value else redact_text(value)


def redact_command(words: Sequence[str]) -> list[str]:
    """Return a command line with HIDDEN for secret options of overrides, in tables, too."""
    return [_redact_word(*word.partition("=")) for word in words]


def _redact_word(key: str, equals: str, value: str) -> str:
    parts = key.split(".")
    if equals and hides(parts):
        return f"{key}={value if REFERENCE.match(value) else HIDDEN}"
    if equals and parts[-1] == "options":  # of code from outside, whose names may be any
        return f"{key}={HIDDEN}"
    if not (equals and "{" in value):
        return redact_text(f"{key}{equals}{value}")
    try:
        table = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:  # what stands in it cannot be told apart
        return f"{key}={HIDDEN}"
    redacted = redact({parts[-1]: table})[parts[-1]]
    return f"{key}={value if redacted == table else json.dumps(redacted)}"


def reveal(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Options as they are used: "$NAME" and "env:NAME" under a secret's name are the environment
    variable. UserError where that is not set, or where a saved config no longer has the secret."""
    return {
        name: _reveal(option, is_secret(name), f"{key}.{name}") for name, option in options.items()
    }


def reveal_url(url: str, key: str) -> str:
    """A URL as it is used: "$NAME" before the @ is the environment variable. UserError: reveal."""
    return URL.sub(lambda match: f"{match[1]}{_look_up(match[2], key)}@", url)


def _reveal(value: Any, secret: bool, key: str) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _reveal(entry, secret or is_secret(name), f"{key}.{name}")
            for name, entry in value.items()
        }
    if isinstance(value, list):
        return [_reveal(entry, secret, f"{key}.{index}") for index, entry in enumerate(value)]
    return _look_up(value, key) if isinstance(value, str) and (secret or HIDDEN in value) else value


def _look_up(value: str, key: str) -> str:
    if HIDDEN in value:
        raise UserError(
            f"{key} is a secret, which runs do not save; give it again with {key}=..., or write"
            f' "$NAME" in the config and set that environment variable'
        )
    match = REFERENCE.match(value)
    if match is None:
        return value
    name = next(filter(None, match.groups()))
    if name not in os.environ:
        raise UserError(f"{key} is {value!r}, but the environment variable {name} is not set")
    return os.environ[name]
