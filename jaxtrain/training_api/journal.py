"""Append-only log of requests and results: a record is on disk when `append` returns.

A record is a JSON header and bytes, behind their lengths and a checksum. A process that is killed
while it writes leaves a torn record at the end, which the next one cuts off: no client has had an
answer to it. A record that is damaged before whole ones is an error: those were answered.
"""

import io
import json
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.errors import UserError

LENGTHS = struct.Struct("<III")
HEADER = b'{"'
"""Beginning of every header."""


class Record(NamedTuple):
    """Entry of a log."""

    header: dict[str, Any]
    payload: bytes = b""


class Journal:
    """Log in a file, which is created if it does not exist. For several threads."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file = self._open()
        self.size = self._file.tell()

    def _open(self) -> io.FileIO:
        # Unbuffered: a buffer would keep what a full disk did not take, and write it later, before
        # the next record.
        return open(self.path, "ab", buffering=0)

    def append(self, *records: Record) -> None:
        """Write records; return when they are on disk. OSError leaves the log as it was."""
        raw = b"".join(map(encode, records))
        with self._lock:
            try:
                unwritten = memoryview(raw)
                while unwritten:
                    unwritten = unwritten[self._file.write(unwritten) :]
                os.fsync(self._file.fileno())
            except OSError:
                os.ftruncate(self._file.fileno(), self.size)
                raise
            self.size += len(raw)

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace the whole log, or nothing of it. records: read while nothing else is appended."""
        unfinished = self.path.with_name(f".{self.path.name}.unfinished")
        with self._lock:
            with open(unfinished, "wb") as file:
                for record in records:
                    file.write(encode(record))
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, self.path)
            self._file.close()
            self._file = self._open()
            self.size = self._file.tell()
            sync_folder(self.path.parent)

    def read(self) -> list[Record]:
        """Return all records, and cut off a torn one at the end. UserError for a damaged one that
        whole ones follow."""
        raw = self.path.read_bytes()
        records, end = [], 0
        for record, stop in decode(raw):
            records.append(record)
            end = stop
        if end < len(raw):
            if (later := find_record(raw, end)) is not None:
                raise UserError(
                    f"{self.path}: record {len(records) + 1}, at byte {end:,}, is damaged, and a"
                    f" whole one follows at byte {later:,}; restore the file from a copy, or move"
                    " its folder away to go on without what it holds"
                )
            with self._lock:
                os.ftruncate(self._file.fileno(), end)
                os.fsync(self._file.fileno())
                self.size = end
        return records

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


def encode(record: Record) -> bytes:
    """Return a record as bytes."""
    header = json.dumps(record.header, sort_keys=True).encode()
    checksum = zlib.crc32(record.payload, zlib.crc32(header))
    return LENGTHS.pack(len(header), len(record.payload), checksum) + header + record.payload


def decode(raw: bytes, end: int = 0) -> Iterator[tuple[Record, int]]:
    """Yield each whole record from a place on, and its end."""
    while len(raw) - end >= LENGTHS.size:
        header_size, payload_size, checksum = LENGTHS.unpack_from(raw, end)
        start = end + LENGTHS.size
        middle, stop = start + header_size, start + header_size + payload_size
        if stop > len(raw):
            return
        header, payload = raw[start:middle], raw[middle:stop]
        if zlib.crc32(payload, zlib.crc32(header)) != checksum:
            return
        yield Record(json.loads(header), payload), stop
        end = stop


def find_record(raw: bytes, start: int) -> int | None:
    """Return where the first whole record behind a damaged one begins; None: there is none."""
    while (header := raw.find(HEADER, start + 1 + LENGTHS.size)) >= 0:
        start = header - LENGTHS.size
        if next(decode(raw, start), None) is not None:
            return start
    return None


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
