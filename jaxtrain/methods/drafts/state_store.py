"""A target's states of known samples on disk, found again by the samples' tokens.

    FOLDER/
        manifest.json       what the states depend on, and which datasets are there whole
        index/000000.npz    key, start and count of the samples that end in shard 0
        captured/           zarr array [tokens, C * D], sharded; a checksum a chunk (crc32c)
        last/               zarr array [tokens, D], where the draft asks for it

Samples lie one behind the other, in the order in which they were captured, across shards. A shard
is written whole, and its part of the index after it, so that a kill leaves nothing half-written
that counts. A sample is a tree: its key is the digest of its tokens and of who follows whom, so
packing, order and masks are free, and no state is taken for that of other tokens.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tensorstore as ts

from jaxtrain.batch import Batch
from jaxtrain.errors import UserError

MANIFEST, INDEX = "manifest.json", "index"
FORMAT = 1
KEY_BYTES = 16
CHUNK_BYTES, SHARD_BYTES = 2**20, 2**28
"""What is read and checked at once; what is written at once, of both arrays together."""
DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


class UnknownSample(Exception):
    """A sample that is not in the store."""


class StoredSample(NamedTuple):
    """A tree of a packed batch."""

    row: tuple[int, ...]
    """Indices of its row."""
    start: int
    """Its first token there."""
    stop: int
    key: bytes


@dataclass(frozen=True)
class StateLayout:
    """Layout of the states of a token on disk."""

    widths: Mapping[str, int]
    """Numbers a token by array: {"captured": C * D, "last": D}."""
    dtype: str
    """A key of DTYPES."""
    chunk_tokens: int
    shard_tokens: int

    @classmethod
    def choose(cls, widths: Mapping[str, int], dtype: str, shard_bytes: int = SHARD_BYTES):
        """Chunks of about CHUNK_BYTES, shards of about `shard_bytes`."""
        size = sum(widths.values()) * DTYPES[dtype].itemsize
        chunk = max(min(CHUNK_BYTES, shard_bytes) // size, 1)
        return cls(dict(widths), dtype, chunk, chunk * max(shard_bytes // (chunk * size), 1))

    @property
    def token_bytes(self) -> int:
        """Bytes that the states of one token take."""
        return sum(self.widths.values()) * DTYPES[self.dtype].itemsize


def list_samples(batch: Batch) -> Iterator[StoredSample]:
    """The trees of a host batch [..., T], row by row from left to right."""
    for row in np.ndindex(*batch.tokens.shape[:-1]):
        tokens, prev, until = batch.tokens[row], batch.prev[row], batch.until[row]
        index = np.arange(len(prev), dtype=np.int32)
        if batch.owner is not None:
            real = batch.owner[row] >= 0
        else:
            real = (prev >= 0) | (until > index + 1)
        since = index if batch.since is None else batch.since[row]
        for start in np.flatnonzero((prev < 0) & real).tolist():
            stop = int(until[start])
            digest = hashlib.blake2b(digest_size=KEY_BYTES)
            # The root's prev is -1 wherever the tree lies.
            for values in (tokens, np.maximum(prev - start, -1), since - start):
                digest.update(np.ascontiguousarray(values[start:stop], np.int32).tobytes())
            yield StoredSample(row, start, stop, digest.digest())


class SampleOffsets:
    """Compact index of the states of samples: {key: (start, count)}."""

    def __init__(self, segments: list["IndexSegment"]):
        keys = np.concatenate([np.zeros((0, KEY_BYTES), np.uint8), *(s.keys for s in segments)])
        self._starts = np.concatenate([np.zeros(0, np.int64), *(s.starts for s in segments)])
        self._counts = np.concatenate([np.zeros(0, np.int64), *(s.counts for s in segments)])
        self._keys = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, KEY_BYTES // 8)
        self._order = np.argsort(self._keys[:, 0], kind="stable")
        self._sorted = self._keys[self._order, 0]

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def tokens(self) -> int:
        """Number of tokens of all samples."""
        return int(self._counts.sum())

    def keys(self) -> set[bytes]:
        """Return the keys of all samples."""
        return {key.tobytes() for key in self._keys}

    def find(self, key: bytes) -> tuple[int, int] | None:
        """Return (start, count) of a sample's tokens, or None."""
        key_parts = np.frombuffer(key, np.uint64)
        index = int(np.searchsorted(self._sorted, key_parts[0]))
        while index < len(self._sorted) and self._sorted[index] == key_parts[0]:
            entry = self._order[index]
            if (self._keys[entry] == key_parts).all():
                return int(self._starts[entry]), int(self._counts[entry])
            index += 1
        return None


class IndexSegment(NamedTuple):
    """The part of the index that belongs to one shard."""

    keys: np.ndarray
    """uint8 [n, KEY_BYTES] of the samples that end in the shard."""
    starts: np.ndarray
    """int64 [n]: first token of each, counted from the store's beginning."""
    counts: np.ndarray
    """int64 [n]: tokens of each."""
    stop: np.ndarray
    """int64: tokens of the store that were written when this was."""


