"""The folder `base` of a run: what the model that it starts from is needed for later.

base/config.json, tokenizer, generation_config.json   the base's own, and its template
base/model.safetensors     its tensors' dtypes; data only of those that exports carry along
base/base_of_run.json      {"path", "fingerprint"}: where it was, and which weights they were
base/tokenizer/            model.tokenizer, where that is another folder
base/template.jinja        model.chat_template, where that is a file

So a run can be opened, exported and gone on with after its base was moved, and weights that took
the base's place are noticed. Frozen weights are not copied: an adapter needs its base itself.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config import Config
from jaxtrain.core.architecture import find_folder
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.errors import UserError
from jaxtrain.huggingface.copy import copy_beside
from jaxtrain.huggingface.files import read_object
from jaxtrain.huggingface.ops import SplitPiece, full_index
from jaxtrain.huggingface.packed import fingerprint, is_packed, open_folder, without_packing
from jaxtrain.huggingface.safetensors import write_folder
from jaxtrain.runs.base_record import ABOUT, FOLDER, BaseRecord, read_base
from jaxtrain.runs.run_files import replace_folder

TOKENIZER, TEMPLATE = "tokenizer", "template.jinja"


def keep_base(
    run: Path, config: Config, base: Path, bundle: ModelBundle, log: Callable[[str], None]
) -> None:
    """Copy what later exports need of a base into the run's folder; nothing where that is there
    already. base: folder that model.path was opened from. bundle: of the trained model. A copy that
    fails is logged: it is no reason to stop."""
    if base == run / FOLDER:
        return
    try:
        record = BaseRecord(config.absolute()["model"]["path"], fingerprint(base))
        if (earlier := read_base(run)) is not None and earlier.fingerprint == record.fingerprint:
            return
        with replace_folder(run / FOLDER) as unfinished:
            copy_beside(base, unfinished)
            raw = read_object(base / "config.json")
            if is_packed(raw):
                plain = json.dumps(without_packing(raw), indent=2, sort_keys=True)
                (unfinished / "config.json").write_text(plain + "\n")
            exports_all = bundle.adapter is None and bundle.folder == base
            write_dtypes(base, unfinished, bundle.architecture.carries if exports_all else ())
            model = config.model
            if model.tokenizer and model.tokenizer != model.path and Path(model.tokenizer).is_dir():
                (unfinished / TOKENIZER).mkdir()
                copy_beside(Path(model.tokenizer), unfinished / TOKENIZER)
            if model.chat_template and Path(model.chat_template).is_file():
                shutil.copyfile(model.chat_template, unfinished / TEMPLATE)
            (unfinished / ABOUT).write_text(json.dumps(record._asdict(), indent=2) + "\n")
    except (UserError, OSError) as error:
        log(f"warning: {run / FOLDER} is not written, so exports will need {base}: {error}")


def write_dtypes(source: Path, folder: Path, carries: tuple[str, ...]) -> None:
    """Write a weights file whose tensors are empty, but for those that begin with `carries`, which
    exports copy from the base."""
    files = open_folder(source)
    plan = {
        name: (stored.shape if name.startswith(carries) else (0,), np.dtype(stored.dtype))
        for name, stored in sorted(files.tensors.items())
    }

    def pieces() -> Iterator[SplitPiece]:
        for name, (shape, _) in plan.items():
            if shape != (0,):
                index = full_index(shape)
                yield SplitPiece(name, shape, index, files.fetch(name, index))

    write_folder(folder, plan, pieces())


def with_saved_base(config: Config, run: Path) -> Config:
    """Return the config with the run's own copies in the place of a base, a tokenizer and a
    template that are not there any more."""
    model, saved = config.model, run / FOLDER
    update: dict[str, Any] = {}
    if model.path and (saved / ABOUT).is_file() and not can_open(model.path):
        update["path"] = str(saved)
    if model.tokenizer and (saved / TOKENIZER).is_dir() and not can_open(model.tokenizer):
        update["tokenizer"] = str(saved / TOKENIZER)
    template = model.chat_template
    if template and (saved / TEMPLATE).is_file() and os.path.isabs(template):
        if not os.path.exists(template):
            update["chat_template"] = str(saved / TEMPLATE)
    return config.model_copy(update={"model": model.model_copy(update=update)})


def can_open(name: str) -> bool:
    """Return whether a model's folder, file or Hub id can be opened."""
    try:
        find_folder(name, weights=False)
    except UserError:
        return False
    return True
