"""Formats from outside: functions of (row, tokenizer, dataset) that the key `format` names."""

from typing import Any

from jaxtrain import plugins
from jaxtrain.config.data import FORMATS, DatasetConfig
from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.errors import UserError


def find_outside(dataset: DatasetConfig) -> Any:
    """The function that reads rows of the dataset; None for a format of jaxtrain's own."""
    if dataset.format in FORMATS:
        return None
    key = f"{dataset.path}: format"
    return plugins.find("formats", dataset.format, dict.fromkeys(FORMATS), key=key)


def ask_outside(read: Any, row: dict[str, Any], tokenizer: Any, dataset: DatasetConfig) -> Any:
    """What such a function makes of a row; Malformed with its reason for a row to leave out, and
    UserError for any other failure of it."""
    try:
        return read(row, tokenizer, dataset)
    except UserError:
        raise
    except ValueError as error:
        raise MalformedRow(str(error)) from None
    except Exception as error:  # the border: whatever foreign code may raise
        raise UserError(f"format {dataset.format!r}: {plugins.describe(error)}") from error
