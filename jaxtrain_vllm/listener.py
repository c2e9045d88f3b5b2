"""Listening ports that accept only connections which prove that they know the run's token.

    listener thread   accepts, and runs `handshake.py` with all pending connections at once: each
          |           within 10 s, at most 36 bytes at a time
          v
    admit(connection)   only with the token; all others are closed

A stranger costs a socket and a hundred bytes: no thread, and no buffer of a size that it chooses.
Beyond MAX_WAITING pending connections the oldest is closed. Received bytes are never printed.
"""

import errno
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

from jaxtrain_vllm import handshake

MAX_WAITING = 64
"""Limit for connections that have not proved the token yet."""
LOG_SECONDS = 60.0
"""Minimum time between two log lines about refused connections."""


class PendingConnection:
    """A connection that has not proved the token yet."""

    def __init__(self, connection: socket.socket, address: str, token: bytes):
        self.connection, self.address = connection, address
        self.visitor = handshake.HandshakeListener(token)
        self.read = b""
        self.deadline = time.monotonic() + handshake.SECONDS


class AuthenticatedListener:
    """Owns the listening sockets and a thread; `close` ends both.

    admit(connection): called in the listener's thread with each authenticated, blocking socket; it
    must not block. log: receives the line about refused connections; by default standard error.
    """

    def __init__(
        self,
        name: str,
        listeners: Sequence[socket.socket],
        token: bytes,
        admit: Callable[[socket.socket], None],
        log: Callable[[str], None] | None = None,
    ):
        self.name, self.listeners, self.token, self.admit = name, list(listeners), token, admit
        self.log = log or (lambda text: print(text, file=sys.stderr, flush=True))
        self.port = self.listeners[0].getsockname()[1]
        self.refused = 0
        """Number of connections refused so far."""
        self._logged_count, self._logged_at = 0, -LOG_SECONDS
        self._waiting: dict[socket.socket, PendingConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._closed = False
        for socket_ in (*self.listeners, self._woken):
            socket_.setblocking(False)
            self._selector.register(socket_, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no further connections; admitted ones stay open."""
        self._closed = True
        try:
            self._wake.send(b"x")
        except OSError:
            return  # closed before
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def _run(self) -> None:
        while not self._closed:
            deadlines = [waiting.deadline for waiting in self._waiting.values()]
            pause = max(min(deadlines) - time.monotonic(), 0) if deadlines else None
            for key, _ in self._selector.select(pause):
                if key.fileobj in self.listeners:
                    self._accept(key.fileobj)  # pyright: ignore[reportArgumentType]
                elif waiting := self._waiting.get(key.fileobj):  # pyright: ignore
                    self._read(waiting)
            time_now = time.monotonic()
            for waiting in [w for w in self._waiting.values() if w.deadline <= time_now]:
                self._refuse(waiting, "silent or too slow")
        for waiting in list(self._waiting.values()):
            waiting.connection.close()
        for socket_ in (*self.listeners, self._wake, self._woken):
            socket_.close()
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except BlockingIOError:
            return  # gone again
        except OSError:
            time.sleep(0.1)  # no file descriptor is left; those who wait give theirs back in time
            return
        if len(self._waiting) >= MAX_WAITING:
            self._refuse(next(iter(self._waiting.values())), "too many at once")
        connection.setblocking(False)
        self._waiting[connection] = PendingConnection(connection, str(address[0]), self.token)
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, waiting: PendingConnection) -> None:
        try:
            received = waiting.connection.recv(waiting.visitor.num_expected - len(waiting.read))
            if not received:
                self._refuse(waiting, "hung up")
                return
            waiting.read += received
            if not waiting.read.startswith(handshake.MAGIC[: len(waiting.read)]) and (
                waiting.visitor.num_expected == handshake.GREETING_BYTES
            ):
                raise handshake.HandshakeRefused("no greeting of this protocol")
            if len(waiting.read) < waiting.visitor.num_expected:
                return
            reply = waiting.visitor.handle(waiting.read)
            waiting.read = b""
            if reply is not None:
                # 64 bytes into an empty buffer; whoever does not even read them is no loss.
                waiting.connection.sendall(reply)
                return
        except BlockingIOError:
            return
        except handshake.HandshakeRefused as error:
            self._refuse(waiting, str(error))
            return
        except OSError:
            self._refuse(waiting, "hung up")
            return
        self._forget(waiting)
        try:
            waiting.connection.setblocking(True)
            waiting.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A machine that vanishes closes nothing.
            waiting.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.admit(waiting.connection)
        except (OSError, RuntimeError):  # gone already; or no thread, or no loop, left for it
            waiting.connection.close()

    def _forget(self, waiting: PendingConnection) -> None:
        del self._waiting[waiting.connection]
        self._selector.unregister(waiting.connection)

    def _refuse(self, waiting: PendingConnection, why: str) -> None:
        self._forget(waiting)
        try:
            waiting.connection.recv(2**16)  # with bytes unread the end would be a reset
        except OSError:
            pass
        waiting.connection.close()
        self.refused += 1
        time_now = time.monotonic()
        if time_now - self._logged_at >= LOG_SECONDS:
            count, self._logged_count, self._logged_at = (
                self.refused - self._logged_count,
                self.refused,
                time_now,
            )
            suffix = f" ({count - 1} before it)" if count > 1 else ""
            self.log(
                f"{self.name}, port {self.port}: hung up on a connection from {waiting.address}"
                f"{suffix} that did not show this run's token: {why}"
            )


def open_listeners(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Open listening sockets on one port of this machine, 0 for any free one, at these addresses.

    "" stands for all addresses, IPv4 and IPv6. Addresses that this machine does not have are
    skipped; raises OSError if none remains.
    """
    if "" in hosts:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return [socket.create_server(("", port), family=family, dualstack_ipv6=dual)]
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    for host in hosts:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listeners.append(socket.create_server((host, port), family=family))
        except OSError as error:
            if is_absent(error):
                absent = error
                continue
            for opened in listeners:
                opened.close()
            raise
        port = listeners[-1].getsockname()[1]
    if not listeners:
        raise absent or OSError("no address to listen at")
    return listeners


def is_absent(error: OSError) -> bool:
    """Return True if this machine lacks the address, rather than a free port."""
    return isinstance(error, socket.gaierror) or error.errno in _NO_SUCH_ADDRESS


LOOPBACK = ("127.0.0.1", "::1")
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
