"""Section `model` as an architecture and a tokenizer: folders, heads, tokens that are added."""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from jaxtrain.config import Config, ModelConfig
from jaxtrain.data.chat.control_tokens import add_tokens, rows_needed
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.errors import UserError
from jaxtrain.huggingface.chat_template import add_defaults
from jaxtrain.huggingface.config_checks import TASK
from jaxtrain.huggingface.files import read_object
from jaxtrain.huggingface.tokenizer import find_differences
from jaxtrain.models import families
from jaxtrain.models.scores import ScoreHead
from jaxtrain.text_safety import show


def find_tokenizer(model: ModelConfig) -> Any:
    """Return the tokenizer that section model names, with its chat template. Warns on standard
    error of what transformers changes about it."""
    tokenizer = load_tokenizer(tokenizer_source(model))
    if is_main_process() and (difference := find_differences(tokenizer)):
        print(f"warning: {difference}", file=sys.stderr, flush=True)
    special = model.special_tokens
    add_tokens(tokenizer, model.added_tokens, special.additional_special_tokens, special.roles())
    if model.chat_template is not None:
        from jaxtrain.data.chat.named_templates import set_template

        set_template(tokenizer, model.chat_template)
    if kwargs := model.chat_template_kwargs:
        unread = add_defaults(tokenizer, kwargs, "model.chat_template_kwargs")
        if unread and is_main_process():
            print(
                f"note: model.chat_template_kwargs: the chat template never reads"
                f" {', '.join(unread)}",
                file=sys.stderr,
                flush=True,
            )
    return tokenizer


def tokenizer_source(model: ModelConfig) -> str:
    """Return what section model loads its tokenizer from: a GGUF file's is in its folder."""
    name = model.tokenizer or model.path
    assert name is not None, "the config has one of the two"
    return openable_name(name)


def openable_name(name: str) -> str:
    """Return a model's name as transformers and PEFT open it: of a GGUF file, its folder."""
    return str(find_folder(name, weights=True)) if is_gguf(Path(name)) else name


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, or a folder with nothing else for a model."""
    if path.is_dir():
        return not (path / "config.json").is_file() and any(path.glob("*.gguf"))
    return path.suffix == ".gguf" and path.is_file()


def find_architecture(model: ModelConfig) -> tuple[Path | None, dict[str, Any]]:
    """Return (local folder or None, the keys of config.json)."""
    if model.architecture:
        return None, model.architecture
    assert model.path is not None, "the config has one of the two"
    folder = find_folder(model.path, weights=model.init == "pretrained")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"model.path {model.path!r}: {path} does not exist")
    return folder, read_object(path)


def read_architecture(model: ModelConfig) -> Any:
    """Return the family's own Config of what section `model` names, with the head it has there;
    UserError as in `build_model_bundle`."""
    folder, raw = find_architecture(model)
    return read_config(model, raw, folder)


def read_config(model: ModelConfig, raw: dict[str, Any], folder: Path | None) -> Any:
    """Return the family's Config; UserError for an unknown key of section model.architecture,
    where it is a slip rather than a note of the program that wrote a folder."""
    config = families.config_from_hf(raw, model.family, folder)
    unknown = [name for name, _ in config.unread_attributes] if model.architecture else []
    if unknown:
        raise UserError(
            f"model.architecture.{unknown[0]}: model_type {config.model_type!r} has no such key;"
            " remove it or correct its name"
        )
    return config


def find_folder(name: str, weights: bool, key: str = "model.path") -> Path:
    """Return a local folder as it is, the folder of a GGUF file, or the snapshot of a Hub
    repository. key: what names it."""
    if is_gguf(Path(name)):
        from jaxtrain.models.gguf import open_gguf  # needs an extra, and few open such files

        return open_gguf(Path(name))
    if Path(name).is_dir():
        return Path(name)
    # A missing folder must not become a request to the Hub, whose error would hide the mistake.
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or name.endswith(".gguf"):
        from jaxtrain.models.gguf import CACHE

        kind = "file" if name.endswith(".gguf") else "folder"
        advice = (
            "its GGUF file, opened once more, makes it again: jaxtrain generate FILE.gguf"
            if CACHE in Path(name).parts
            else "give a folder with config.json and safetensors, or a Hub id: Qwen/Qwen3-0.6B"
        )
        raise UserError(f"{key} {name!r} is not a {kind} here{show_absolute(name)}; {advice}")
    # Pickles only where there is nothing else: of these, torch_files reads no code.
    patterns = ["*.json", "*.jinja", "*.txt", *(["*.safetensors"] if weights else [])]
    try:
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        if weights and not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=["pytorch_model*.bin*"]))
        return folder
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{key} {name!r} is not a folder here{show_absolute(name)} and could not be read from"
            f" the Hugging Face Hub: {reason}"
        ) from None


def show_absolute(name: str) -> str:
    """Return where a relative path was looked for, in brackets; "" for an absolute one."""
    return "" if os.path.isabs(name) else f" (no {os.path.abspath(name)})"


def choose_head(architecture: Any, score: ScoreHead | None, key: str = "model.path") -> Any:
    """Return the architecture with the head that a method needs, None for the language model's;
    UserError where it has another one, or for a draft."""
    if architecture.guesses:
        raise UserError(
            f"{key} holds {architecture.architecture}, a draft model, which guesses for a target"
            " and writes nothing alone; name its target here, and the draft as task.draft.path (to"
            " train it) or with --draft"
        )
    if score is None:
        if architecture.score is None:
            return architecture
        name = architecture.to_hf()["architectures"][0]
        raise UserError(
            f"{key} holds {name}, which scores texts and writes none; train it with task.kind"
            ' "reward_model", score with it by `jaxtrain score`, or name a language model'
        )
    if architecture.score is None:
        return families.with_score(architecture, dataclasses.replace(score, drawn=True))
    present = architecture.score
    if (present.per, len(present.labels)) != (score.per, len(score.labels)):
        needed = score.to_hf(architecture.architecture)["architectures"][0]
        raise UserError(
            f"{key} holds {architecture.to_hf()['architectures'][0]} with {len(present.labels)}"
            f" labels; needed is {needed} with {len(score.labels)}, or a language model, which gets"
            " such a head"
        )
    return architecture


def check_kind(kind: str | None, raw: Mapping[str, Any], key: str) -> None:
    """Refuse a folder that another method reads: its tokens would be misread as those of a causal
    model. kind: the method's task.kind; None: none that folders name."""
    named = (raw.get(TASK) or {}).get("kind")
    if named is not None and named != kind:
        raise UserError(
            f"{key} holds a model of task.kind {show(named)}, which predicts no next token; set"
            f" task.kind to it, name another model, or, to train it as a causal one after all, take"
            f" {TASK} out of its config.json"
        )


