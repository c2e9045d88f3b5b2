"""Write a state store (state_store.py), and resume one that was interrupted.

    add(sample) ─> buffer of one shard ─full─> written by tensorstore, meanwhile the next is filled
                                          └─> then, when the next is full: its part of the index

The bytes written are the same with and without the interruption, as long as the same samples come
in the same order.
"""

import dataclasses
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from jaxtrain.errors import UserError
from jaxtrain.methods.drafts.state_store import (
    DTYPES,
    FORMAT,
    INDEX,
    KEY_BYTES,
    MANIFEST,
    IndexSegment,
    StateLayout,
    array_spec,
    read_layout,
    read_manifest,
    read_segments,
    segment_path,
)


class StateWriter:
    """Appends samples; a context manager that closes the store, complete or not."""

    def __init__(self, folder: Path, layout: StateLayout, about: Mapping[str, Any]):
        """about: everything that the states depend on besides tokens, as JSON. A folder with other
        states is refused with a UserError that names the differences."""
        self.folder, self.layout = folder, layout
        self.about: dict[str, Any] = {"format": FORMAT, **about, "datasets": {}}
        manifest = self._open()
        if manifest is not None:
            self.layout = read_layout(manifest, folder)
            self.about["datasets"] = manifest["datasets"]
        self._write_manifest()
        self._arrays = {
            name: self._open_array(folder / name, width)
            for name, width in self.layout.widths.items()
        }
        segments = read_segments(folder)
        self.keys = {key.tobytes() for segment in segments for key in segment.keys}
        """Samples that are there."""
        self.tokens = int(sum(segment.counts.sum() for segment in segments))
        """Of these samples."""
        self._entries: list[tuple[bytes, int, int]] = []
        self._writing: tuple[int, list[Any], IndexSegment] | None = None
        written = int(segments[-1].stop) if segments else 0
        self._number = written // self.layout.shard_tokens
        self._buffer = self._new_buffer()
        self._recall(segments, written)

    def _open(self) -> dict[str, Any] | None:
        """Lock the folder and return its manifest; None for a new one."""
        try:
            (self.folder / INDEX).mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / ".lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process captures into {self.folder} right now") from None
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be written ({error.strerror}); change task.target.path"
            ) from None
        if not (self.folder / MANIFEST).exists():
            foreign_files = sorted(
                p.name for p in self.folder.iterdir() if p.name not in (INDEX, ".lock")
            )
            if foreign_files:
                raise UserError(
                    f"{self.folder} holds {foreign_files[0]} and no target states; name an empty"
                    " folder"
                )
            return None
        manifest = read_manifest(self.folder)
        if differences := find_differences(manifest, self.about):
            raise UserError(
                f"{self.folder} holds states of another target: {', '.join(differences)}; capture"
                " into another folder (task.target.path)"
            )
        return manifest

    def add(self, key: bytes, states: Mapping[str, np.ndarray]) -> bool:
        """Append a sample's states {array: [n, width]}; return False if it is there already.
        Raises UserError for states that are not finite."""
        if key in self.keys:
            return False
        for name, values in states.items():
            if not np.isfinite(values).all():
                raise UserError(
                    f"the target's states ({name}) are NaN or infinite: its weights are damaged, or"
                    " model.compute_dtype is too narrow for them. Nothing of this sample is kept"
                )
        count, size = len(next(iter(states.values()))), self.layout.shard_tokens
        start, self.tokens = self.tokens, self.tokens + count
        done = max(self._number * size - start, 0)  # written before an interruption
        while done < count:
            offset = start + done - self._number * size
            num_tokens = min(count - done, size - offset)
            for name, values in states.items():
                self._buffer[name][offset : offset + num_tokens] = values[done : done + num_tokens]
            done += num_tokens
            if done == count:
                self._entries.append((key, start, count))
            if offset + num_tokens == size:
                self._flush(size)
        self.keys.add(key)
        return True

    def finish(self, datasets: Mapping[str, str]) -> None:
        """Write the remaining tokens and record that all samples of these datasets ({digest: name})
        are there."""
        unwritten = self.tokens - self._number * self.layout.shard_tokens
        if unwritten > 0:
            self._flush(unwritten)
        self._finish_shard()
        self.about["datasets"] = {**self.about["datasets"], **datasets}
        self.about["tokens"] = self.tokens
        self._write_manifest()

    def close(self) -> None:
        """Wait for pending writes; samples in the buffer are captured again next time."""
        try:
            self._finish_shard()
        finally:
            self._lock.close()

    def __enter__(self) -> "StateWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _recall(self, segments: list[IndexSegment], written: int) -> None:
        """Continue a last shard that is not full: it is written once more, with more in it."""
        begin = self._number * self.layout.shard_tokens
        if written == begin:
            return
        for name, array in self._arrays.items():
            self._buffer[name][: written - begin] = array[begin:written].read().result()
        last = segments[-1]
        for key, start, count in zip(last.keys, last.starts, last.counts, strict=True):
            self._entries.append((key.tobytes(), int(start), int(count)))

    def _flush(self, count: int) -> None:
        """Start writing the first `count` tokens of the buffer."""
        self._finish_shard()
        begin = self._number * self.layout.shard_tokens
        keys, starts, counts = zip(*self._entries, strict=True) if self._entries else ((), (), ())
        segment = IndexSegment(
            np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES),
            np.array(starts, np.int64),
            np.array(counts, np.int64),
            np.array(begin + count),
        )
        futures = []
        for name, array in self._arrays.items():
            wide = self._result(array.resize(exclusive_max=[begin + count, array.shape[1]]))
            self._arrays[name] = wide
            futures.append(wide[begin : begin + count].write(self._buffer[name][:count]))
        self._writing = (self._number, futures, segment)
        if count == self.layout.shard_tokens:
            self._number, self._entries = self._number + 1, []
            self._buffer = self._new_buffer()

    def _finish_shard(self) -> None:
        """Wait for the shard that is being written, then write its part of the index."""
        if self._writing is None:
            return
        (number, futures, segment), self._writing = self._writing, None
        for future in futures:
            self._result(future)
        path = segment_path(self.folder, number)
        unfinished = path.with_suffix(".unfinished")
        try:
            with unfinished.open("wb") as file:
                np.savez(file, **segment._asdict())
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError as error:
            raise self._refused(error.strerror or str(error)) from None

    def _new_buffer(self) -> dict[str, np.ndarray]:
        dtype = DTYPES[self.layout.dtype]
        shape = self.layout.shard_tokens
        return {name: np.zeros((shape, width), dtype) for name, width in self.layout.widths.items()}

    def _open_array(self, path: Path, width: int) -> Any:
        if (path / "zarr.json").exists():
            return self._result(ts.open(array_spec(path), open=True))
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        checked = [little, {"name": "crc32c"}]
        inner = {
            "chunk_shape": [self.layout.chunk_tokens, width],
            "codecs": checked,
            "index_codecs": checked,
        }
        metadata = {
            "shape": [0, width],
            "data_type": self.layout.dtype,
            "fill_value": "NaN",
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [self.layout.shard_tokens, width]},
            },
            "codecs": [{"name": "sharding_indexed", "configuration": inner}],
        }
        spec = {**array_spec(path), "metadata": metadata}
        return self._result(ts.open(spec, create=True, open=True))

    def _result(self, future: Any) -> Any:
        try:
            return future.result()
        except ValueError as error:  # tensorstore's own kind for all of them
            raise self._refused(str(error)[:300]) from None

    def _refused(self, reason: str) -> UserError:
        return UserError(
            f"{self.folder} cannot be written: {reason}. What was captured so far is kept; make"
            " room and run the same command again"
        )

    def _write_manifest(self) -> None:
        body = {**self.about, "layout": dataclasses.asdict(self.layout)}
        path = self.folder / MANIFEST
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(body, indent=1))
        unfinished.replace(path)


def find_differences(manifest: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Describe the entries of `expected`, the dependencies of states, that differ from a
    manifest."""
    listed = []
    for name, value in expected.items():
        stored = manifest.get(name)
        if stored == value or name in ("format", "datasets"):
            continue
        if isinstance(value, str) and len(value) == 64:  # a digest tells people nothing
            listed.append(f"other {name}")
        else:
            listed.append(f"{name} {stored} there, {value} here")
    return listed
