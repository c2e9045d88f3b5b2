"""generation_config.json: the sampling defaults of a model's authors. jaxtrain samples by section
sampling alone, so it reports settings that it ignores and files that would break servers; exports
have such a file for those servers."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import describe, read_object

NAME = "generation_config.json"
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
NEUTRAL = {"temperature": 1, "top_p": 1, "top_k": 50, "min_p": 0, "repetition_penalty": 1}
"""What transformers takes where nothing is said."""


def find_problem(folder: Path) -> str | None:
    """Describe the problem with the folder's file; None if it is valid or absent."""
    try:
        _read(folder)
    except UserError as error:
        return (
            f"{error}; nothing here reads it (section sampling says how answers are drawn), but"
            " vLLM and transformers do: mend it or delete it"
        )
    return None


def describe_ignored(folder: Path) -> str | None:
    """Describe the sampling settings of a valid file, which are ignored; None if there are none."""
    try:
        settings = _read(folder)
    except UserError:
        return None  # told by find_problem
    ignored = [
        f"{key} {settings[key]:g}"
        for key in NEUTRAL
        if settings.get(key) is not None and settings[key] != NEUTRAL[key]
    ]
    if not ignored:
        return None
    options = [
        f"sampling.{setting.replace(' ', '=')}"
        for setting in ignored
        if not setting.startswith("rep")
    ]
    return (
        f"{folder / NAME} says {', '.join(ignored)}, which is not read: answers are drawn as"
        " section"
        f" sampling says{' (' if options else ''}{' '.join(options)}{')' if options else ''}"
    )


def read_ends(location: str) -> list[int]:
    """Return the tokens that end answers, as the file of a folder, or of a Hub id's snapshot here,
    lists them; empty without a valid file."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(location)
    if not folder.is_dir():
        cached = try_to_load_from_cache(location, NAME)
        if not isinstance(cached, str):
            return []
        folder = Path(cached).parent
    try:
        return _list_ends(_read(folder))
    except UserError:
        return []  # reported by find_problem


def write_generation(folder: Path, base: Path | None, ends: Collection[int]) -> None:
    """Write the file next to exported weights: the settings of `base`, if valid, and the tokens
    that end this model's answers. vLLM and transformers stop at all of them; config.json names only
    those of the base."""
    try:
        settings = {} if base is None else _read(base)
    except UserError:
        settings = {}  # told when the run began
    ids = _list_ends(settings)
    settings["eos_token_id"] = ids + [token for token in sorted(ends) if token not in ids]
    (folder / NAME).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _list_ends(settings: dict[str, Any]) -> list[int]:
    eos = settings.get("eos_token_id")
    listed = list(eos) if isinstance(eos, list) else [eos]
    return [token for token in listed if token not in (None, -1)]  # -1: none


def _read(folder: Path) -> dict[str, Any]:
    file = folder / NAME
    if not file.exists():
        return {}
    settings = read_object(file)
    for key in NUMBERS:
        value = settings.get(key)
        if value is not None and type(value) not in (int, float):
            raise UserError(f"{file}: {key} is {describe(value)}; it is a number")
    if not all(type(item) is int for item in _list_ends(settings)):
        value = describe(settings["eos_token_id"])
        raise UserError(f"{file}: eos_token_id is {value}; it is an id or a list of them")
    return settings
