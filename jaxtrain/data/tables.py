"""Columnar files as rows: parquet, arrow, csv and what the datasets library reads."""

import csv
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError


class TableRows:
    """Rows of a datasets.Dataset, which is memory-mapped and pickles by its file."""

    def __init__(self, table: Any, name: str) -> None:
        self.table = table
        self.name = name

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.table[int(index)]
        return {key: prune(value) for key, value in row.items()}

    def origin(self, index: int) -> str:
        """Name and number of the row, from 1."""
        return f"{self.name} row {index + 1}"


class CsvRows:
    """Rows of a csv file with a header line, in memory; every value is a string."""

    def __init__(self, path: str) -> None:
        self.path = str(path)
        try:
            with open(path, newline="", encoding="utf-8-sig") as file:
                reader = csv.reader(file, strict=True)
                self.columns = next(reader, [])
                self.rows = [row for row in reader if row]
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{self.path} is not a readable csv file: {error}") from error
        if not self.rows:
            raise UserError(f"{self.path} is empty: it needs a header line and rows")
        for number, row in enumerate(self.rows, 1):
            if len(row) != len(self.columns):
                raise UserError(
                    f"{self.path} row {number}: {len(row)} values, but the header names "
                    f"{len(self.columns)} columns"
                )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(zip(self.columns, self.rows[index], strict=True))

    def origin(self, index: int) -> str:
        """File and number of the row, from 1."""
        return f"{Path(self.path).name} row {index + 1}"


def prune(value: Any) -> Any:
    """A value without the nulls that a columnar format puts where a key was absent.

    Objects in a list share one set of keys there: a message without tool calls comes back with
    tool_calls = null, a call's arguments with every argument of every other call.
    """
    if isinstance(value, dict):
        return {key: prune(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [prune(item) for item in value]
    return value


def open_parquet(path: str) -> TableRows:
    """A parquet file through the memory-mapped cache of datasets."""
    import pyarrow
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        table = Dataset.from_parquet(path)
    except (OSError, ValueError, pyarrow.ArrowException, DatasetGenerationError) as error:
        reason = error.__cause__ or error
        raise UserError(f"{path} is not a readable parquet file: {reason}") from error
    return TableRows(table, Path(path).name)


def open_arrow(path: str) -> TableRows:
    """An arrow file in the stream form (as datasets writes) or the file form, memory-mapped."""
    import pyarrow
    from datasets import Dataset

    try:
        with open(path, "rb") as file:
            file_form = file.read(6) == b"ARROW1"
        if file_form:
            table = Dataset(pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all())
        else:
            table = Dataset.from_file(path)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is not a readable arrow file: {error}") from error
    return TableRows(table, Path(path).name)


def open_saved(folder: str, split: str) -> TableRows:
    """A folder written by datasets' save_to_disk, of one split or of several."""
    from datasets import DatasetDict, load_from_disk

    table = load_from_disk(folder)
    if isinstance(table, DatasetDict):
        if split not in table:
            raise UserError(f"{folder} has no split {split!r}, only {', '.join(map(str, table))}")
        table = table[split]
    return TableRows(table, Path(folder).name)
