"""Tokenized datasets on disk, addressed by their content.

    <cache_dir>/<sha256 of rows, tokenizer, keys and code>/
        tokens.bin    int32, all nodes of all trees one after the other
        weights.bin   float32, the same for each component
        streams.bin   bytes of the other per-token arrays of nodes
        items.bin     JSON of the samples and drops of each row, one after the other
        places.bin    int64 [rows + 1, 4]: offset of each row in these four files
        done.json     sizes of these files; written last

A folder is written under a temporary name and renamed when it is complete, so that a killed process
or two concurrent ones leave no entry or one. Rows are read through memory maps, also by workers.
"""

import hashlib
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxtrain.data.counts import Progress
from jaxtrain.data.packing.tree import Forest, Node, Tree, TreeGroup
from jaxtrain.data.sample import Dropped, RowNote, Unread
from jaxtrain.data.sources.readers import IndexedReader, Items, MixturePart, is_stream, keep_items

FILES = ("tokens.bin", "weights.bin", "streams.bin", "items.bin", "places.bin")
DONE = "done.json"
UNUSED_DAYS = 30
"""Entries unused for this long are deleted."""


class Uncachable(Exception):
    """The samples of a row cannot be stored exactly."""


def default_folder() -> Path:
    """Return the folder of tokenized data that is used unless data.cache_dir is set."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "jaxtrain" / "tokenized"


def cache_part(
    part: MixturePart,
    settings: str | None,
    tokenizer: Any,
    folder: Path,
    *,
    row_tokens: int,
    num_workers: int,
    log: Callable[[str], None],
) -> MixturePart:
    """Return `part` with its rows tokenized, read from `folder` or tokenized now and stored there.

    settings: all settings that shape the samples; None, and streams, are not cached. A disk error
    costs the cache, not the run.
    """
    if settings is None or is_stream(part.rows):
        return part
    try:
        key = find_key(part, settings, tokenizer, log)
    except (TypeError, ValueError):
        return part  # rows that are no JSON
    entry = folder / key
    try:
        if not is_whole(entry):
            write_entry(part, entry, row_tokens=row_tokens, num_workers=num_workers, log=log)
        else:
            log(f"{part.name}: tokenized before, read from {entry} (data.cache)")
            os.utime(entry / DONE)
    except Uncachable:
        return part
    except OSError as error:
        log(f"{part.name}: tokenized data are not kept in {folder}: {error.strerror or error}")
        return part
    return MixturePart(part.name, CachedRows(entry, part.left_out), keep_items, part.weight)


def find_key(part: MixturePart, settings: str, tokenizer: Any, log: Callable[[str], None]) -> str:
    """Digest all that shapes the samples of the rows; TypeError if rows are not JSON."""
    digest = hashlib.sha256()
    for text in (digest_code(), settings, part.name, *describe_tokenizer(tokenizer)):
        digest.update(f"{len(text)} ".encode() + text.encode("utf-8", "surrogatepass"))
    progress = Progress(f"looking for {part.name} among tokenized data", len(part.rows), log)
    for index in range(len(part.rows)):
        row = part.rows[index]
        text = json.dumps([row, getattr(row, "reason", ""), part.origin(index)], sort_keys=True)
        digest.update(text.encode() + b"\n")
        progress.count()
    return digest.hexdigest()


def is_whole(entry: Path) -> bool:
    """Return True if an entry exists with all its bytes."""
    try:
        sizes = json.loads((entry / DONE).read_bytes())["sizes"]
        return all((entry / name).stat().st_size == sizes[name] for name in FILES)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_entry(
    part: MixturePart, entry: Path, *, row_tokens: int, num_workers: int, log: Callable[[str], None]
) -> None:
    """Tokenize all rows into `entry`, atomically."""
    clear_folder(entry.parent)
    unfinished = entry.with_name(f"{entry.name}.{os.getpid()}-{secrets.token_hex(4)}.unfinished")
    unfinished.mkdir(parents=True)
    reader = IndexedReader(
        [part], row_tokens=row_tokens, shuffle=False, num_epochs=1, num_workers=num_workers
    )
    progress = Progress(f"tokenizing {part.name}", len(part.rows), log)
    try:
        rows: Iterator[Items] = iter(lambda: next(reader, None), None)  # type: ignore[arg-type]
        sizes = write_items(unfinished, progress.each(rows))
        (unfinished / DONE).write_text(json.dumps({"sizes": sizes, "rows": len(part.rows)}))
        if not is_whole(entry):  # another process may have been faster
            shutil.rmtree(entry, ignore_errors=True)
            try:
                unfinished.rename(entry)
            except OSError:
                if not is_whole(entry):
                    raise
    finally:
        reader.close()
        shutil.rmtree(unfinished, ignore_errors=True)


def clear_folder(folder: Path) -> None:
    """Delete entries unused for long, and leftovers of killed processes."""
    current = time.time()
    for entry in folder.glob("[0-9a-f]*"):
        name, _, rest = entry.name.partition(".")
        days = 1 if rest.endswith("unfinished") else UNUSED_DAYS
        mark = entry if rest else entry / DONE
        try:
            if len(name) == 64 and current - mark.stat().st_mtime > days * 86400:
                shutil.rmtree(entry, ignore_errors=True)
        except OSError:
            continue  # another process is deleting it


def write_items(folder: Path, rows: Iterable[Items]) -> dict[str, int]:
    """Write the samples and drops of each row; return the sizes of the files. Raises Uncachable."""
    places = [(0, 0, 0, 0)]
    with (
        (folder / "tokens.bin").open("wb") as tokens,
        (folder / "weights.bin").open("wb") as weights,
        (folder / "streams.bin").open("wb") as streams,
        (folder / "items.bin").open("wb") as texts,
        (folder / "places.bin").open("wb") as index,
    ):
        for items in rows:
            described = [_write_item(item, tokens, weights, streams) for item in items]
            texts.write(json.dumps(described, separators=(",", ":")).encode())
            ends = (tokens.tell() // 4, weights.tell() // 4, streams.tell(), texts.tell())
            places.append(ends)
        index.write(np.asarray(places, np.int64).tobytes())
        files = (tokens, weights, streams, texts, index)
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        return {name: file.tell() for name, file in zip(FILES, files, strict=True)}


def _write_item(item: Tree | Forest | TreeGroup | RowNote, *files: BinaryIO) -> dict[str, Any]:
    if isinstance(item, RowNote):
        kind = "unread" if isinstance(item, Unread) else "dropped"
        return {kind: item.reason, "origin": item.origin}
    if isinstance(item, TreeGroup):
        return {"group": [_write_item(tree, *files) for tree in item.trees]}
    if isinstance(item, Forest):
        return {"forest": [_write_item(tree, *files) for tree in item.trees]}
    tokens, weights, streams = files
    nodes = []
    for node in item.nodes:
        if node.since is not None:
            raise Uncachable
        tokens.write(np.asarray(node.tokens, np.int32).tobytes())
        for values in node.weights.values():
            short = np.asarray(values, np.float32)
            if (short != values).any():
                raise Uncachable
            weights.write(short.tobytes())
        stream_entries = []
        for name, values in node.streams.items():
            contiguous = np.ascontiguousarray(values)
            streams.write(contiguous.tobytes())
            stream_entries.append([name, contiguous.dtype.str, contiguous.shape])
        nodes.append([node.parent, len(node.tokens), list(node.weights), node.role, stream_entries])
    return {"nodes": nodes, "ends": item.ends, "origin": item.origin, "controls": item.controls}


class CachedRows:
    """Rows of an entry, each a list of samples and drops. Pickles by its folder."""

    def __init__(self, entry: Path, left_out: Mapping[str, int] | None = None):
        self.entry, self.left_out = entry, dict(left_out or {})
        self._maps: tuple[np.ndarray, ...] | None = None
        self._len = (entry / "places.bin").stat().st_size // 32 - 1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": None}

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> Items:
        if self._maps is None:
            dtypes = (np.int32, np.float32, np.uint8, np.uint8, np.int64)
            self._maps = tuple(
                _map(self.entry / name, dtype) for name, dtype in zip(FILES, dtypes, strict=True)
            )
        tokens, weights, streams, texts, places = self._maps
        *starts, begin = places.reshape(-1, 4)[index].tolist()
        end = int(places.reshape(-1, 4)[index + 1][3])
        reader = _ItemReader(tokens, weights, streams, *starts)
        return [reader.read(entry) for entry in json.loads(texts[begin:end].tobytes())]


class _ItemReader:
    """Reader of the items of a row, which are stored one after the other."""

    def __init__(
        self,
        tokens: np.ndarray,
        weights: np.ndarray,
        streams: np.ndarray,
        at_token: int,
        at_weight: int,
        at_stream: int,
    ):
        self.tokens, self.weights, self.streams = tokens, weights, streams
        self.at_token, self.at_weight, self.at_stream = at_token, at_weight, at_stream

    def read(self, entry: dict[str, Any]) -> Any:
        if "dropped" in entry:
            return Dropped(entry["dropped"], entry["origin"])
        if "unread" in entry:
            return Unread(entry["unread"], entry["origin"])
        if "group" in entry:
            return TreeGroup(tuple(self.read(tree) for tree in entry["group"]))
        if "forest" in entry:
            return Forest(tuple(self.read(tree) for tree in entry["forest"]))
        nodes = tuple(self._node(*described) for described in entry["nodes"])
        return Tree(nodes, tuple(entry["ends"]), entry["origin"], entry["controls"])

    def _node(
        self,
        parent: int,
        length: int,
        components: Sequence[str],
        role: str,
        stream_entries: Sequence[tuple[str, str, Sequence[int]]],
    ) -> Node:
        tokens = np.array(self.tokens[self.at_token : self.at_token + length])
        self.at_token += length
        weights = {}
        for name in components:
            weights[name] = np.array(self.weights[self.at_weight : self.at_weight + length])
            self.at_weight += length
        streams = {
            name: self._stream(np.dtype(kind), shape) for name, kind, shape in stream_entries
        }
        return Node(parent, tokens, weights, streams, role)

    def _stream(self, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
        end = self.at_stream + dtype.itemsize * math.prod(shape)
        values = np.array(self.streams[self.at_stream : end]).view(dtype).reshape(shape)
        self.at_stream = end
        return values


def _map(path: Path, dtype: Any) -> np.ndarray:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r")


def describe_tokenizer(tokenizer: Any) -> Iterator[str]:
    """Yield all of a tokenizer that shapes tokens."""
    yield tokenizer.backend_tokenizer.to_str()
    yield repr(tokenizer.chat_template)
    yield repr(sorted(tokenizer.special_tokens_map.items(), key=str))
    yield repr(sorted(map(repr, tokenizer.added_tokens_decoder.items())))


TOKENIZING_CODE = ("data", "huggingface", "methods")
"""Folders of jaxtrain whose code may shape the tokens of a row: readers and packing, tokenizers and
template rendering, recipes of the methods. A few files too many cost a tokenization after an
upgrade; one too few would silently train on outdated tokens."""


def digest_code(package: Path = Path(__file__).parents[2]) -> str:
    """Digest the code that turns rows into tokens, and the versions of the libraries it calls."""
    from importlib.metadata import version

    digest = hashlib.sha256()
    for folder in TOKENIZING_CODE:
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(package)} ".encode() + path.read_bytes())
    packages = ("tokenizers", "transformers", "jinja2")
    return digest.hexdigest() + " ".join(version(package) for package in packages)
