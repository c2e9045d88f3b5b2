"""Images behind URLs: of allowed hosts alone, within limits of bytes and of time.

A timeout of a socket bounds one read of it: a server that sends a byte now and then would hold a
reader forever. So connections are shut down once the time of the whole fetch is over.
"""

import http.client
import socket
import threading
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.data.images.decode import MAX_BYTES
from jaxtrain.text_safety import show

SECONDS = 20.0
"""Limit of the fetch of a URL, redirections included."""


def fetch(url: str, hosts: tuple[str, ...]) -> bytes:
    """Return what a URL of an allowed host holds, at most a byte more than MAX_BYTES; raises
    MalformedRow. hosts: in lower case."""
    check_host(url, hosts)
    deadline = FetchDeadline(SECONDS)
    opener = urllib.request.build_opener(_SameHosts(hosts), _Handler(deadline))
    try:
        with opener.open(url, timeout=SECONDS) as reply:
            data = reply.read(MAX_BYTES + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if deadline.over or isinstance(reason, TimeoutError):
            reason = f"it takes more than {SECONDS:g} seconds"
        raise MalformedRow(f"an image cannot be fetched: {reason}") from None
    finally:
        deadline.close()
    if deadline.over:  # a read of a connection that was shut down just ends
        raise MalformedRow(f"an image cannot be fetched: it takes more than {SECONDS:g} seconds")
    return data


def check_host(url: str, hosts: tuple[str, ...]) -> None:
    """Raise MalformedRow for a URL that is not of an allowed host."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise MalformedRow(f"an image is no URL: {error}") from None
    if parts.scheme not in ("http", "https"):
        raise MalformedRow(f"an image is a URL of scheme {show(parts.scheme, 20)}")
    if not hosts:
        raise MalformedRow("an image is a URL, which are read only of hosts in image_hosts")
    if parts.hostname not in hosts:
        raise MalformedRow(f"an image is a URL of {show(parts.hostname, 60)}, not in image_hosts")


class FetchDeadline:
    """End of a fetch, at which its connections are shut down."""

    def __init__(self, seconds: float):
        self.over = False
        self._end = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._shut_down)
        self._timer.daemon = True
        self._timer.start()

    @property
    def seconds(self) -> float:
        """Seconds that are left, more than 0."""
        return max(self._end - time.monotonic(), 0.01)

    def watch(self, connection: socket.socket) -> None:
        """Shut this connection down, too."""
        # A duplicate is valid whatever becomes of the object, which TLS wraps in another one.
        with self._lock:
            self._sockets.append(connection.dup())
        if self.over:
            self._shut_down()

    def close(self) -> None:
        """Watch no longer."""
        self._timer.cancel()
        with self._lock:
            while self._sockets:
                self._sockets.pop().close()

    def _shut_down(self) -> None:
        self.over = True
        with self._lock:
            for connection in self._sockets:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # the other side was faster
                    pass


class _Connection(http.client.HTTPConnection):
    """Connection with a deadline."""

    deadline: FetchDeadline

    @override
    def connect(self) -> None:
        self._create_connection = self._dial
        super().connect()
        self.deadline.watch(self.sock)

    def _dial(self, address: tuple[str, int], *limits: Any) -> socket.socket:
        """Connect to the first address of a host that answers. Each gets an equal share of the time
        that is left: socket.create_connection would spend all of it on every dead address."""
        failure = OSError("the host has no address")
        addresses = socket.getaddrinfo(*address, 0, socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, target) in enumerate(addresses):
            try:
                connection = socket.socket(family, kind, protocol)
            except OSError as error:  # a host without IPv6
                failure = error
                continue
            try:
                connection.settimeout(self.deadline.seconds / (len(addresses) - number))
                connection.connect(target)
            except OSError as error:
                connection.close()
                failure = error
            else:
                connection.settimeout(self.deadline.seconds)
                return connection
        raise failure


class _SecureConnection(http.client.HTTPSConnection, _Connection):
    """Connection with a deadline that is watched before TLS begins: HTTPSConnection.connect calls
    _Connection.connect."""


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opener of connections with one deadline."""

    def __init__(self, deadline: FetchDeadline):
        super().__init__()
        self.deadline = deadline

    @override
    def http_open(self, req: Any) -> Any:
        return self._open(_Connection, req)

    @override
    def https_open(self, req: Any) -> Any:
        return self._open(_SecureConnection, req)

    def _open(self, kind: type[_Connection], req: Any) -> Any:
        def connect(host: str, **options: Any) -> _Connection:
            connection = kind(host, **options)
            connection.deadline = self.deadline
            return connection

        return self.do_open(connect, req)


class _SameHosts(urllib.request.HTTPRedirectHandler):
    """Redirections to allowed hosts alone."""

    def __init__(self, hosts: tuple[str, ...]):
        self.hosts = hosts

    @override
    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str):
        check_host(newurl, self.hosts)
        return super().redirect_request(req, fp, code, msg, headers, newurl)
