"""Rows from elsewhere: files behind fsspec's URLs, queries of databases, tar files of samples.

s3://, gs://, memory:// ...   copied to the cache of downloads, then read as files here
sqlite://, postgresql:// ...  one query's rows, in memory
.gz, .bz2, .xz, .zst          unpacked into that cache, then read as files here
.tar                          WebDataset: members of one name are a sample, a suffix is a column
"""

import bz2
import glob
import gzip
import hashlib
import lzma
import os
import re
import secrets
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.sources.jsonl import BLOCK, MAX_ROW
from jaxtrain.data.sources.tables import digest_file
from jaxtrain.errors import UserError
from jaxtrain.safe_io import UnreadableRow, parse_json
from jaxtrain.text_safety import show

EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs"}
"""Extras of this package with the file systems of a scheme."""
MAX_RATIO = 1000
"""Limit of the size of an unpacked file, in sizes of the packed one."""
MAX_RESULT = 10_000_000
"""Limit of rows of a query."""


def fetch(url: str, suffixes: Sequence[str]) -> Path | list[Path]:
    """Return copies of the files at a URL: those of a pattern, or the one file, or a folder with
    all files of these suffixes. What is there already in the same state is not copied again.

    Copies lie in jaxtrain/downloads of $XDG_CACHE_HOME or ~/.cache. Raises UserError.
    """
    import fsspec

    scheme = url.partition("://")[0]
    try:
        system, path = fsspec.url_to_fs(url)
        # What follows a ? of a web address is no part of the file's name, and may be a secret.
        mark = "?" if scheme in ("http", "https") else "\0"
        if glob.has_magic(path.partition(mark)[0]):
            names, is_folder = sorted(system.glob(path)), False
        elif is_folder := system.isdir(path):
            ends = tuple(suffixes)
            names = [name for name in sorted(system.find(path)) if name.lower().endswith(ends)]
        else:
            names = [path] if system.exists(path) else []
        if not names:
            raise UserError(f"no file at {show(url)} (key data.datasets[].path)")
        state = [(name, str(system.ukey(name)), *describe_state(system, name)) for name in names]
        digest = hashlib.blake2b(repr((url, state)).encode(), digest_size=12).hexdigest()
        folder = _cache() / digest
        parents = [name.partition(mark)[0] for name in names]
        root = path.rstrip("/") if is_folder else os.path.commonpath(map(os.path.dirname, parents))
        files = [folder / os.path.relpath(parent, root or ".") for parent in parents]
        for name, file in zip(names, files, strict=True):
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                part = file.with_name(f"{file.name}.{secrets.token_hex(8)}.part")
                system.get_file(name, str(part))
                part.replace(file)
        return folder if is_folder else files
    except UserError:
        raise
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        cure = f"pip install 'jaxtrain[{extra}]'" if extra else str(error)
        raise UserError(f"paths with {scheme}:// need a package: {cure}") from None
    except Exception as error:  # file systems raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{show(url)} cannot be read: {reason}") from error


STATE_KEYS = ("size", "ETag", "Content-MD5", "Digest", "Last-Modified", "LastModified", "mtime")
"""Keys of fsspec's info that change with a file; others, as an address that was signed for a while,
change at every start."""


def describe_state(system: Any, name: str) -> list[str]:
    """Describe the state of a file: fsspec's key takes files of the web to be unchanging."""
    info = system.info(name)
    return [f"{key} {info[key]}" for key in STATE_KEYS if key in info]


def unpack(file: Path) -> Path:
    """Return a copy of a compressed file without compression, in the cache of downloads. What is
    there already of the same file is not unpacked again. Raises UserError."""
    part = None
    try:
        target = _cache() / digest_file(str(file)) / file.stem
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{secrets.token_hex(8)}.part")
        limit = MAX_RATIO * file.stat().st_size + BLOCK
        with UNPACKERS[file.suffix.lower()](file) as packed, part.open("wb") as copy:
            while block := packed.read(BLOCK):
                copy.write(block)
                if copy.tell() > limit:
                    raise EOFError(f"it unpacks to more than {MAX_RATIO:,} times its size")
        return part.replace(target)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{file} cannot be unpacked: {reason}") from None
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def _open_zstd(file: Path) -> Any:
    import pyarrow

    return pyarrow.input_stream(str(file), compression="zstd")


