"""The trainer's end of the TCP links over which servers receive weights.

Every worker of every server connects to one listening port (`jaxtrain_vllm/engine.py`), proves that
it knows the token that its server was sent (`jaxtrain_vllm/listener.py`), identifies itself and
what it holds, and then waits for messages in the format of `jaxtrain_vllm/wire.py`.
"""

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.generation.vllm.control import Deadline, ServerGone, ServerHung
from jaxtrain.generation.vllm.server import PendingSteps
from jaxtrain_vllm import payloads, wire
from jaxtrain_vllm.listener import AuthenticatedListener, open_listeners

HELLO_SECONDS = 30.0
ANSWER_BYTES = 2**16
"""Limit for a worker's answer: a line of JSON without payload. Only its hello is longer."""


class WorkerLink:
    """Link to a worker."""

    def __init__(self, connection: socket.socket, hello: dict[str, Any]):
        self.connection, self.hello = connection, hello
        self.steps = PendingSteps()
        """Those of its server, once that is known."""
        self.can_share = True
        """False once the worker failed to read memory of other processes on its host."""
        self.is_base = True
        """True if what it serves came over this link, and does not lie in another process's memory,
        so that a delta can be applied to it."""
        self.served = read_served(hello.get("serves"))
        """(version, checksum) of this run's weights that it serves, as base of a delta; None:
        unknown."""
        self.can_fetch = True
        """False once the worker failed to fetch a payload over connections of its own."""
        self.failures = 0
        """Failures in a row to fetch from other hosts."""
        self.host, self.local_host = (connection.getpeername()[0], connection.getsockname()[0])

    def ask(
        self,
        header: dict[str, Any],
        deadline: Deadline,
        quiet: float,
        payload: Sequence[np.ndarray] = (),
    ) -> dict[str, Any]:
        """Return the answer to a message; ServerGone if the link breaks, at the deadline, or if
        nothing moves for `quiet` seconds."""
        late, timeout = threading.Event(), deadline.left()
        try:
            self.connection.settimeout(quiet)
            # A socket's time-out applies to each read; this limits the whole exchange.
            with (
                wire.cut_after(timeout, self.connection, late),
                self.steps.wait("new weights", quiet) as step,
            ):
                wire.send_message(self.connection, header, payload, step.renew)
                return wire.receive_message(self.connection, ANSWER_BYTES, 0)[0]
        except (OSError, wire.WireError) as error:
            self.close()
            if late.is_set():
                raise ServerGone(f"a worker took longer than {timeout:.3g} s for weights") from None
            if isinstance(error, TimeoutError):
                raise ServerHung(f"a worker was silent for {quiet:.3g} s over weights") from None
            raise ServerGone(f"the link to a worker broke: {error}") from None

    @property
    def closed(self) -> bool:
        """Return True if this side has closed the link."""
        return self.connection.fileno() < 0

    def close(self) -> None:
        self.connection.close()


def read_served(field: Any) -> tuple[int, int] | None:
    """Parse the version that a worker serves according to its hello; None if there is none."""
    if isinstance(field, list) and len(field) == 2 and all(type(number) is int for number in field):
        return field[0], field[1]
    return None


class WeightLinks:
    """Accepts workers and keeps their links by server."""

    def __init__(self, host: str, port: int):
        self.host, self.token = host, secrets.token_hex(32)
        self._links: dict[str, list[WorkerLink]] = {}
        self._expected: set[str] = set()
        self._changed = threading.Condition()
        self.offers = payloads.PayloadOffers()
        """Payloads that workers fetch here."""
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
        """Return what a server needs to connect; its workers are accepted from then on."""
        self._expected.add(server)
        return {"host": self.host, "port": self.port, "token": self.token, "server": server}

    def forget(self, server: str) -> None:
        """Close the links of a server."""
        with self._changed:
            links = self._links.pop(server, [])
        for link in links:
            link.close()

    def wait_for(self, server: str, count: int, seconds: float) -> list[WorkerLink]:
        """Return the links of a server's `count` workers; ServerGone if they do not connect."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while len(self._links.get(server, ())) < count:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    connected = len(self._links.get(server, ()))
                    raise ServerGone(f"{connected} of {count} workers connected in {seconds:g} s")
            return list(self._links[server])

    def connected(self, server: str) -> list[WorkerLink]:
        """Return the links of a server that are connected now."""
        with self._changed:
            return list(self._links.get(server, ()))

    def all_share(self) -> bool:
        """Return True if all connected workers read the trainer's memory."""
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
        # A slow worker must not block the listener for the others.
        threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """Accept a worker by its hello; close the connection if its server is not expected."""
        try:
            connection.settimeout(HELLO_SECONDS)
            hello, _ = wire.receive_message(connection, max_payload=0)
        except (OSError, wire.WireError):
            hello = {}
        # A connection that fetches a payload ends with it: it is no link.
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
