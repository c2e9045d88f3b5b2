"""Values of process 0 sent to all processes: rounds of answers, results of evaluations.

    broadcast(name, make)    process 0: make() ──> TCP ──> every other process waits, on its host

No device takes part, so that the others may wait for as long as process 0 needs: a collective would
time out, and would keep the devices busy. An error of make() ends all processes through the hub;
so does the end of a process while others wait for it. Both ends show that they know the run's token
first (`jaxtrain_vllm/listener.py`); values travel as data (`parcel.py`), so that nothing received is
ever run.
"""

import hmac
import platform
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from jaxtrain.distributed import serialization
from jaxtrain.distributed.peers import Peers
from jaxtrain.distributed.processes import peers
from jaxtrain.errors import Interrupted, RunStopped, UserError
from jaxtrain_vllm.handshake import HandshakeRefused, introduce
from jaxtrain_vllm.listener import AuthenticatedListener, open_listeners

T = TypeVar("T")

NOTE = "port of the relay"


class Sender:
    """Process 0's end: one connection to each other process."""

    def __init__(self, count: int, token: bytes | None = None, listen_at: Sequence[str] = ("",)):
        """Listens at once, at `port`, for `count` processes that know the `token`."""
        self.count, self.token = count, token or secrets.token_bytes(32)
        self._arrived: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        listeners = open_listeners(listen_at, 0)
        self._gate = AuthenticatedListener(
            "the relay of process 0", listeners, self.token, self._arrived.put
        )
        self.port = self._gate.port
        self._connections: list[socket.socket] = []

    def accept(self) -> None:
        """Wait for all of them, however long (the hub ends the run where one is lost); whoever does
        not know the token is hung up on."""
        while len(self._connections) < self.count:
            self._connections.append(self._arrived.get())
        self._gate.close()

    def tell(self, name: str, value: Any) -> None:
        """Send a value to all, side by side; raises OSError when one of them is gone, TypeError
        for what `serialization.pack` does not know."""
        parts = serialization.pack(name, value)
        failures: list[OSError] = []

        def send(connection: socket.socket) -> None:
            try:
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
        """Raises UserError where that port cannot be reached, or is not process 0's."""
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
        # A machine that vanishes closes nothing; the hub tells of it, this only tidies up.
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def hear(self, name: str) -> Any:
        """The next value, which must be the one called `name`; raises OSError when process 0 is
        gone."""
        told, value = serialization.unpack(lambda size: receive_exactly(self._connection, size))
        assert told == name, f"process 0 shares {told!r}, this process waits for {name!r}"
        return value


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

    Every process calls this, in the same order. The value is made of what `parcel.py` knows; with
    one process it is handed through.
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
    sender = Sender(others.size - 1, relay_token(others), others.listen_at)
    others.note(NOTE, str(sender.port))
    sender.accept()
    return sender


def open_receiver() -> Receiver:
    """Another process's end; waits for process 0 for as long as that needs."""
    others = peers()
    assert others is not None, "processes that share something have joined"
    port = int(others.wait_for_note(NOTE))
    return Receiver(others.host, port, relay_token(others), others.start_timeout)


def relay_token(others: Peers) -> bytes:
    """The run's token, but not the hub's: what one port is shown opens no other."""
    return hmac.digest(others.token, b"relay", "sha256")


KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (Interrupted, RunStopped, UserError, StopIteration)
}


def broadcast_or_raise(name: str, make: Callable[[], T]) -> T:
    """As relay.broadcast; what `make` raises on process 0, every process raises.

    The others get an error without a kind of its own as RunStopped, with its first line.
    """
    if jax.process_count() == 1:
        return make()
    failures: list[Exception] = []

    def attempt() -> tuple[str, Any]:
        try:
            return "", make()
        except Exception as error:  # the border: it is raised again below
            failures.append(error)
            return describe(error)

    kind, value = broadcast(name, attempt)
    if not kind:
        return value
    raise seen_by_all(failures[0] if failures else KINDS[kind](value))


def describe(error: Exception) -> tuple[str, str]:
    """(name in KINDS, text) of an error, for the other processes."""
    for name, kind in KINDS.items():
        if isinstance(error, kind):
            return name, str(error)
    first = str(error).strip().partition("\n")[0][:300]
    return RunStopped.__name__, f"process 0: {type(error).__name__}: {first}"


def seen_by_all(error: Exception) -> Exception:
    """The error, marked as one that every process raises at this place."""
    error.everywhere = True  # type: ignore[attr-defined]
    return error


def can_act_together(error: BaseException) -> bool:
    """Whether all processes have come to where this error was raised."""
    return jax.process_count() == 1 or getattr(error, "everywhere", False)