def keep_task(architecture: Any, section: Mapping[str, Any], **ids: int) -> Any:
    """Return the architecture with what its exports carry for the method that reads them: the
    section task that opens them, and ids of tokens."""
    carried = {**dict(architecture.carried_attributes), TASK: json.dumps(section, sort_keys=True)}
    carried |= {name: str(index) for name, index in ids.items()}
    return dataclasses.replace(architecture, carried_attributes=tuple(carried.items()))


def name_padding(architecture: Any, tokenizer: Any) -> Any:
    """Return the architecture with the tokenizer's pad token where it names none: transformers
    finds the last token of a text by it."""
    carried = dict(architecture.carried_attributes)
    if carried.get("pad_token_id", "null") == "null" and tokenizer.pad_token_id is not None:
        carried["pad_token_id"] = str(int(tokenizer.pad_token_id))
    return dataclasses.replace(architecture, carried_attributes=tuple(carried.items()))


def grow_tables(config: Config, architecture: Any, tokenizer: Any) -> tuple[Any, tuple[int, ...]]:
    """Return (the architecture with rows for the tokens that section model adds, and with their
    ids; the ids of those tokens whose rows were never trained).

    A model that is trained whole gets a number of rows that shards over devices as before; with an
    adapter there are as many as tokens, so that `resize_token_embeddings(len(tokenizer))` makes
    its base.
    """
    model, trains_all = config.model, config.adapter.kind == "none"
    roles = model.special_tokens.roles()
    added = [*model.added_tokens, *model.special_tokens.additional_special_tokens, *roles.values()]
    if not added:
        return architecture, ()
    carried = dict(architecture.carried_attributes)
    carried |= {f"{role}_id": str(int(getattr(tokenizer, f"{role}_id"))) for role in roles}
    architecture = dataclasses.replace(architecture, carried_attributes=tuple(carried.items()))
    stored = architecture.vocab_size
    rows = rows_needed(tokenizer, stored) if trains_all else max(stored, len(tokenizer))
    if rows > stored and config.rollout.engine in ("vllm", "sglang"):
        raise UserError(
            f"model.added_tokens: the tokenizer has {len(tokenizer)} tokens, the model that servers"
            f" open {stored}; train and export (an adapter: merge) it once with the local engine or"
            " by task.kind sft, and name that folder as model.path"
        )
    vocabulary = load_tokenizer(tokenizer_source(model)).get_vocab()
    ids = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in added}
    # A tokenizer may name more tokens than the stored table has rows.
    untrained = (token for token in added if token not in vocabulary or ids[token] >= stored)
    new = tuple(sorted({ids[token] for token in untrained}))
    if rows > stored:
        architecture = dataclasses.replace(architecture, vocab_size=rows, grown=rows - stored)
        architecture.check()
    return architecture, new
