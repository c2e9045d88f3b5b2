"""Payloads of a version, fetched in ranges over several connections, from any host that has them.

    receiving worker                                     the trainer, or a worker that has it
    one connection per range (`listener.py`)   ───────>
    {fetch: name, start, stop, seconds}        ───────>
                                               <───────  the range, or {error}

The payload is verified by the checksum that the trainer sent over its own link (`wire.py`): a
worker that passes a version on is not trusted. All ranges together must end within the seconds
that the trainer allows; anything missing by then is an error.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np

from jaxtrain_vllm import handshake, wire

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 30.0
MAX_SECONDS = 24 * 3600.0
MAX_STREAMS = 64
MESSAGE_BYTES = 2**16
"""Limit for a request, and for the header of a range."""


def name_payload(version: int, checksum: int, base: int | None) -> str:
    """Return the name of a payload: a whole version, or its changes since `base`."""
    return f"{version}/{checksum:08x}/{'full' if base is None else base}"


class PayloadOffers:
    """Payloads that others may fetch, by name. Used from several threads."""

    def __init__(self) -> None:
        self._parts: dict[str, list[memoryview]] = {}

    def put(self, name: str, payload: Sequence[Any]) -> None:
        """Offer a payload: memory that must not be written until `clear`."""
        parts = [np.ascontiguousarray(part).view(np.uint8).data for part in payload if len(part)]
        self._parts = {**self._parts, name: parts}

    def clear(self) -> None:
        """Offer nothing. Ranges in transfer continue; the checksum reveals if they were
        overwritten."""
        self._parts = {}

    def admit(self, connection: socket.socket) -> None:
        """Answer the request of an authenticated connection, in a thread."""
        threading.Thread(target=self._receive_request, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket, request: dict[str, Any]) -> None:
        """Send the requested range, or an error, and close the connection."""
        late = threading.Event()
        with contextlib.closing(connection), contextlib.suppress(OSError, wire.WireError):
            connection.settimeout(None)
            try:
                name, seconds = str(request["fetch"]), float(request["seconds"])
                start, stop = int(request["start"]), int(request["stop"])
                parts = self._parts[name]
                if not 0 <= start <= stop <= sum(map(len, parts)):
                    raise ValueError(f"{start} to {stop}")
                header, sent = {}, [*cut(parts, start, stop)]
            except (KeyError, TypeError, ValueError, OverflowError):
                header, sent = {"error": f"{str(request.get('fetch'))[:80]} is not here"}, []
                seconds = REQUEST_SECONDS
            with wire.cut_after(min(max(seconds, 0.0), MAX_SECONDS), connection, late):
                wire.send_message(connection, header, sent)

    def _receive_request(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(REQUEST_SECONDS)
            request, _ = wire.receive_message(connection, MESSAGE_BYTES, 0)
        except (OSError, wire.WireError):
            connection.close()
            return
        self.answer(connection, request)


def cut(parts: Sequence[memoryview], start: int, stop: int) -> Iterator[np.ndarray]:
    """Yield the bytes from start to stop of parts that lie end to end."""
    for part in parts:
        if start < len(part) and stop > 0:
            yield np.frombuffer(part[max(start, 0) : stop], np.uint8)
        start, stop = start - len(part), stop - len(part)


class PayloadFetch:
    """Fetch of one payload; `stop` ends it from another thread."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []
        self._stopped = False
        self._lock = threading.Lock()

    def run(
        self,
        address: tuple[str, int],
        token: bytes,
        name: str,
        room: memoryview,
        *,
        streams: int,
        seconds: float,
    ) -> None:
        """Fill `room`; raises OSError or WireError on failure, or after `seconds`."""
        bounds = [len(room) * i // streams for i in range(streams + 1)]
        late = threading.Event()

        def fetch_one(start: int, stop: int) -> None:
            connection = socket.create_connection(address, min(CONNECT_SECONDS, seconds))
            with contextlib.closing(connection):
                with self._lock:
                    self._open.append(connection)
                    if self._stopped:
                        raise OSError("given up")
                with wire.cut_after(seconds, connection, late):
                    handshake.introduce(connection, token)
                    request = {"fetch": name, "start": start, "stop": stop, "seconds": seconds}
                    wire.send_message(connection, request)
                    part = room[start:stop]
                    header, _ = wire.receive_message(
                        connection,
                        MESSAGE_BYTES,
                        len(part),
                        lambda header, size: part if size == len(part) else None,
                    )
                if header.get("error") or header["bytes"] != len(part):
                    raise wire.WireError(f"it was not sent: {str(header.get('error'))[:200]}")

        with ThreadPoolExecutor(streams, thread_name_prefix="fetch") as pool:
            ranges = zip(bounds[:-1], bounds[1:], strict=True)
            tasks = [pool.submit(fetch_one, *bound) for bound in ranges]
            failed = None
            for task in as_completed(tasks):
                if failed is None and (failed := task.exception()) is not None:
                    self.stop()
        if failed is not None:
            if late.is_set():
                raise TimeoutError(f"not there within {seconds:.3g} s")
            raise failed

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
