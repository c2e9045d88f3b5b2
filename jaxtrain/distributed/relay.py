"""Connections over which process 0 sends values to the other processes.

Both ends prove that they know the run's token first (`jaxtrain_vllm/listener.py`); values travel
as plain data (`serialization.py`), so that nothing received is ever executed.
"""

import hmac
import platform
import queue
import socket
import threading
from collections.abc import Sequence
from typing import Any

from jaxtrain.distributed import serialization
from jaxtrain.errors import UserError
from jaxtrain_vllm.handshake import HandshakeRefused, introduce
from jaxtrain_vllm.listener import AuthenticatedListener, open_listeners


def relay_token(run_token: bytes) -> bytes:
    """Derive the relay's token, so that what one port is shown opens no other."""
    return hmac.digest(run_token, b"relay", "sha256")


class Sender:
    """Process 0's end: one connection to each of `count` other processes."""

    def __init__(self, count: int, token: bytes, listen_at: Sequence[str] = ("",)):
        """Listens immediately, on `port`, for processes that know the token."""
        self.count = count
        self._accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._listener = AuthenticatedListener(
            "the relay of process 0", open_listeners(listen_at, 0), token, self._accepted.put
        )
        self.port = self._listener.port
        self._connections: list[socket.socket] = []

    def send(self, name: str, value: Any) -> None:
        """Send a value to all processes in parallel.

        Waits for their connections, without limit: if one is lost, the hub ends the run. Raises
        OSError when a connection breaks, TypeError for a value that `serialization.pack` refuses.
        """
        parts = serialization.pack(name, value)
        while len(self._connections) < self.count:
            self._connections.append(self._accepted.get())
        self._listener.close()
        failures: list[OSError] = []

        def send_parts(connection: socket.socket) -> None:
            try:
                for part in parts:
                    connection.sendall(part)
            except OSError as error:
                failures.append(error)

        threads = [threading.Thread(target=send_parts, args=(c,)) for c in self._connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


class Receiver:
    """Another process's end."""

    def __init__(self, host: str, port: int, token: bytes, timeout: float):
        """Connects; raises UserError if the port cannot be reached, or is not process 0's."""
        try:
            self._connection = socket.create_connection((host, port), timeout=timeout)
        except OSError as error:
            raise UserError(
                f"process 0 shares what it samples on port {port} of {host}, which cannot be"
                f" reached from {platform.node()} ({error.strerror or error}); let these machines"
                " open any port of each other, as their collectives need, too"
            ) from None
        try:
            introduce(self._connection, token)
        except HandshakeRefused as error:
            self._connection.close()
            raise UserError(
                f"port {port} of {host} is not process 0 of this run: {error}"
            ) from None
        # A machine that vanishes closes nothing. The hub ends the run then; this frees the socket.
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def receive(self, name: str) -> Any:
        """Return the next value, which must be called `name`; OSError if process 0 is gone."""
        sent_name, value = serialization.unpack(self._receive_exactly)
        assert sent_name == name, f"process 0 shares {sent_name!r}, this process waits for {name!r}"
        return value

    def _receive_exactly(self, size: int) -> bytearray:
        buffer = bytearray(size)
        view, received = memoryview(buffer), 0
        while received < size:
            count = self._connection.recv_into(view[received:])
            if not count:
                raise ConnectionError("process 0 hung up")
            received += count
        return buffer
