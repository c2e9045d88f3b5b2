"""The trainer's end of the TCP links over which servers receive weights.

Every worker of every server connects to one listening port (`jaxtrain_vllm/engine.py`), says who it
is and what it holds, and then waits to be sent something; see `jaxtrain_vllm/wire.py`.
"""

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.rollout.vllm.control import ServerGone
from jaxtrain_vllm import wire

HELLO_SECONDS = 30.0


class Link:
    """One worker."""

    def __init__(self, connection: socket.socket, hello: dict[str, Any]):
        self.connection, self.hello = connection, hello

    def ask(
        self, header: dict[str, Any], payload: Sequence[np.ndarray] = (), *, timeout: float
    ) -> dict[str, Any]:
        """The answer to a message; ServerGone when the link breaks."""
        try:
            self.connection.settimeout(timeout)
            wire.send_message(self.connection, header, payload)
            return wire.receive_message(self.connection)[0]
        except TimeoutError:
            self.close()
            raise ServerGone(f"a worker took longer than {timeout:g} s for weights") from None
        except (OSError, wire.WireError) as error:
            self.close()
            raise ServerGone(f"the link to a worker broke: {error}") from None

    def close(self) -> None:
        self.connection.close()


class WeightLinks:
    """Listens for workers and keeps their links by server."""

    def __init__(self, host: str, port: int):
        self.host, self.token = host, secrets.token_hex(16)
        try:
            self.listener = socket.create_server((host, port))
        except OSError as error:
            raise UserError(
                f"rollout.vllm.listen {host!r}, listen_port {port}: cannot listen there:"
                f" {error.strerror or error}; name an address of this machine and a free port"
            ) from None
        self.port = self.listener.getsockname()[1]
        self._links: dict[str, list[Link]] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._accept, name="weight links", daemon=True).start()

    def describe(self, server: str) -> dict[str, Any]:
        """What a server must know to connect."""
        return {"host": self.host, "port": self.port, "token": self.token, "server": server}

    def forget(self, server: str) -> None:
        """Close the links of a server."""
        with self._changed:
            links = self._links.pop(server, [])
        for link in links:
            link.close()

    def wait_for(self, server: str, count: int, seconds: float) -> list[Link]:
        """The links of a server's `count` workers; ServerGone when they do not come."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while len(self._links.get(server, ())) < count:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    found = len(self._links.get(server, ()))
                    raise ServerGone(f"{found} of {count} workers connected in {seconds:g} s")
            return list(self._links[server])

    def close(self) -> None:
        self.listener.close()
        for server in list(self._links):
            self.forget(server)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """Take in whoever knows the token; hang up on anybody else."""
        try:
            connection.settimeout(HELLO_SECONDS)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello, _ = wire.receive_message(connection)
            known = hmac.compare_digest(str(hello.get("token")), self.token)
        except (OSError, wire.WireError):
            known = False
        if not known:
            connection.close()
            return
        with self._changed:
            self._links.setdefault(str(hello.get("server")), []).append(Link(connection, hello))
            self._changed.notify_all()
