"""Answers on their way into a file: each is on disk when it ends, the file is there when all are.

    OUTPUT.part     a line for what the answers belong to, then one for each answer, as they end
    OUTPUT          all rows in their order; with --shard-rows a folder of such files

The same command goes on with what OUTPUT.part holds. An answer depends on the seed and the place of
its prompt alone, so it is the one that the interrupted command would have written.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from jaxtrain.errors import UserError
from jaxtrain.runs.run_files import require_rows_file, write_output


class AnswerFile:
    """Answers of one command: {index of a row: keys to add to it}."""

    def __init__(
        self,
        path: Path,
        rows: Sequence[Mapping[str, Any]],
        settings: Any,
        *,
        overwrite: bool = False,
        shard_rows: int | None = None,
    ):
        """settings: what the answers depend on beside the rows. shard_rows: `path` is a folder of
        files of that many rows. Raises UserError for a path that is taken, by an output or by
        answers to something else, unless `overwrite`."""
        self.path, self.rows, self.shard_rows = path, rows, shard_rows
        self.part = path.with_name(f"{path.name}.part")
        if shard_rows is None:
            require_rows_file(path, overwrite)
        elif (
            path.exists()
            and any(path.iterdir() if path.is_dir() else [path])
            and not overwrite
            and not self.part.exists()  # its rows may be written, but not all of them
        ):
            raise UserError(f"--output {str(path)!r} is there already; add --overwrite")
        digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
        for row in rows:
            digest.update(write_row(row))
        self.head = json.dumps({"answers_to": digest.hexdigest()}) + "\n"
        self.answers: dict[int, dict[str, Any]] = {}
        self._file: IO[bytes] | None = None
        if self.part.exists() and not overwrite:
            self._read()

    def _read(self) -> None:
        lines = self.part.read_bytes().splitlines(keepends=True)
        if lines and lines[0].decode("utf-8", "replace") != self.head:
            raise UserError(
                f"{self.part} holds answers of another model, other keys or other prompts; finish"
                " that command, or add --overwrite to discard them"
            )
        complete = lines[: len(lines) - 1] + [line for line in lines[-1:] if line.endswith(b"\n")]
        for line in complete[1:]:
            index, keys = json.loads(line)
            self.answers[index] = keys
        # The last line may have been cut off in the middle.
        with self.part.open("r+b") as file:
            file.truncate(sum(map(len, complete)))

    @property
    def pending(self) -> list[int]:
        """Indices of the rows without an answer."""
        return [index for index in range(len(self.rows)) if index not in self.answers]

    def add(self, index: int, keys: dict[str, Any]) -> None:
        """Write the answer to a row; a pipe or device gets all at the end."""
        self.answers[index] = keys
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            return
        try:
            if self._file is None:
                self.part.parent.mkdir(parents=True, exist_ok=True)
                appends = len(self.answers) > 1
                self._file = self.part.open("ab" if appends else "wb")
                if not appends:
                    self._file.write(self.head.encode())
            self._file.write(json.dumps([index, keys]).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"--output {self.part} cannot be written: {reason}") from None

    def finish(self) -> None:
        """Write all rows that have answers, with these, to their place."""
        lines = [write_row({**self.rows[i], **self.answers[i]}) for i in sorted(self.answers)]
        size = self.shard_rows or len(lines)
        starts = range(0, len(lines), size)
        for number, start in enumerate(starts):
            name = f"{number:05}-of-{len(starts):05}.jsonl"
            file = self.path / name if self.shard_rows else self.path
            write_output(file, b"".join(lines[start : start + size]))
        if self.shard_rows:
            for file in self.path.glob("*-of-*.jsonl"):  # of an output that this one replaces
                if not file.name.endswith(f"-of-{len(starts):05}.jsonl"):
                    file.unlink()
        if self._file is not None:
            self._file.close()
        self.part.unlink(missing_ok=True)


def write_row(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line of JSON; what JSON has not, such as a date, is its text."""
    return json.dumps(row, default=str).encode() + b"\n"
