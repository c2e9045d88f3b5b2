"""Rows of datasets: files, folders, the Hub and built-in generators.

`open_rows` returns rows with random access (len, [i], origin(i)), or with streaming = true a
stream, which can only be iterated, from any start. Only json and csv files are loaded as a whole:

    jsonl      an index of byte offsets; a row is read and parsed on access
    parquet    datasets' memory-mapped arrow cache         arrow      memory-mapped
    txt        like jsonl, one row per line
    json csv   in memory                                   Hub        datasets
    tar        read on access      URLs    copied first, then as files; databases in memory
"""

import bisect
import glob
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.sources.jsonl import JsonlRows, TextRows, open_json, read_lines
from jaxtrain.data.sources.row_views import SelectedRows
from jaxtrain.data.sources.tables import (
    CsvRows,
    TableRows,
    open_arrow,
    open_parquet,
    open_saved,
    prune,
)
from jaxtrain.errors import UserError
from jaxtrain.safe_io import POINTED, is_pointer
from jaxtrain.text_safety import show


def _open_tar(path: str) -> Any:
    from jaxtrain.data.sources.remote import TarRows

    return TarRows(path)


OPENERS: dict[str, Callable[[str], Any]] = {
    ".jsonl": JsonlRows,
    ".json": open_json,
    ".csv": CsvRows,
    ".parquet": open_parquet,
    ".arrow": open_arrow,
    ".txt": TextRows,
    ".tar": _open_tar,
}
LINES = (".jsonl", ".csv", ".txt")
"""Kinds of files that may be empty beside others: no bytes are no rows."""
PACKED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed files, behind one of OPENERS."""
BUILTIN = "builtin:"
SPLIT = re.compile(r"^([\w.-]{1,200})(?:\[(-?\d{1,15}%?)?:(-?\d{1,15}%?)?\])?$", re.ASCII)
MAX_ENTRIES = 100_000
"""Limit of files and folders below a folder of data."""
HUB_ID = re.compile(r"^[\w-][\w.-]*(/[\w-][\w.-]*)?$")


class RowSource(Protocol):
    """Rows with random access; small when pickled."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def origin(self, index: int) -> str:
        """Return the name of a row in messages: "train.jsonl row 17"."""
        ...


@dataclass(frozen=True)
class SplitSpec:
    """A parsed split: "train[10%:200]"."""

    name: str
    start: str | None = None
    stop: str | None = None

    def bounds(self, total: int) -> tuple[int, int]:
        """Return (first row, end) of `total` rows; percentages round to the nearest row."""

        def resolve(text: str | None, default: int) -> int:
            if text is None:
                return default
            value = int(text.rstrip("%"))
            if text.endswith("%"):
                value = round(total * value / 100)
            return min(max(value + total if value < 0 else value, 0), total)

        return resolve(self.start, 0), resolve(self.stop, total)


def parse_split(text: str) -> SplitSpec:
    """Parse "train", "train[:90%]", "train[100:200]"; raises UserError."""
    match = SPLIT.match(text.strip())
    if not match:
        raise UserError(
            f"split {show(text)} is not understood: write a name, or a name with a slice, such as "
            '"train", "train[:90%]", "train[100:200]" (key data.datasets[].split)'
        )
    return SplitSpec(*match.groups())


def open_rows(dataset: DatasetConfig) -> Any:
    """Open the rows of a dataset, sliced by split and max_rows; a stream if streaming.

    If rows are held out, returns the training or the held-out rows, as `dataset.part` says. Raises
    UserError for data that are missing, empty, of an unknown kind or unreachable.
    """
    split = parse_split(dataset.split)
    if dataset.path.startswith(BUILTIN):
        rows = _builtin(dataset, split.name)
    elif dataset.options:
        raise UserError(
            f"data.datasets[].options are for {BUILTIN} data, but the path is {dataset.path}"
        )
    elif DATABASES.match(dataset.path):
        if dataset.streaming:
            raise UserError(f"{dataset.path}: a query is read as a whole; set streaming to false")
        rows = _open_query(dataset)
    elif files := _leave_out_empty([*map(_unpack, _find(dataset.path, split.name))]):
        if dataset.streaming:
            return _limit(FileStream(tuple(map(str, files))), split, dataset.max_rows)
        rows = _join([_open(file, split.name) for file in files])
    else:
        rows = _hub(dataset, split.name)
        if dataset.streaming:
            return _limit(rows, split, dataset.max_rows)
    first, last = split.bounds(len(rows))
    if dataset.max_rows is not None:
        last = min(last, first + dataset.max_rows)
    if first >= last:
        raise UserError(
            f"{dataset.path}: split {dataset.split!r} selects none of its {len(rows)} rows"
        )
    rows = rows if (first, last) == (0, len(rows)) else SelectedRows(rows, range(first, last))
    if not dataset.held_out:
        return rows
    from jaxtrain.data.sources.held_out import take_side

    return take_side(rows, dataset)


