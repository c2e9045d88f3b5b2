"""Adapters that a trainer uploads to a server which does not see its disk.

    PUT /jaxtrain/adapters/NAME     X-Files: {"adapter_config.json": [bytes, crc32], ...}
                                    body: the files, one after the other
          ─> {"path": a folder of this server}, which vLLM's own /v1/load_lora_adapter then reads
    DELETE /jaxtrain/adapters/NAME

A folder appears complete or not at all. Only the two files of an adapter are accepted, and names
cannot leave the store's folder; the newest MOST folders are kept. The guard (`guard.py`) demands
the server's key; a server without one accepts nothing.
"""

import asyncio
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from jaxtrain_vllm.folders import make_temporary_folder

ROUTE = "/jaxtrain/adapters/"
FILES_HEADER = "X-Files"
FILES = ("adapter_config.json", "adapter_model.safetensors")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
MAX_BYTES = 2**34
"""Limit for an adapter; rank 64 on all layers of a 70B model is a fifth of it in bfloat16."""
MOST = 64

Answer = tuple[int, dict[str, Any]]
"""(HTTP status, JSON)."""


class AdapterRefused(Exception):
    """Raised for an upload that is no adapter. status: of the HTTP answer."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


class AdapterStore:
    """The adapters of one server."""

    def __init__(self, folder: Path | None = None, most_bytes: int = MAX_BYTES):
        """folder: by default a new temporary folder, private to this user, created with the first
        adapter and removed with the process."""
        self._folder, self.most_bytes = folder, most_bytes

    @property
    def folder(self) -> Path:
        if self._folder is None:
            self._folder = make_temporary_folder("jaxtrain-adapters-")
        return self._folder

    async def handle(
        self, method: str, name: str, files: str | None, body: AsyncIterator[bytes]
    ) -> Answer:
        """Return the answer to one request. files: the X-Files header."""
        try:
            if NAME.fullmatch(name) is None:
                raise AdapterRefused(400, f"{name[:200]!r} is no name of an adapter")
            if method == "DELETE":
                await asyncio.to_thread(shutil.rmtree, self.folder / name, ignore_errors=True)
                return 200, {}
            if method != "PUT":
                raise AdapterRefused(405, "PUT or DELETE")
            return 200, {"path": str(await self._take(name, read_files(files), body))}
        except AdapterRefused as refused:
            return refused.status, {"error": str(refused)}
        except OSError as error:
            return 507, {"error": f"it cannot be written: {error.strerror or error}"}

    async def _take(
        self, name: str, files: dict[str, tuple[int, int]], body: AsyncIterator[bytes]
    ) -> Path:
        if sum(size for size, _ in files.values()) > self.most_bytes:
            raise AdapterRefused(413, f"more than {self.most_bytes} bytes")
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=self.folder))
        try:
            rest = b""
            for file, (size, crc) in files.items():
                received_crc, received = 0, 0
                with (part / file).open("wb") as stream:
                    while received < size:
                        piece = rest or await anext(body, b"")
                        if not piece:
                            raise AdapterRefused(
                                400, f"{file} is cut off after {received} of {size} bytes"
                            )
                        piece, rest = piece[: size - received], piece[size - received :]
                        received_crc, received = (
                            zlib.crc32(piece, received_crc),
                            received + len(piece),
                        )
                        await asyncio.to_thread(stream.write, piece)
                if received_crc != crc:
                    raise AdapterRefused(400, f"{file} is not what was sent: another checksum")
            if rest or await anext(body, b""):
                raise AdapterRefused(400, "more bytes than files")
            await asyncio.to_thread(self._put, part, self.folder / name)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return self.folder / name

    def _put(self, part: Path, target: Path) -> None:
        """Move a complete adapter into place, and remove the oldest."""
        shutil.rmtree(target, ignore_errors=True)
        os.replace(part, target)
        folders = [path for path in self.folder.iterdir() if NAME.fullmatch(path.name)]
        for path in sorted(folders, key=lambda path: path.stat().st_mtime_ns)[:-MOST]:
            shutil.rmtree(path, ignore_errors=True)


def read_files(text: str | None) -> dict[str, tuple[int, int]]:
    """Parse an X-Files header into {name: (bytes, crc32)}; AdapterRefused."""
    try:
        parsed = json.loads(text or "")
        files = {name: (size, crc) for name, (size, crc) in parsed.items()}
    except (ValueError, TypeError, AttributeError):
        raise AdapterRefused(400, f"no {FILES_HEADER} such as {{NAME: [bytes, crc32]}}") from None
    numbers = [number for pair in files.values() for number in pair]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise AdapterRefused(400, f"{FILES_HEADER}: sizes and checksums are whole numbers")
    if set(files) != set(FILES):
        raise AdapterRefused(400, f"{FILES_HEADER}: an adapter is {' and '.join(FILES)}")
    return files
