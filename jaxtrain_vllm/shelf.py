"""Versions beside the one that is served: received, checked, and taken up or put away.

Knows nothing of torch or vLLM: tensors are raw bits here. A delta is written into the kept bits as
it arrives, with what undoes it, so that no second copy of the model is needed.
"""

import dataclasses
import socket
import threading
from collections.abc import Callable
from typing import Any

from jaxtrain_vllm import handshake, wire

CONNECT_SECONDS = 30


@dataclasses.dataclass
class Staged:
    """A version that has arrived and was checked, but is not served."""

    version: int
    checksum: int
    tensors: dict[str, wire.Tensor]
    undo: dict[str, wire.Changes]
    """Of a delta: what takes it out of the kept tensors again."""


class WeightShelf:
    """The versions of one worker. The trainer's link is answered from a thread of its own."""

    def __init__(self):
        self.tensors: dict[str, wire.Tensor] = {}
        """What is served, as it came: the base of the next delta. Empty before the first."""
        self.version, self.checksum = -1, 0
        self.staged: Staged | None = None
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Another trainer begins, to whose deltas nothing here is a base."""
        with self._lock:
            self._roll_back()
            self.tensors, self.version, self.checksum = {}, -1, 0

    def check(self, version: int, checksum: int) -> None:
        """ValueError unless exactly that version is staged; changes nothing."""
        with self._lock:
            found = None if self.staged is None else (self.staged.version, self.staged.checksum)
        if found != (version, checksum):
            raise ValueError(f"version {version} is not staged here; staged: {found}")

    def commit(self, version: int, load: Callable[[wire.Tensors], None]) -> None:
        """Have `load` take up the staged tensors; from then on they are the served ones."""
        with self._lock:
            staged = self.staged
            if staged is None or staged.version != version:
                raise ValueError(f"version {version} is not staged here")
            load(staged.tensors)
            self.tensors, self.staged = staged.tensors, None
            self.version, self.checksum = staged.version, staged.checksum

    def listen(self, link: socket.socket) -> str:
        """Answer the trainer until either side hangs up; returns why it ended."""
        try:
            while True:
                header, payload = wire.receive_message(link)
                wire.send_message(link, self.answer(header, payload))
        except (OSError, wire.WireError) as error:
            return str(error)

    def answer(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        """The answer to a message; a version that cannot be staged is one with "error"."""
        with self._lock:
            if header.get("command") == "status":
                return {"version": self.version, "checksum": self.checksum}
            try:
                self._stage(header, payload)
            except (
                wire.WireError,
                KeyError,
                TypeError,
                ValueError,
                OverflowError,
                MemoryError,
            ) as error:
                self._roll_back()
                return {"error": f"{type(error).__name__}: {error}"}
            return {"staged": header["version"]}

    def _stage(self, header: dict[str, Any], payload: memoryview) -> None:
        self._roll_back()
        if header["kind"] == "full":
            tensors = wire.unpack_full(header["tensors"], payload)
            self.staged = Staged(header["version"], header["checksum"], tensors, {})
        else:
            if header["base"] != self.version or not self.tensors:
                raise wire.WireError(
                    f"a delta on version {header['base']}, but version {self.version} is here"
                )
            changes = wire.unpack_delta(header["tensors"], payload, self.tensors)
            self.staged = Staged(header["version"], header["checksum"], self.tensors, {})
            for name, change in changes.items():
                self.staged.undo[name] = wire.apply_changes(self.tensors[name].bits, change)
        found = wire.checksum(self.staged.tensors)
        if found != header["checksum"]:
            raise wire.WireError(
                f"checksum {found:08x} after the transfer, the trainer has {header['checksum']:08x}"
            )

    def _roll_back(self) -> None:
        """Put away what is staged and not committed."""
        if self.staged is not None:
            for name, undo in self.staged.undo.items():
                wire.apply_changes(self.staged.tensors[name].bits, undo)
        self.staged = None


def connect(info: dict[str, Any], rank: int, held: dict[str, Any]) -> socket.socket:
    """A link to the trainer, introduced. info: its host and port, the token and the server's name.

    held: {name: shape or None} of what is served. ValueError when the trainer cannot be reached, or
    is not the one that knows the token.
    """
    place = f"{info['host']}:{info['port']}"
    try:
        link = socket.create_connection((info["host"], info["port"]), CONNECT_SECONDS)
    except OSError as error:
        raise ValueError(f"the trainer cannot be reached at {place} from here: {error}") from error
    try:
        handshake.introduce(link, info["token"].encode())
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(CONNECT_SECONDS)
        wire.send_message(link, {"server": info["server"], "rank": rank, "tensors": held})
    except OSError as error:
        link.close()
        raise ValueError(f"{place} is not the trainer that asked for this link: {error}") from error
    link.settimeout(None)
    return link