class JoinedRows:
    """Rows of several files, one after the other."""

    def __init__(self, parts: Sequence[RowSource]) -> None:
        self.parts = parts
        self.ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        part, row = self._place(index)
        return part[row]

    def origin(self, index: int) -> str:
        """Return the name that the file's rows give it."""
        part, row = self._place(index)
        return part.origin(row)

    def _place(self, index: int) -> tuple[RowSource, int]:
        number = bisect.bisect_right(self.ends, _inside(index, len(self)))
        return self.parts[number], index - (self.ends[number - 1] if number else 0)


@dataclass(frozen=True)
class FileStream:
    """Rows of files in order, read on demand."""

    files: tuple[str, ...]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for file in self.files:
            kind = find_kind(Path(file))
            if kind in (".jsonl", ".txt"):
                yield from read_lines(file, TextRows.parse if kind == ".txt" else None)
            else:
                rows = _open(Path(file), "train")
                yield from (rows[index] for index in range(len(rows)))


@dataclass(frozen=True)
class LimitedStream:
    """Rows first..last-1 of a stream."""

    rows: Iterable[dict[str, Any]]
    first: int
    last: int | None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return itertools.islice(iter(self.rows), self.first, self.last)


class HubStream:
    """Rows of a datasets.IterableDataset, which saves and restores its position."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            yield {key: prune(value) for key, value in row.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next row."""
        return self.rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        self.rows.load_state_dict(state)


@dataclass(frozen=True)
class TaskRows:
    """Rows {"task": 0}, {"task": 1}, ...: the numbers of a taskset's tasks."""

    num_rows: Any

    def __post_init__(self) -> None:
        if type(self.num_rows) is not int or self.num_rows < 1:
            raise UserError(
                f"{BUILTIN}tasks needs options.num_rows, the number of tasks (at least 1); found"
                f" {'nothing' if self.num_rows is None else show(self.num_rows)}"
            )

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"task": _inside(index, self.num_rows)}

    def origin(self, index: int) -> str:
        """Return the name of a row in messages."""
        return f"{BUILTIN}tasks row {index}"


def _inside(index: int, length: int) -> int:
    if not 0 <= index < length:
        raise IndexError(index)
    return index


def _builtin(dataset: DatasetConfig, split: str) -> RowSource:
    from jaxtrain.data.sources.calculator import CalculatorRows
    from jaxtrain.data.sources.calculator_pairs import CalculatorPairs

    name = dataset.path.removeprefix(BUILTIN)
    if name not in ("calculator", "calculator_pairs", "digits", "shapes", "tasks"):
        raise UserError(
            f"no builtin data {dataset.path!r}: there is {BUILTIN}calculator,"
            f" {BUILTIN}calculator_pairs for preferences, {BUILTIN}shapes and {BUILTIN}digits with"
            f" pictures, and {BUILTIN}tasks for tasksets"
        )
    options = {
        "tasks": ("num_rows",),
        "digits": ("num_rows", "size"),
        "shapes": ("num_rows", "seed", "size", "max_count", "questions"),
    }
    allowed = options.get(name, ("num_rows", "seed", "max_value", "follow_up"))
    allowed += ("claims", "all_kinds") if name == "calculator" else ()
    for key in dataset.options:
        if key not in allowed:
            raise UserError(
                f"{dataset.path} has no option {key!r}: its options are {', '.join(allowed)}"
            )
    if name == "tasks":
        return TaskRows(dataset.options.get("num_rows"))
    if name == "shapes":
        from jaxtrain.data.sources.shapes import ShapeRows

        return ShapeRows(split=split, **dataset.options)
    if name == "digits":
        from jaxtrain.data.sources.digits import DigitRows

        return DigitRows(split=split, **dataset.options)
    rows = CalculatorRows(split=split, **dataset.options)
    return rows if name == "calculator" else CalculatorPairs(rows)


def _find(path: str, split: str) -> list[Path]:
    """List the files (or the save_to_disk folder) of a path; none if it is a Hub id."""
    if "://" in path:
        from jaxtrain.data.sources.remote import fetch

        files = fetch(path, (*OPENERS, *PACKED, ".ndjson"))
        return _in_folder(files, split) if isinstance(files, Path) else files
    location = Path(os.path.expanduser(path))
    try:
        if location.is_dir():
            return _in_folder(location, split)
        if location.is_file():
            return [location]
        if location.exists():
            raise UserError(f"{path} is no regular file but a pipe or a device")
    except OSError as error:
        raise UserError(f"{show(path)} cannot be read: {error.strerror or error}") from None
    if glob.has_magic(path):
        files = sorted(Path(match) for match in glob.glob(str(location), recursive=True))
        if not files:
            raise UserError(f"no file matches {path} (key data.datasets[].path)")
        return files
    if find_kind(location) in OPENERS or not HUB_ID.match(path):
        raise UserError(f"no such file or folder: {show(path)} (key data.datasets[].path)")
    return []