UNPACKERS: Mapping[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
"""What opens compressed files, by their suffix."""


def _cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return home / "jaxtrain" / "downloads"


class QueryRows:
    """Rows of a query, in memory; values are texts, numbers, true or false, or missing."""

    def __init__(self, dataset: DatasetConfig) -> None:
        """dataset.name: a table, or a query that begins with SELECT or WITH. Raises UserError."""
        try:
            import sqlalchemy
            from sqlalchemy.exc import SQLAlchemyError
        except ModuleNotFoundError:
            raise UserError("databases need SQLAlchemy: pip install 'jaxtrain[sql]'") from None
        if not dataset.name:
            raise UserError(
                f"{show(dataset.path)} is a database: name a table, or a query, as its name (key"
                " data.datasets[].name)"
            )
        self.name = "query" if " " in dataset.name else dataset.name
        try:
            engine = sqlalchemy.create_engine(dataset.path)
            if re.match(r"(?i)\s*(select|with)\b", dataset.name):
                query: Any = sqlalchemy.text(dataset.name)
            else:
                query = sqlalchemy.select(
                    sqlalchemy.Table(dataset.name, sqlalchemy.MetaData(), autoload_with=engine)
                )
            with engine.connect() as connection:
                result = connection.execute(query)
                self.columns = list(result.keys())
                self.rows = [tuple(row) for row in result.fetchmany(MAX_RESULT + 1)]
            engine.dispose()
        except (SQLAlchemyError, ImportError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{show(dataset.path)}, {show(dataset.name)}: {reason}") from None
        if len(self.rows) > MAX_RESULT:
            raise UserError(
                f"{show(dataset.path)}: more than {MAX_RESULT:,} rows; add a LIMIT to the query, or"
                " export it to parquet"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        cells = zip(self.columns, self.rows[index], strict=True)
        return {
            name: value if isinstance(value, str | int | float | bool) else str(value)
            for name, value in cells
            if value is not None
        }

    def origin(self, index: int) -> str:
        """Return the name of a row in messages: table and number, from 1."""
        return f"{self.name} row {index + 1}"


class TarRows:
    """Samples of a WebDataset tar file; a row is read on access.

    The keys of a member .json are columns, .txt is the column `text`, other members are columns of
    their suffix: texts, or the number of bytes of what is none.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        samples: dict[str, dict[str, tuple[int, int]]] = {}
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    folder, _, name = member.name.rpartition("/")
                    key, _, suffix = name.partition(".")
                    if member.isfile() and key and suffix:
                        extent = (member.offset_data, member.size)
                        samples.setdefault(f"{folder}/{key}", {})[suffix] = extent
        except tarfile.TarError as error:
            raise UserError(f"{path} is not a readable tar file: {error}") from error
        if not samples:
            raise UserError(f"{path} holds no samples: members are named KEY.json, KEY.txt ...")
        self.samples = list(samples.items())

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        _, members = self.samples[index]
        row: dict[str, Any] = {}
        with open(self.path, "rb") as file:
            for suffix, (start, size) in members.items():
                if size > MAX_ROW:
                    return UnreadableRow(f"more than {MAX_ROW:,} bytes")
                file.seek(start)
                data = file.read(size)
                try:
                    text = data.decode()
                    value = parse_json(text, unique=True) if suffix == "json" else text
                except ValueError:
                    if suffix in ("json", "txt"):
                        return UnreadableRow(f"a damaged {suffix}")
                    value = f"{size} bytes"
                if suffix == "json" and isinstance(value, dict):
                    row |= value
                else:
                    row["text" if suffix == "txt" else suffix] = value
        return row

    def origin(self, index: int) -> str:
        """Return the name of a sample in messages: file and key."""
        return f"{Path(self.path).name} {self.samples[index][0].lstrip('/')}"
