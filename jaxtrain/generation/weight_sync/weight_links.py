"""The trainer's end of the TCP links over which servers receive weights.

Every worker of every server connects to one listening port (`jaxtrain_vllm/engine.py`), shows that
it knows the token its server was sent (`jaxtrain_vllm/listener.py`), says who it is and what it holds,
and then waits to be sent something; see `jaxtrain_vllm/wire.py`.
"""

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.generation.vllm.control import ServerGone
from jaxtrain_vllm import payloads, wire
from jaxtrain_vllm.listener import AuthenticatedListener, open_listeners

HELLO_SECONDS = 30.0
ANSWER_BYTES = 2**16
"""A worker's answer is a line of JSON without payload; only its hello is longer."""


class WorkerLink:
    """One worker."""

    def __init__(self, connection: socket.socket, hello: dict[str, Any]):
        self.connection, self.hello = connection, hello
        self.can_share = True
        """Whether it may be able to read memory of other processes of its host."""
        self.is_base = True
        """Whether what it serves came over this link, and does not lie in another's memory, so that
        it is a base for a delta."""
        self.served = read_served(hello.get("serves"))
        """(version, checksum) of this run's that it serves and can be sent a delta on; None where
        that is not known."""
        self.can_fetch = True
        """Whether it may be able to fetch what it is not sent."""
        self.failures = 0
        """How often in a row it did not get from another host what it was to fetch there."""
        self.host, self.local_host = (
            connection.getpeername()[0],
            connection.getsockname()[0],
        )

    def ask(
        self, header: dict[str, Any], payload: Sequence[np.ndarray] = (), *, timeout: float
    ) -> dict[str, Any]:
        """The answer to a message, within `timeout` seconds; ServerGone when the link breaks."""
        late = threading.Event()
        try:
            self.connection.settimeout(None)
            with wire.cut_after(timeout, self.connection, late):
                wire.send_message(self.connection, header, payload)
                return wire.receive_message(self.connection, ANSWER_BYTES, 0)[0]
        except (OSError, wire.WireError) as error:
            self.close()
            if late.is_set():
                raise ServerGone(f"a worker took longer than {timeout:.3g} s for weights") from None
            raise ServerGone(f"the link to a worker broke: {error}") from None

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more, as far as this side knows."""
        return self.connection.fileno() < 0

    def close(self) -> None:
        self.connection.close()


def read_served(field: Any) -> tuple[int, int] | None:
    """What a hello says of the version that is served there; None where it says nothing."""
    if isinstance(field, list) and len(field) == 2 and all(type(number) is int for number in field):
        return field[0], field[1]
    return None


class WeightLinks:
    """Listens for workers and keeps their links by server."""

    def __init__(self, host: str, port: int):
        self.host, self.token = host, secrets.token_hex(32)
        self._links: dict[str, list[WorkerLink]] = {}
        self._expected: set[str] = set()
        self._changed = threading.Condition()
        self.offers = payloads.PayloadOffers()
        """What workers may fetch here instead of being sent it."""
        try:
            listeners = open_listeners([host], port)
        except OSError as error:
            raise UserError(
                f"rollout.vllm.listen {host!r}, listen_port {port}: cannot listen there:"
                f" {error.strerror or error}; name an address of this machine and a free port"
            ) from None
        self.listener = AuthenticatedListener(
            "rollout.vllm.listen", listeners, self.token.encode(), self._admit
        )
        self.port = self.listener.port

    def describe(self, server: str) -> dict[str, Any]:
        """What a server must know to connect; from then on its workers are expected."""
        self._expected.add(server)
        return {"host": self.host, "port": self.port, "token": self.token, "server": server}

    def forget(self, server: str) -> None:
        """Close the links of a server."""
        with self._changed:
            links = self._links.pop(server, [])
        for link in links:
            link.close()

    def wait_for(self, server: str, count: int, seconds: float) -> list[WorkerLink]:
        """The links of a server's `count` workers; ServerGone when they do not come."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while len(self._links.get(server, ())) < count:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    connected = len(self._links.get(server, ()))
                    raise ServerGone(f"{connected} of {count} workers connected in {seconds:g} s")
            return list(self._links[server])

    def known(self, server: str) -> list[WorkerLink]:
        """The links of a server as far as there are any."""
        with self._changed:
            return list(self._links.get(server, ()))

    def all_share(self) -> bool:
        """Whether all workers that are connected read the trainer's memory."""
        with self._changed:
            links = [link for links in self._links.values() for link in links]
        return bool(links) and all(
            link.can_share and link.host == link.local_host for link in links
        )

    def close(self) -> None:
        self.listener.close()
        for server in list(self._links):
            self.forget(server)

    def _admit(self, connection: socket.socket) -> None:
        threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """Take in a worker by its hello; hang up on one whose server was not asked."""
        try:
            connection.settimeout(HELLO_SECONDS)
            hello, _ = wire.receive_message(connection, max_payload=0)
        except (OSError, wire.WireError):
            hello = {}
        if "fetch" in hello:
            self.offers.answer(connection, hello)
            return
        server = hello.get("server")
        if not isinstance(server, str) or server not in self._expected:
            connection.close()
            return
        with self._changed:
            self._links.setdefault(server, []).append(WorkerLink(connection, hello))
            self._changed.notify_all()