def _in_folder(folder: Path, split: str) -> list[Path]:
    """List the data files of a folder: those with the split's name, or all for "train"."""
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        return [folder]
    entries = list(itertools.islice(folder.rglob("*"), MAX_ENTRIES + 1))
    if len(entries) > MAX_ENTRIES:
        raise UserError(
            f"{folder} holds more than {MAX_ENTRIES:,} files and folders; name the folder of the"
            f" data, or a pattern, such as {folder / '*.jsonl'}"
        )
    files = sorted(file for file in entries if find_kind(file) in OPENERS and file.is_file())
    # Next to other data a text file is a license or a note.
    files = [file for file in files if find_kind(file) != ".txt"] or files
    if not files:
        raise UserError(f"no data in {folder}: expected files ending in {', '.join(OPENERS)}")
    named = re.compile(rf"(^|[._/-]){re.escape(split)}([._/-]|$)")
    chosen = [file for file in files if named.search(str(file.relative_to(folder)))]
    if not chosen and split == "train":
        chosen = files
    if not chosen:
        names = ", ".join(str(file.relative_to(folder)) for file in files[:8])
        raise UserError(f"{folder} has no files for split {split!r}; it holds {names}")
    if len(kinds := sorted(set(map(find_kind, chosen)))) > 1:
        raise UserError(
            f"{folder} mixes kinds of files ({', '.join(kinds)}); choose one with a pattern, such"
            f" as {folder}/*{kinds[0]}"
        )
    return chosen


def find_kind(file: Path) -> str:
    """Return the suffix that says how a file is read, without that of its compression."""
    suffix = file.suffix.lower()
    kind = Path(file.stem).suffix.lower() if suffix in PACKED else suffix
    return ".jsonl" if kind == ".ndjson" else kind


def _unpack(file: Path) -> Path:
    """Return the file, or its copy without compression. Raises UserError for a pointer to it."""
    if file.is_file() and os.access(file, os.R_OK) and is_pointer(file):
        raise UserError(f"{file} {POINTED}")
    if file.suffix.lower() not in PACKED or find_kind(file) not in OPENERS or file.is_dir():
        return file
    from jaxtrain.data.sources.remote import unpack

    return unpack(file)


def _leave_out_empty(files: list[Path]) -> list[Path]:
    """Return the files that hold bytes, as some shards of a large set may not; all if none does."""

    def is_empty(file: Path) -> bool:
        return find_kind(file) in LINES and file.is_file() and file.stat().st_size == 0

    return [file for file in files if not is_empty(file)] or files


def _open(file: Path, split: str) -> RowSource:
    if file.is_dir():
        return open_saved(str(file), split)
    if find_kind(file) not in OPENERS:
        raise UserError(
            f"{file}: unknown kind of file; data files end in {', '.join(OPENERS)} "
            "(key data.datasets[].path)"
        )
    try:
        if not file.is_file():
            raise UserError(f"{file} is no regular file")
        if file.stat().st_size == 0:
            raise UserError(f"{file} is empty")
        return OPENERS[find_kind(file)](str(file))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error


DATABASES = re.compile(
    r"(sqlite|postgresql|mysql|mariadb|mssql|oracle|duckdb|snowflake)(\+\w+)?://"
)
"""URLs of SQLAlchemy's."""


def _open_query(dataset: DatasetConfig) -> RowSource:
    from jaxtrain.data.sources.remote import QueryRows

    return QueryRows(dataset)


def _join(parts: list[RowSource]) -> RowSource:
    return parts[0] if len(parts) == 1 else JoinedRows(parts)


def _limit(rows: Iterable[dict[str, Any]], split: SplitSpec, max_rows: int | None) -> Any:
    """Cut a stream by split and max_rows, which must not need its length."""
    for bound in (split.start, split.stop):
        if bound is not None and (bound.endswith("%") or bound.startswith("-")):
            raise UserError(
                f"split bound {bound} needs the number of rows, which a stream does not have: "
                "write row numbers, or set streaming = false"
            )
    first = int(split.start or 0)
    ends = [int(split.stop)] if split.stop is not None else []
    ends += [first + max_rows] if max_rows is not None else []
    return LimitedStream(rows, first, min(ends, default=None)) if first or ends else rows


def _hub(dataset: DatasetConfig, split: str) -> Any:
    """Open a dataset of the Hugging Face Hub."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        rows = load_dataset(dataset.path, dataset.name, split=split, streaming=dataset.streaming)
    except DatasetNotFoundError as error:
        raise UserError(
            f"{dataset.path} is neither a file here nor a dataset on the Hub that can be read "
            f"(key data.datasets[].path): {_first_line(error)}"
        ) from error
    except (ConnectionError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"{dataset.path} is no file here, and the Hugging Face Hub cannot be reached "
            f"({type(error).__name__}: {_first_line(error)}). Name a local file in "
            "data.datasets[].path, or check the network."
        ) from error
    except Exception as error:  # network data, and libraries that parse it, may raise anything
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UserError(
            f"{dataset.path}: {kind}{_first_line(error)} (keys data.datasets[].name and .split)"
        ) from error
    return HubStream(rows) if dataset.streaming else TableRows(rows, dataset.path)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
