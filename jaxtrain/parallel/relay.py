"""Values of process 0 sent to all processes: rounds of answers, results of evaluations.

    broadcast(name, make)    process 0: make() ──> TCP ──> every other process waits, on its host

No device takes part, so that the others may wait for as long as process 0 needs: a collective would
time out, and would keep the devices busy. An error of make() ends all processes through the hub;
so does the end of a process while others wait for it.
"""

import hmac
import pickle
import platform
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxtrain.errors import UserError
from jaxtrain.parallel.processes import key_value_store, peers

T = TypeVar("T")

KEY = "jaxtrain_relay"
TOKEN_BYTES = 32
ASK_SECONDS = 600.0
"""After that long a process asks anew where process 0 is; nothing is given up."""


class Sender:
    """Process 0's end: one connection to each other process."""

    def __init__(self, count: int):
        """Listens at once, at `port`, for `count` processes that know the `token`."""
        self.count, self.token = count, secrets.token_bytes(TOKEN_BYTES)
        self._listener = listen()
        self.port = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []

    def accept(self) -> None:
        """Wait for all of them, however long (the hub ends the run where one is lost); whoever does
        not know the token is hung up on."""
        while len(self._connections) < self.count:
            connection, _ = self._listener.accept()
            connection.settimeout(5)
            try:
                known = hmac.compare_digest(
                    bytes(receive_exactly(connection, TOKEN_BYTES)), self.token
                )
            except OSError:
                known = False
            if not known:
                connection.close()
                continue
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.append(connection)
        self._listener.close()

    def tell(self, name: str, value: Any) -> None:
        """Send a value to all, side by side; raises OSError when one of them is gone."""
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps((name, value), protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(body), *(buffer.raw() for buffer in buffers)]
        failures: list[OSError] = []

        def send(connection: socket.socket) -> None:
            try:
                sizes = [part.nbytes for part in parts]
                connection.sendall(struct.pack(f"<Q{len(sizes)}Q", len(sizes), *sizes))
                for part in parts:
                    connection.sendall(part)
            except OSError as error:
                failures.append(error)

        threads = [threading.Thread(target=send, args=(c,)) for c in self._connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


class Receiver:
    """Another process's end."""

    def __init__(self, host: str, port: int, token: bytes, timeout: float):
        """Raises UserError where that port cannot be reached."""
        try:
            self._connection = socket.create_connection((host, port), timeout=timeout)
        except OSError as error:
            raise UserError(
                f"process 0 shares what it samples on port {port} of {host}, which cannot be"
                f" reached from {platform.node()} ({error.strerror or error}); let these machines"
                " open any port of each other, as their collectives need, too"
            ) from None
        self._connection.sendall(token)
        self._connection.settimeout(None)
        # A machine that vanishes closes nothing; the hub tells of it, this only tidies up.
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def hear(self, name: str) -> Any:
        """The next value, which must be the one called `name`; raises OSError when process 0 is
        gone."""
        (count,) = struct.unpack("<Q", receive_exactly(self._connection, 8))
        sizes = struct.unpack(f"<{count}Q", receive_exactly(self._connection, 8 * count))
        body, *buffers = [receive_exactly(self._connection, size) for size in sizes]
        told, value = pickle.loads(body, buffers=buffers)
        assert told == name, f"process 0 shares {told!r}, this process waits for {name!r}"
        return value


def listen() -> socket.socket:
    """A listening socket on any free port of this machine, for both kinds of addresses."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def receive_exactly(connection: socket.socket, size: int) -> bytearray:
    """`size` bytes; ConnectionError when the other side hangs up before."""
    found = bytearray(size)
    view, done = memoryview(found), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            raise ConnectionError("process 0 hung up")
        done += count
    return found


_sender: Sender | None = None
_receiver: Receiver | None = None


def broadcast(name: str, make: Callable[[], T]) -> T:
    """What `make` returns on process 0, on every process: it is called there alone.

    Every process calls this, in the same order. The value must be picklable; with one process it
    is handed through.
    """
    global _sender, _receiver
    if jax.process_count() == 1:
        return make()
    if jax.process_index() == 0:
        value = make()
        _sender = _sender or open_sender()
        _sender.tell(name, value)
        return value
    _receiver = _receiver or open_receiver()
    return _receiver.hear(name)


def open_sender() -> Sender:
    """Process 0's end, once the others have connected to it."""
    others = peers()
    assert others is not None, "processes that share something have joined"
    sender = Sender(others.size - 1)
    address = f"{sender.port} {sender.token.hex()}"
    key_value_store().key_value_set(KEY, address)
    sender.accept()
    return sender


def open_receiver() -> Receiver:
    """Another process's end; waits for process 0 for as long as that needs."""
    others = peers()
    assert others is not None, "processes that share something have joined"
    store = key_value_store()
    while True:
        try:
            address = store.blocking_key_value_get(KEY, int(ASK_SECONDS * 1000))
            break
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
    port, token = address.split()
    return Receiver(others.host, int(port), bytes.fromhex(token), others.start_timeout)
