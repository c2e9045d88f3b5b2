"""Record of the model that a run started from: where it was, and which weights. No jax here.

RUN/base/base_of_run.json, {"path", "fingerprint"}; core/base_model.py writes it and what is beside.
"""

import json
from pathlib import Path
from typing import NamedTuple

from jaxtrain.errors import UserError
from jaxtrain.huggingface.packed import fingerprint

FOLDER, ABOUT = "base", "base_of_run.json"


class BaseRecord(NamedTuple):
    """The base that a run started from."""

    path: str
    """Where it was: an absolute folder, a file or a Hub id."""
    fingerprint: str
    """Of its weights; "" where only its config was read."""


def read_base(run: Path) -> BaseRecord | None:
    """Return what a run recorded of its base; None for older runs and for random starts."""
    try:
        record = json.loads((run / FOLDER / ABOUT).read_bytes())
        return BaseRecord(str(record["path"]), str(record["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def require_weights(folder: Path) -> None:
    """Raise UserError for a run's copy of its base, from which no weights can be read."""
    if (record := read_base(folder.parent)) is not None and folder.name == FOLDER:
        raise UserError(
            f"model.path: {record.path} is not here any more, and {folder} has its config and"
            " tokenizer but no weights, which are needed for this; name where the base is now with"
            " model.path=FOLDER"
        )


def is_same_base(run: Path, folder: Path | None) -> bool | None:
    """Return whether a folder holds the weights that a run started from; None if unknown."""
    record = read_base(run)
    if record is None or folder is None or not record.fingerprint:
        return None
    return folder == run / FOLDER or fingerprint(folder) == record.fingerprint


def require_same_base(run: Path, folder: Path | None, cure: str) -> None:
    """Raise UserError where a base's weights are not those that the run started from."""
    if is_same_base(run, folder) is False:
        raise UserError(
            f"{folder} holds other weights than the base that {run} was trained on had, and its"
            f" adapter fits that one only; {cure}"
        )
