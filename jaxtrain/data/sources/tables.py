"""Rows of columnar files: parquet, arrow, csv and tables of the datasets library."""

import csv
import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

from jaxtrain.data.sources.jsonl import MAX_FILE, MAX_ROW, check_size
from jaxtrain.errors import UserError
from jaxtrain.safe_io import UnreadableRow, parse_json, read_text
from jaxtrain.text_safety import shorten, show

PIECE, NUM_PIECES = 1 << 20, 64
"""Bytes of a piece of a large file, and how many of them are digested."""
MAX_RECORD = 1 << 24
"""Limit of bytes of the JSON files next to saved tables."""


class TableRows:
    """Rows of a datasets.Dataset, which is memory-mapped and pickles by its file."""

    def __init__(self, table: Any, name: str) -> None:
        # As stored: an image stays a file's bytes or path, which are read within bounds later.
        decodes = _is_decoded(getattr(table, "features", None))
        self.table = table.with_format("arrow") if decodes else table
        self.decodes = decodes
        self.name = name

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row = self.table[int(index)]
            row = row.to_pylist()[0] if self.decodes else row
            return {key: prune(value) for key, value in row.items()}
        except UnicodeDecodeError:
            return UnreadableRow("a text that is not UTF-8")
        except RecursionError:
            return UnreadableRow("nested too deep")

    def origin(self, index: int) -> str:
        """Return the name of a row in messages: table and number, from 1."""
        return f"{self.name} row {index + 1}"


def _is_decoded(feature: Any) -> bool:
    """Return True if datasets would decode values of these features: images, audio and video."""
    if isinstance(feature, dict):
        return any(map(_is_decoded, feature.values()))
    if isinstance(feature, list | tuple):
        return any(map(_is_decoded, feature))
    inner = getattr(feature, "feature", None)
    return hasattr(feature, "decode_example") or (inner is not None and _is_decoded(inner))


class CsvRows:
    """Rows of a csv file with a header line, in memory; every value is a string."""

    def __init__(self, path: str) -> None:
        self.path = str(path)
        check_size(self.path, "convert it to parquet or JSON lines, which are read row by row")
        csv.field_size_limit(MAX_ROW)  # for the whole process; Python's default is 128 KiB
        try:
            with open(path, newline="", encoding="utf-8-sig") as file:
                reader = csv.reader(file, strict=True)
                self.columns = next(reader, [])
                self.rows = [row for row in reader if row]
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{self.path} is not a readable csv file: {error}") from error
        doubled = [name for name, count in Counter(self.columns).items() if count > 1]
        if doubled:
            raise UserError(
                f"{self.path} has several columns called {show(doubled[0])}; give each a name of"
                " its own"
            )
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
        """Return the name of a row in messages: file and number, from 1."""
        return f"{Path(self.path).name} row {index + 1}"


def prune(value: Any) -> Any:
    """Remove the nulls with which a columnar format fills absent keys.

    Objects in a list share one set of keys there: a message without tool calls comes back with
    tool_calls = null, a call's arguments with all arguments of all other calls.
    """
    if isinstance(value, dict):
        return {key: prune(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [prune(item) for item in value]
    return value


def open_parquet(path: str) -> TableRows:
    """Open a parquet file through the memory-mapped cache of datasets.

    That cache knows a file by its path and time stamp, so the name of its entry says what the file
    holds: a replaced file is read anew.
    """
    from datasets import Dataset
    from pyarrow import parquet

    try:
        empty = parquet.read_metadata(path).num_rows == 0  # datasets logs lines of its depths
        table = None if empty else Dataset.from_parquet(path, config_name=digest_file(path))
    except Exception as error:  # libraries raise anything for a damaged file
        raise UserError(f"{path} is not a readable parquet file: {_reason(error)}") from error
    if table is None:
        raise UserError(f"{path} is empty: it has no rows")
    return TableRows(table, Path(path).name)


def digest_file(path: str) -> str:
    """Digest what a file holds: all of it up to MAX_FILE bytes, else pieces from its beginning to
    its end, and what the file system says of its last change."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        digest.update(str(status.st_size).encode())
        if status.st_size <= MAX_FILE:
            while piece := file.read(PIECE):
                digest.update(piece)
            return digest.hexdigest()
        # Nobody can set the time of the change itself, unlike the time stamp.
        digest.update(f" {status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}".encode())
        for number in range(NUM_PIECES):
            file.seek((status.st_size - PIECE) * number // (NUM_PIECES - 1))
            digest.update(file.read(PIECE))
    return digest.hexdigest()


def open_arrow(path: str) -> TableRows:
    """Memory-map an arrow file in the stream format (as written by datasets) or file format."""
    import pyarrow
    from datasets import Dataset

    try:
        with open(path, "rb") as file:
            file_form = file.read(6) == b"ARROW1"
        if file_form:
            table = Dataset(pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all())
        else:
            table = Dataset.from_file(path)
        check_arrow(table)
    except Exception as error:  # libraries raise anything for a damaged file
        raise UserError(f"{path} is not a readable arrow file: {_reason(error)}") from error
    return TableRows(table, Path(path).name)


def open_saved(folder: str, split: str) -> TableRows:
    """Open a folder written by datasets' save_to_disk, of one split or several."""
    from datasets import DatasetDict, load_from_disk

    try:
        check_saved(Path(folder))
        table = load_from_disk(folder)
    except Exception as error:  # libraries raise anything for a damaged folder
        raise UserError(
            f"{folder} is not a readable folder of datasets' save_to_disk: {_reason(error)}"
        ) from error
    if isinstance(table, DatasetDict):
        if split not in table:
            raise UserError(f"{folder} has no split {split!r}, only {', '.join(map(str, table))}")
        table = table[split]
    try:
        check_arrow(table)
    except Exception as error:  # libraries raise anything for a damaged folder
        raise UserError(f"{folder} is damaged: {_reason(error)}") from error
    return TableRows(table, Path(folder).name)


def check_saved(folder: Path) -> None:
    """Raise ValueError if the records of a saved dataset name files outside its folder."""
    splits = folder / "dataset_dict.json"
    if splits.exists():
        record = parse_json(read_text(splits, MAX_RECORD))
        names = record.get("splits") if isinstance(record, dict) else None
        if not isinstance(names, list) or not all(map(_is_name, names)):
            raise ValueError("dataset_dict.json must name its splits in a list")
        for name in names:
            check_saved(folder / name)
        return
    record = parse_json(read_text(folder / "state.json", MAX_RECORD))
    files = record.get("_data_files") if isinstance(record, dict) else None
    named = [
        entry.get("filename") if isinstance(entry, dict) else None for entry in files or [None]
    ]
    if not isinstance(files, list) or not all(map(_is_name, named)):
        raise ValueError("state.json must list files of this folder in _data_files")


def check_arrow(table: Any) -> None:
    """Raise pyarrow's error for a table whose offsets point outside of its buffers, because reading
    such a row would crash the process. Small tables are validated in full."""
    data = table.data.table
    data.validate(full=data.nbytes <= MAX_FILE)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not set("/\\\0") & set(name)


def _reason(error: Exception) -> str:
    """Return the first line of an error's message, or of its cause."""
    text = str(error.__cause__ or error).strip().partition("\n")[0]
    return shorten(text, 300) or type(error).__name__
