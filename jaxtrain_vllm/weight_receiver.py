"""Versions held besides the served one: received, verified, then committed or rolled back.

Independent of torch and vLLM: tensors are raw bits here. A delta is written into the kept bits as
it arrives, together with what undoes it, and whole tensors replace the last ones, so that no second
copy of the model is needed; tensors in memory shared by others need none at all. What has arrived
may be passed on to other hosts, as long as it is not overwritten.
"""

import dataclasses
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxtrain_vllm import handshake, payloads, wire
from jaxtrain_vllm.listener import AuthenticatedListener, open_listeners
from jaxtrain_vllm.shared_memory import SharedMemorySegment

CONNECT_SECONDS = 30
ERROR_CHARACTERS = 500
NO_PAYLOAD = (OSError, KeyError, TypeError, ValueError, MemoryError)


@dataclasses.dataclass
class StagedVersion:
    """A version that was received and verified, but is not served."""

    version: int
    checksum: int
    tensors: dict[str, wire.WireTensor]
    undo: dict[str, wire.Changes]
    """For a delta: the changes that remove it from the kept tensors."""
    memory: Any = None
    """Memory of another process that contains the tensors: a `SharedMemorySegment` or a
    `cuda_ipc.CudaIpcMemory`."""


class WeightReceiver:
    """The versions of one worker. A separate thread answers the trainer's link."""

    def __init__(self, open_ipc_memory: Callable[[Any], Any] | None = None):
        """open_ipc_memory: opens the trainer's GPU memory; None if this worker cannot."""
        self.open_ipc_memory = open_ipc_memory
        self.tensors: dict[str, wire.WireTensor] = {}
        """The served tensors as received: the base of the next delta. Empty before the first
        version, and while a full one arrives."""
        self.version, self.checksum = -1, 0
        self.staged: StagedVersion | None = None
        self._own: SharedMemorySegment | None = None
        """Segment for whole tensors; other workers of this host may read them there."""
        self._arrived: memoryview | None = None
        self._attached: dict[str, Any] = {}
        """At most one piece of other processes' memory, by its description."""
        self._link: socket.socket | None = None
        self._token = ""
        """Token of the trainer that the link leads, or led, to."""
        self._fetch: payloads.PayloadFetch | None = None
        self._offers = payloads.PayloadOffers()
        """Payloads that other hosts may fetch here."""
        self._listener: AuthenticatedListener | None = None
        self._lock = threading.Lock()

    def begin(self, token: str) -> list[int] | None:
        """Begin a link to the trainer with this token.

        Returns [version, checksum] if the served version came from the same trainer. None
        otherwise: nothing here is a base for another trainer's deltas.
        """
        # A fetch of the previous link holds no lock, and would write into memory that is reused
        # below.
        self._close_listener()
        if self._fetch is not None:
            self._fetch.stop()
        with self._lock:
            self._roll_back()
            self._offers.clear()
            is_base = bool(self.tensors) and all(
                _is_own(tensor.bits) for tensor in self.tensors.values()
            )
            if token != self._token or not is_base or self.version < 0:
                self._close_attached()
                self.tensors, self.version, self.checksum = {}, -1, 0
            self._token = token
            return [self.version, self.checksum] if self.tensors else None

    def check(self, version: int, checksum: int) -> None:
        """Raise ValueError unless exactly that version is staged; changes nothing."""
        with self._lock:
            staged = None if self.staged is None else (self.staged.version, self.staged.checksum)
        if staged != (version, checksum):
            raise ValueError(f"version {version} is not staged here; staged: {staged}")

    def commit(self, version: int, load: Callable[[wire.Tensors], None]) -> None:
        """Load the staged tensors with `load`; from then on they are the served ones."""
        with self._lock:
            staged = self.staged
            if staged is None or staged.version != version:
                raise ValueError(f"version {version} is not staged here")
            self._check_memory(staged)
            # If loading fails, the model may hold a mixture of both versions.
            self.version, self.checksum = -1, 0
            load(staged.tensors)
            # The owner may have begun to overwrite its memory while it was being loaded.
            self._check_memory(staged)
            self.tensors, self.staged = staged.tensors, None
            self.version, self.checksum = staged.version, staged.checksum

    @property
    def memory(self) -> np.ndarray | None:
        """Return the memory that contains all staged tensors, if there is one piece."""
        with self._lock:
            if self.staged is None:
                return None
            if self.staged.memory is not None:
                return getattr(self.staged.memory, "room", None)
            return self._own.room if self._own is not None and self._is_own() else None

    def listen(self, link: socket.socket) -> str:
        """Answer the trainer until either side closes the link; return why it ended."""
        self._link = link
        try:
            while True:
                header, payload = wire.receive_message(link, room=self._make_room)
                try:
                    if "from" in header:
                        payload = self._fetch_payload(link, header)
                except (*NO_PAYLOAD, wire.WireError) as error:
                    answer = describe_error(error)
                else:
                    answer = self.answer(header, payload)
                wire.send_message(link, answer)
        except (OSError, wire.WireError) as error:
            return str(error)
        finally:
            with self._lock:
                ended = self._link is link
                # The trainer may be gone, and its GPU memory with it. A newer link keeps its own.
                if ended:
                    self._close_ipc_memory()
                    self._offers.clear()
            if ended:
                self._close_listener()

    def answer(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        """Return the answer to a message, with "error" if the version cannot be staged."""
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
                OSError,
                RuntimeError,  # torch's, of a GPU
            ) as error:
                self._roll_back()
                return describe_error(error)
            answer = {"staged": header["version"]}
            if self._own is not None and self._own.described is not None and self._is_own():
                self._own.seal(header["version"], header["checksum"])
                answer["segment"] = self._own.described
            if header.get("pass_on"):
                answer |= self._pass_on(header, payload)
            return answer

    def _fetch_payload(self, link: socket.socket, header: dict[str, Any]) -> memoryview:
        """Fetch the payload that a message refers to, from the address it names or from the
        trainer."""
        source = header["from"]
        size, streams, seconds = source["bytes"], source["streams"], float(source["seconds"])
        if type(size) is not int or not 0 <= size <= wire.MAX_PAYLOAD_BYTES:
            raise wire.WireError(f"a payload of {size!r} bytes")
        if type(streams) is not int or not 0 < streams <= payloads.MAX_STREAMS:
            raise wire.WireError(f"{streams!r} streams")
        host, port = source.get("place") or link.getpeername()[:2]
        name = payloads.name_payload(header["version"], header["checksum"], header.get("base"))
        room = self._make_room(header, size) or np.empty(size, np.uint8).data
        self._fetch = fetch = payloads.PayloadFetch()
        token = self._token.encode()
        fetch.run((host, port), token, name, room, streams=streams, seconds=seconds)
        return room

    def _pass_on(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        """Offer the staged version to other hosts, at the address of the trainer's link."""
        if self._link is None or self._own is None or not self._is_own():
            return {}
        version, checksum = header["version"], header["checksum"]
        self._offers.put(payloads.name_payload(version, checksum, None), [self._own.room])
        if header["kind"] == "delta":
            self._offers.put(payloads.name_payload(version, checksum, header["base"]), [payload])
        try:
            host, token = self._link.getsockname()[0], self._token.encode()
            if self._listener is None:
                listeners = open_listeners([host], 0)
                self._listener = AuthenticatedListener(
                    "weights for others", listeners, token, self._offers.admit
                )
        except OSError:
            return {}  # the trainer then serves the others itself
        return {"place": [host, self._listener.port]}

    def _close_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _make_room(self, header: dict[str, Any], size: int) -> memoryview | None:
        """Return memory for a message's payload: whole tensors overwrite the last ones."""
        if header.get("command") != "stage" or header.get("kind") != "full" or not size:
            return None
        with self._lock:
            # From here on the worker has no base: the old tensors are overwritten as bytes arrive.
            # The model itself holds copies and keeps serving.
            self._roll_back()
            self._offers.clear()
            self._close_ipc_memory()
            self.tensors, self.version, self.checksum = {}, -1, 0
            if self._own is None or self._own.room.nbytes != size:
                self._own = SharedMemorySegment.create(size)
            self._own.begin()
            self._arrived = self._own.room.data
            return self._arrived

    def _is_own(self) -> bool:
        """Return True if the staged tensors lie in the own segment."""
        assert self._own is not None and self.staged is not None
        return any(
            np.may_share_memory(tensor.bits, self._own.room)
            for tensor in self.staged.tensors.values()
        )

    def _stage(self, header: dict[str, Any], payload: memoryview) -> None:
        self._roll_back()
        self._offers.clear()
        version, checksum = header["version"], header["checksum"]
        if header["kind"] == "shared":
            # Not copied: whoever wrote the segment checked it, so only its state is compared.
            segment = self._attach(header["segment"], SharedMemorySegment.attach)
            tensors = wire.unpack_full(header["tensors"], segment.room.data, copy=False)
            self.staged = StagedVersion(version, checksum, tensors, {}, segment)
            return self._check_memory(self.staged)
        if header["kind"] == "lent":
            if self.open_ipc_memory is None:
                raise wire.WireError("this server does not run on an NVIDIA GPU")
            memory = self._attach(header["memory"], self.open_ipc_memory)
            tensors = memory.read(header["tensors"])
            self.staged = StagedVersion(version, checksum, tensors, {}, memory)
            self._check_memory(self.staged)
            return self._check_sum(memory.checksum(tensors), checksum)
        if header["kind"] == "full":
            in_place = payload is self._arrived
            tensors = wire.unpack_full(header["tensors"], payload, copy=not in_place)
            self.staged = StagedVersion(version, checksum, tensors, {})
        else:
            if header["base"] != self.version or not self.tensors:
                raise wire.WireError(
                    f"a delta on version {header['base']}, but version {self.version} is here"
                )
            if not all(_is_own(tensor.bits) for tensor in self.tensors.values()):
                raise wire.WireError("a delta on tensors that lie in another process's memory")
            changes = wire.unpack_delta(header["tensors"], payload, self.tensors)
            # Other workers of this host may be reading these bits; the segment is sealed again once
            # the checksum of the result is right.
            if self._own is not None:
                self._own.begin()
            self.staged = StagedVersion(version, checksum, self.tensors, {})
            undone = wire.in_threads(
                lambda item: wire.apply_changes(self.tensors[item[0]].bits, item[1]),
                changes.items(),
                len(payload),
            )
            self.staged.undo.update(zip(changes, undone, strict=True))
        self._check_sum(wire.checksum(self.staged.tensors), checksum)

    def _check_sum(self, actual: int, expected: int) -> None:
        if actual != expected:
            raise wire.WireError(
                f"checksum {actual:08x} after the transfer, the trainer has {expected:08x}"
            )

    def _attach(self, described: Any, attach: Callable[[Any], Any]) -> Any:
        """Open another process's memory, once."""
        key = repr(described)
        if key not in self._attached:
            memory = attach(described)  # before closing: the old one stays if this fails
            self._close_attached()
            self._attached = {key: memory}
        return self._attached[key]

    def _check_memory(self, staged: StagedVersion) -> None:
        if staged.memory is None:
            return
        state = staged.memory.state()
        if state != (staged.version, staged.checksum):
            raise wire.WireError(
                f"the shared memory holds version {state[0]}, not {staged.version}: it was written"
                " meanwhile"
            )

    def _close_ipc_memory(self) -> None:
        """Unmap GPU memory, and forget the tensors that it contains."""
        if any(hasattr(memory, "close") for memory in self._attached.values()):
            if self.staged is not None and self.staged.memory is not None:
                self._roll_back()
            if not all(_is_own(tensor.bits) for tensor in self.tensors.values()):
                self.tensors = {}
            self._close_attached()

    def _close_attached(self) -> None:
        for memory in self._attached.values():
            if hasattr(memory, "close"):
                memory.close()
        self._attached = {}

    def _roll_back(self) -> None:
        """Discard the staged version."""
        if self.staged is not None:
            if self.staged.undo and self._own is not None:
                self._own.begin()  # others may be reading there
            for name, undo in self.staged.undo.items():
                wire.apply_changes(self.staged.tensors[name].bits, undo)
        self.staged = None


def describe_error(error: BaseException) -> dict[str, str]:
    """Return the answer that reports an error to the trainer."""
    return {"error": f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]}


def _is_own(bits: Any) -> bool:
    """Return True if the bits lie in memory of this process."""
    return isinstance(bits, np.ndarray) and bool(bits.flags.writeable)


def connect(
    info: dict[str, Any], rank: int, tensors: dict[str, Any], serves: list[int] | None = None
) -> socket.socket:
    """Connect to the trainer and introduce this worker. info: host, port, token, server's name.

    tensors: {name: shape or None} of what is served. serves: result of `WeightReceiver.begin`.
    Raises ValueError if the trainer cannot be reached, or does not know the token.
    """
    address = f"{info['host']}:{info['port']}"
    try:
        link = socket.create_connection((info["host"], info["port"]), CONNECT_SECONDS)
    except OSError as error:
        raise ValueError(
            f"the trainer cannot be reached at {address} from here: {error}"
        ) from error
    try:
        handshake.introduce(link, info["token"].encode())
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.settimeout(CONNECT_SECONDS)
        hello = {"server": info["server"], "rank": rank, "tensors": tensors, "serves": serves}
        wire.send_message(link, hello)
    except OSError as error:
        link.close()
        raise ValueError(
            f"{address} is not the trainer that asked for this link: {error}"
        ) from error
    link.settimeout(None)
    return link
