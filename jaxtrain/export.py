"""A trained model as a Hugging Face folder: safetensors, config.json, tokenizer and a card."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jaxtrain
from jaxtrain.config import Config
from jaxtrain.errors import UserError
from jaxtrain.models import build
from jaxtrain.trained import open_trained


def export_model(
    model: Any,
    architecture: Any,
    tokenizer: Any,
    folder: Path,
    *,
    config: Config,
    step: int,
    dtype: str | None = None,
) -> None:
    """Write `folder` as a whole or not at all; an older export there is replaced.

    model: concrete, on any mesh. dtype None keeps each tensor's dtype of the checkpoint that the
    run started from, or the masters' dtype of a random start.
    """
    folder = Path(folder)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        build.save(model, architecture, unfinished, dtype=dtype)
        tokenizer.save_pretrained(unfinished)
        (unfinished / "README.md").write_text(write_card(config, step))
        if folder.exists():
            retired = folder.with_name(f".{folder.name}.old")
            shutil.rmtree(retired, ignore_errors=True)
            os.replace(folder, retired)
            shutil.rmtree(retired, ignore_errors=True)
        os.replace(unfinished, folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise UserError(f"cannot write the model to {folder}: {error.strerror or error}") from None


def write_card(config: Config, step: int) -> str:
    """The model card: what it came from and every setting that differs from its default."""
    changed = config.model_dump(mode="json", exclude_defaults=True)
    trained = config.model.path if config.model.init == "pretrained" else None
    return f"""\
---
library_name: transformers
tags: [jaxtrain, {config.task.kind}]
---

Trained with jaxtrain {jaxtrain.__version__} from {trained or "random weights"}: task \
{config.task.kind}, {step} steps.

Settings that differ from the defaults:

```json
{json.dumps(changed, indent=2)}
```
"""


def export_command(run: Path, output: Path, step: int | None, dtype: str | None) -> None:
    """The verb `export`: a checkpoint of a run as a Hugging Face folder."""
    trained = open_trained(str(run), [], step)
    if trained.step == 0:
        raise UserError(f"export: {run} is not a run's output_dir")
    export_model(
        trained.model,
        trained.parts.architecture,
        trained.parts.tokenizer,
        output,
        config=trained.config,
        step=trained.step,
        dtype=dtype,
    )
    print(f"step {trained.step} of {run} is now in {output}")