class StateStore:
    """Reads the states of samples."""

    def __init__(self, folder: Path):
        """Open a complete store. Raises UserError if there is none."""
        self.folder = folder
        self.about = read_manifest(folder)
        if not self.about["datasets"]:
            raise UserError(
                f"{folder}: the capture of target states was interrupted; run the same"
                " `jaxtrain capture` again, it goes on where it stopped"
            )
        self.layout = read_layout(self.about, folder)
        segments = read_segments(folder)
        self.places = SampleOffsets(segments)
        self._arrays = {name: open_array(folder / name) for name in self.layout.widths}
        if problem := self._find_fault(int(segments[-1].stop) if segments else 0):
            raise UserError(f"{folder}: {problem}; restore the folder, or capture into another one")

    def read(
        self, batch: Batch, names: tuple[str, ...], rows: Collection[int] | None = None
    ) -> dict[str, np.ndarray]:
        """Return {name: [..., T, width]} for a host batch's tokens, 0 in padding. Raises
        UnknownSample. rows: read only these along the axis before the last; None: all."""
        shape = batch.tokens.shape
        dtype = DTYPES[self.layout.dtype]
        states = {name: np.zeros((*shape, self.layout.widths[name]), dtype) for name in names}
        waiting = []
        for sample in list_samples(batch):
            location = self.places.find(sample.key)
            if location is None:
                raise UnknownSample
            begin, count = location
            if count != sample.stop - sample.start:
                raise UnknownSample
            if rows is not None and sample.row[-1] not in rows:
                continue
            for name in names:
                future = self._arrays[name][begin : begin + count].read()
                waiting.append((states[name][sample.row], sample, future))
        for values, sample, future in waiting:
            try:
                values[sample.start : sample.stop] = future.result()
            except ValueError as error:
                raise UserError(
                    f"target states in {self.folder} cannot be read: {str(error)[:300]}. Capture"
                    " them again into another folder (jaxtrain capture), or restore this one"
                ) from None
        return states

    def _find_fault(self, tokens: int) -> str | None:
        """Describe what is missing of the captured `tokens`; None if nothing is."""
        expected = self.about.get("tokens", tokens)  # early versions did not record them
        if tokens != expected:
            return f"its index has {tokens:,} tokens, {expected:,} were captured"
        for name, array in self._arrays.items():
            shape, width = tuple(array.shape), self.layout.widths[name]
            if len(shape) != 2 or shape[0] < tokens or shape[1] != width:
                return f"array {name!r} is {list(shape)}, it must be {[tokens, width]}"
        return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest. Raises UserError if it is missing, damaged or of another version."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        version = manifest["format"]
        manifest["datasets"].keys()
    except FileNotFoundError:
        raise UserError(
            f"there are no target states in {folder}; write them with `jaxtrain capture --config"
            " FILE`, or change task.target.path"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is damaged; capture into another folder, or restore it") from None
    if version != FORMAT:
        raise UserError(f"{path} has format {version!r}, this version reads {FORMAT}; capture anew")
    return manifest


def read_layout(about: Mapping[str, Any], folder: Path) -> StateLayout:
    """Return the layout in a folder's manifest. Raises UserError if it is damaged."""
    try:
        layout = StateLayout(**about["layout"])
        sizes = [*layout.widths.values(), layout.chunk_tokens, layout.shard_tokens]
        if layout.dtype in DTYPES and all(type(size) is int and size > 0 for size in sizes):
            return layout
    except (KeyError, TypeError, AttributeError):
        pass
    raise UserError(
        f"{folder / MANIFEST}: its layout is damaged; capture into another folder, or restore it"
    )


def read_segments(folder: Path) -> list[IndexSegment]:
    """Read the index, one segment per shard, up to the first missing one."""
    segments: list[IndexSegment] = []
    while (path := segment_path(folder, len(segments))).is_file():
        try:
            with np.load(path, allow_pickle=False) as arrays:
                segment = IndexSegment(*(arrays[name] for name in IndexSegment._fields))
            check_segment(segment)
            segments.append(segment)
        except Exception as error:  # zip and numpy each have their own ways to be damaged
            raise UserError(
                f"{path} is damaged ({error}); delete it and all behind it, then run the same"
                " `jaxtrain capture` again"
            ) from None
    return segments


def check_segment(segment: IndexSegment) -> None:
    """Raise ValueError unless the arrays are those of one shard."""
    keys, starts, counts, stop = segment
    shapes = (keys.shape, starts.shape, counts.shape, stop.shape)
    if shapes != ((len(keys), KEY_BYTES), (len(keys),), (len(keys),), ()):
        raise ValueError("its arrays do not belong together")
    if (starts < 0).any() or (counts < 1).any() or (starts + counts > stop).any():
        raise ValueError("it names tokens that are not there")


def segment_path(folder: Path, number: int) -> Path:
    """Return the path of the index of a shard."""
    return folder / INDEX / f"{number:06}.npz"


def array_spec(path: Path) -> dict[str, Any]:
    """Return the tensorstore spec of one of the arrays."""
    kvstore = {"driver": "file", "path": str(path.absolute())}
    # What is missing is an error, no zeros.
    return {"driver": "zarr3", "kvstore": kvstore, "fill_missing_data_reads": False}


def open_array(path: Path) -> Any:
    """Open one of a store's arrays for reading. Raises UserError if it is missing."""
    try:
        return ts.open(array_spec(path), open=True, read=True).result()
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {str(error)[:300]}; capture anew") from None
