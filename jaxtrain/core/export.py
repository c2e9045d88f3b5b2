"""A trained model as a Hugging Face folder, or an adapter as a PEFT folder; tokenizer and card."""

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jaxtrain
from jaxtrain.config import Config
from jaxtrain.config.base import make_absolute
from jaxtrain.config.provenance import list_outside
from jaxtrain.config.secrets import redact
from jaxtrain.core.architecture import openable_name
from jaxtrain.core.roles import ModelSnapshot
from jaxtrain.data.chat.template import end_of_turn_ids
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import check_inside
from jaxtrain.huggingface.generation import write_generation
from jaxtrain.models import saving
from jaxtrain.runs.run_files import replace_folder

PROCESSOR = "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"
"""Files about the preprocessing of images and videos, which training does not change."""


def export_model(
    snapshot: ModelSnapshot, config: Config, folder: Path, dtype: str | None = None
) -> None:
    """Write the trained model to `folder` as a whole or not at all; the run's older one is
    replaced, anything else that is there is refused.

    A full model; of a run with adapters a PEFT folder. dtype None keeps each tensor's dtype of the
    folder that the run started from, or that of what was trained. Every process takes part; the
    first one writes.
    """
    params, bundle = snapshot.params(), snapshot.roles.bundle
    writes = is_main_process()
    # The other processes write nothing, but gather: saving is collective.
    with replace_folder(folder) if writes else contextlib.nullcontext(folder) as unfinished:
        if bundle.adapter is None:
            model = snapshot.model()
            base = bundle.folder if snapshot.step else None
            loss = saving.save(model, bundle.architecture, unfinished, dtype=dtype, base=base)
            if loss.share >= loss.NOTED:
                print(
                    f"warning: {folder}: rounding to {dtype or 'the dtypes of the base'} moved the"
                    f" tensors by {loss.share:.0%} of what training changed (root mean squares);"
                    " keep it with jaxtrain export --dtype float32"
                )
            if writes and bundle.folder is not None:
                copy_processor(bundle.folder, unfinished)
            if writes and bundle.architecture.score is None:
                write_generation(unfinished, bundle.folder, find_ends(bundle.tokenizer))
            if (
                writes
                # Before the first step they fit: the model is still the one that they were trained
                # with.
                and snapshot.step
                and (stale := saving.count_stale(model, bundle.architecture))
            ):
                names = ", ".join(f"{prefix}*" for prefix in bundle.architecture.goes_stale)
                print(
                    f"{folder}: {stale} tensors ({names}) guess from hidden states of the model"
                    " before training; they are copied as they were, and guess worse now"
                )
        else:
            from jaxtrain.adapters.peft import write_peft

            base = config.model.path and make_absolute("model.path", config.model.path)
            base = base and openable_name(base)
            write_peft(params, bundle.architecture, bundle.adapter, unfinished, base, dtype)
        if writes:
            bundle.tokenizer.save_pretrained(unfinished)
            image_format = getattr(bundle.tokenizer, "image_format", None)
            if image_format is not None and bundle.folder is None:  # else the folder's own is there
                image_format.write(unfinished)
            (unfinished / "README.md").write_text(write_card(config, snapshot.step))


def copy_processor(base: Path, folder: Path) -> None:
    """Copy the files of PROCESSOR that a folder has."""
    for name in PROCESSOR:
        if (base / name).is_file():
            check_inside(base, base / name)
            shutil.copyfile(base / name, folder / name)


def find_ends(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer of a model trained with this tokenizer."""
    try:
        return end_of_turn_ids(tokenizer)
    except UserError:  # a template that renders no plain turn: only runs on plain text come here
        return end_of_turn_ids(tokenizer, raw=True)


def export_policies(
    export: Callable[..., None],
    snapshots: Mapping[str, ModelSnapshot],
    config: Config,
    folder: Path,
    dtype: str | None = None,
) -> None:
    """Export several policies like `export_model`, each in a folder of its name within `folder`,
    which is replaced as a whole."""
    with replace_folder(folder) if is_main_process() else contextlib.nullcontext(folder) as target:
        for name, snapshot in snapshots.items():
            export(snapshot, config, target / name, dtype)


def write_card(config: Config, step: int) -> str:
    """Return the model card: the model's origin and every setting that differs from its default."""
    changed = redact(config.model_dump(mode="json", exclude_defaults=True))
    return f"""\
---
library_name: {"transformers" if config.adapter.kind == "none" else "peft"}
tags: [jaxtrain, {config.task.kind}]
---

Trained with jaxtrain {jaxtrain.__version__} from {config.task.started_from(config)}: task \
{config.task.kind}, {step} steps.

Settings that differ from the defaults:

```json
{json.dumps(changed, indent=2)}
```
{describe_outside(config)}"""


def describe_outside(config: Config) -> str:
    """Return a list of the code that the run took from outside jaxtrain; empty if there is none."""
    lines = []
    for source in list_outside(config):
        owner = "a file" if "sha256" in source else "a package that is not installed"
        if "distribution" in source:
            owner = f"{source['distribution']} {source['version']}"
        digits = f", sha256 {source['sha256']}..." if "sha256" in source else ""
        lines.append(f"- {source['group']}: `{source['name']}`, of {owner}{digits}")
    return "\n".join(["", "Code from outside jaxtrain:", "", *lines, ""]) if lines else ""
