"""Every command line of ours in the documentation is one that its parser and the config take."""

from functools import cache
from typing import Any, get_origin

import pytest
from pydantic import BaseModel

from jaxtrain.cli import VERBS
from jaxtrain.cli.reference import TRAIN, find_parser
from jaxtrain.config import Config, load_config
from jaxtrain.config.data import DatasetConfig
from jaxtrain.config.load import members
from jaxtrain.config.overrides import list_presets
from jaxtrain.errors import UserError
from tests.docs.blocks import ROOT, list_blocks, list_commands, list_inline

BLOCKS = [*list_blocks(), *list_inline()]
parser_of = cache(find_parser)


def check(words: list[str]) -> None:
    """Raise UserError or AssertionError where a command line would not be taken."""
    verb, rest = "train", words
    if words and not words[0].startswith("-") and "=" not in words[0]:
        verb, rest = words[0], words[1:]
        assert verb in VERBS, f"no verb {verb!r}"
    if verb == "quickstart":
        verb, rest = "train", ["--config", "configs/quickstart.toml", *rest]
    if {"-h", "--help", "--version"} & set(rest):
        return
    parser = parser_of(VERBS[verb].function if verb in VERBS else TRAIN)
    args = parser.parse_intermixed_args(rest)
    overrides = [word for word in getattr(args, "overrides", []) if "=" in word]
    config = getattr(args, "config", None)
    if config and (ROOT / config).exists():
        load_config(ROOT / config, overrides)
        return
    assert config is None or not str(config).startswith("configs/"), f"no file {config}"
    for word in overrides:
        key, _, value = word.partition("=")
        assert is_key(key.split("."), value), f"no key {key!r}"


def is_key(parts: list[str], value: str) -> bool:
    """Return whether the config, or a dataset beside it, has that key; one part is a section's
    preset."""
    if len(parts) == 1:
        return value in list_presets().get(parts[0], [])
    sections: list[type[BaseModel]] = [Config]
    if parts[0] == "dataset":
        sections, parts = [DatasetConfig], parts[1:]
    for part in parts:
        if part.isdigit():
            continue
        fields = [entry.model_fields[part] for entry in sections if part in entry.model_fields]
        if not fields:
            return False
        if any(_is_table(field.annotation) for field in fields):
            return True
        sections = [section for field in fields for section in members(field.annotation)]
    return True


def _is_table(annotation: Any) -> bool:
    parts = (annotation, *getattr(annotation, "__args__", ()))
    return any(get_origin(part) is dict or part is dict for part in parts)


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}))
def test_commands_of_a_page_are_taken(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    wrong = []
    for block in (block for block in BLOCKS if block.page == page):
        for words in list_commands(block):
            try:
                check(words)
            except (UserError, AssertionError) as error:
                wrong.append(f"{block.place}: jaxtrain {' '.join(words)}: {error}")
    assert not wrong, "\n".join(wrong)


def test_wrong_commands_are_found():
    for words in (
        ["gnerate", "runs/quickstart"],
        ["generate", "runs/quickstart", "--promt", "Hello"],
        ["--config", "configs/none.toml"],
        ["--config", "configs/quickstart.toml", "optim.learning_rat=1e-3"],
        ["generate", "RUN", "sampling.temprature=0"],
        ["eval", "RUN", "model=tinny"],
    ):
        with pytest.raises((UserError, AssertionError)):
            check(words)
    check(["generate", "RUN", "dataset.split=test", "rollout.vllm.servers.0=http://a:8000"])
