"""Upload of an adapter's files to a server that does not see the run's disk.

The trainer sends them when it publishes a version; the server (`jaxtrain_vllm/adapter_store.py`)
keeps them in a folder of its own, complete or not at all, and then loads that folder.
"""

import http.client
import json
import threading
import urllib.parse
import zlib
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.errors import UserError
from jaxtrain.generation.vllm.control import (
    KEY_VARIABLE,
    Deadline,
    ServerGone,
    ServerRefused,
    explain,
    headers,
)
from jaxtrain_vllm.adapter_store import FILES, FILES_HEADER, ROUTE
from jaxtrain_vllm.wire import cut_after

CHUNK_BYTES = 2**20
MAX_ANSWER_BYTES = 2**16


def send_adapter(url: str, folder: Path, name: str, deadline: Deadline) -> str:
    """Send the files of folder/name; return the server's folder that holds them.

    Raises ServerGone, ServerRefused, or UserError for a server that accepts no files.
    """
    # Sizes and checksums go ahead of the files: each is read twice, and none is held in memory.
    sizes = {file: describe(folder / name / file) for file in FILES}
    length = sum(size for size, _ in sizes.values())
    fields = {FILES_HEADER: json.dumps(sizes), "Content-Length": str(length)}
    status, raw = _request(url, "PUT", name, fields, read_all(folder / name), deadline)
    if status == 200:
        try:
            return str(json.loads(raw)["path"])
        except (ValueError, KeyError, TypeError):
            status = 404  # another program answers there: as one that lacks the route
    if status in (403, 404, 405):
        raise UserError(
            f"{url} does not see {folder}, where the adapters lie, and takes no files (HTTP"
            f" {status}: {explain(raw, 120)}); set rollout.vllm.adapter_dir to a folder that it"
            " sees under the same path, or start it with python -m jaxtrain_vllm.serve and"
            f" {KEY_VARIABLE} in its environment and here"
        )
    raise ServerRefused(status, f"the adapter was not taken: {explain(raw)}")


def remove_adapter(url: str, name: str, seconds: float) -> None:
    """Have the server delete an uploaded adapter; ServerGone."""
    _request(url, "DELETE", name, {}, None, Deadline(seconds))


def describe(file: Path) -> tuple[int, int]:
    """Return (bytes, crc32) of a file."""
    crc = 0
    with file.open("rb") as stream:
        while piece := stream.read(CHUNK_BYTES):
            crc = zlib.crc32(piece, crc)
    return file.stat().st_size, crc


def read_all(folder: Path) -> Iterator[bytes]:
    """Yield the files of an adapter, one after the other."""
    for file in FILES:
        with (folder / file).open("rb") as stream:
            while piece := stream.read(CHUNK_BYTES):
                yield piece


def _request(
    url: str,
    method: str,
    name: str,
    fields: dict[str, str],
    body: Iterator[bytes] | None,
    deadline: Deadline,
) -> tuple[int, bytes]:
    """Return (status, answer) of one request, which must end before the deadline."""
    base = urllib.parse.urlsplit(url)
    make = http.client.HTTPSConnection if base.scheme == "https" else http.client.HTTPConnection
    late, seconds = threading.Event(), deadline.left()
    if seconds <= 0:
        raise ServerGone("there is no time left to send the adapter")
    connection = make(base.hostname or "", base.port, timeout=seconds)
    try:
        connection.connect()
        # A socket's time-out starts anew with every read and write; this limits the whole request.
        with cut_after(seconds, connection.sock, late):
            sent = {**headers(url), "Content-Type": "application/octet-stream", **fields}
            connection.request(method, f"{base.path}{ROUTE}{name}", body, sent)
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = "it took too long" if late.is_set() else str(error) or repr(error)
        raise ServerGone(f"an adapter did not get there: {why}") from None
    finally:
        connection.close()
