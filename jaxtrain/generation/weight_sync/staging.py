"""Staging of a version in every worker: sent over the network once per host.

    trainer ── changes, or everything ──> the first worker of a host (others of the host wait)
                                             | its shared memory
                                         other workers of that host, of whatever server

The workers of a server are staged in parallel. On the trainer's own host all read the trainer's
memory. A worker that cannot read another's memory (a container, another user) is sent its own
copy. Beyond `fan_out` hosts they pass a version on to each other (`relays.py`). A worker that
missed some deltas gets one that merges them (`DeltaHistory`), or everything.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.generation.vllm.control import Deadline, ServerGone
from jaxtrain.generation.weight_sync.device_image import DeviceImage
from jaxtrain.generation.weight_sync.relays import Relays
from jaxtrain.generation.weight_sync.weight_links import WorkerLink
from jaxtrain_vllm import payloads, wire
from jaxtrain_vllm.payloads import PayloadOffers
from jaxtrain_vllm.shared_memory import SharedMemorySegment

MAX_DELTA_FRACTION = 0.7
"""A delta larger than this fraction of the whole is not used."""
MAX_DELTAS = 8
OWNER_SECONDS = 30.0
"""Time for which the workers of a host wait for the one whose memory they read last: they have no
base for a delta of their own."""

STREAM_BYTES = 2**28
"""Larger payloads travel over several connections."""
FETCH_BYTES = 2**25
"""Bytes that a worker is allowed a second for where it fetches from the trainer."""


class WeightVersion(NamedTuple):
    """A published version."""

    version: int
    tensors: dict[str, wire.WireTensor]
    """In host memory; empty if they are on the device."""
    checksum: int
    changes: dict[str, wire.Changes] | None
    """Since version `base`; None if everything is to be sent."""
    base: int = -1
    device: DeviceImage | None = None


class DeltaChange(NamedTuple):
    """Positions that one delta changed."""

    base: tuple[int, int]
    """(version, checksum) before it."""
    positions: dict[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        return sum(where.nbytes for where in self.positions.values())


class DeltaHistory:
    """Positions that the last deltas changed, for a server that missed some of them. All values are
    those of the newest version, so that several deltas merge into one."""

    def __init__(self) -> None:
        self._steps: deque[DeltaChange] = deque(maxlen=MAX_DELTAS)
        self._newest = (-1, 0)

    def add(self, before: WeightVersion | None, weights: WeightVersion) -> None:
        """Add a sealed version. before: the one that it follows."""
        total = sum(tensor.bits.nbytes for tensor in weights.tensors.values())
        if weights.changes is None or before is None:
            self._steps.clear()
        else:
            positions = {name: change.positions for name, change in weights.changes.items()}
            self._steps.append(DeltaChange((before.version, before.checksum), positions))
            # Bounds the memory of the history.
            while sum(step.nbytes for step in self._steps) > total / 2:
                self._steps.popleft()
        self._newest = (weights.version, weights.checksum)

    def since(
        self, served: tuple[int, int], weights: WeightVersion
    ) -> dict[str, wire.Changes] | None:
        """Return what turns the version `served`, given with its checksum, into the newest one.

        None if that is unknown, or too large to be worth it.
        """
        bases = [step.base for step in self._steps]
        if served not in bases or self._newest != (weights.version, weights.checksum):
            return None
        steps = [*self._steps][bases.index(served) :]
        if len(steps) == 1:
            return weights.changes
        merged = {}
        for name, tensor in weights.tensors.items():
            parts = [step.positions[name] for step in steps if name in step.positions]
            # Values are read from the newest version, so that only positions need merging.
            where = np.unique(np.concatenate(parts)) if parts else np.empty(0, "<u4")
            merged[name] = wire.Changes(where, tensor.bits[where], tensor.bits.size)
        total = sum(tensor.bits.nbytes for tensor in weights.tensors.values())
        return (
            merged
            if sum(change.nbytes for change in merged.values()) <= MAX_DELTA_FRACTION * total
            else None
        )


class StagingHost:
    """The workers of one machine, and which of them has the newest version in shared memory."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.version, self.segment = -1, None
        self.owner: WorkerLink | None = None
        self.busy: WorkerLink | None = None

    def claim(self, link: WorkerLink, version: int, deadline: Deadline, *, patient: bool) -> Any:
        """Return the description of memory that holds the version, once there is some.

        None: this link must be sent the version, and call `done`. patient: wait for the last owner.
        """
        patience = Deadline(OWNER_SECONDS if patient else 0.0)
        with self.changed:
            # The last owner goes first, as it can be sent a delta. It then shares the result with
            # the others, which only read its memory and so have no base of their own.
            while self.version != version:
                owner = self.owner
                waits = owner is not None and owner is not link and not owner.closed
                waits = waits and patience.left() > 0
                if self.busy is None and not waits:
                    self.busy = link
                    return None
                # Another link is being sent the version, or the last owner has not come yet.
                if not deadline.left():
                    raise ServerGone("the weights did not reach its host in time")
                wait_seconds = patience.left() if self.busy is None else 1.0
                self.changed.wait(deadline.left(max(wait_seconds, 0.01)))
            return self.segment

    def done(self, link: WorkerLink, version: int, segment: Any) -> None:
        """Record the end of a claim. segment: memory that now holds the version; None: it
        failed."""
        with self.changed:
            self.busy = None
            if segment is not None:
                self.version, self.segment, self.owner = version, segment, link
            self.changed.notify_all()

    def lost(self, segment: Any) -> None:
        """Forget memory that cannot be read, as its owner has ended."""
        with self.changed:
            if self.segment == segment:
                self.version, self.segment, self.owner = -1, None, None


class Staging:
    """Has workers hold a version besides the one that they serve."""

    def __init__(
        self,
        count: Callable[[str, float], None],
        *,
        offers: PayloadOffers | None = None,
        streams: int = 1,
        fan_out: int = 0,
        step_seconds: float = 60.0,
    ):
        """step_seconds: limit for a worker that neither takes nor answers anything. count: adds to
        a metric. offers: payloads that workers fetch over several connections;
        None: everything is sent over their links. fan_out: see `Relays`."""
        self.count, self.history, self.step_seconds = count, DeltaHistory(), step_seconds
        self.offers, self.streams, self.relays = offers, streams, Relays(fan_out)
        self._packed: tuple[int, dict[int, Any]] = (-1, {})
        """The newest version, and its packed deltas by base version."""
        self._lock, self._packing = threading.Lock(), threading.Lock()
        self._hosts: dict[str, StagingHost] = {}

    def stage(
        self,
        links: Sequence[WorkerLink],
        weights: WeightVersion,
        segment: SharedMemorySegment,
        deadline: Deadline,
    ) -> None:
        """Stage a version in all workers in parallel; ServerGone if one did not take it in time.

        segment: the trainer's memory, which holds the version.
        """
        if len(links) == 1:
            return self._stage_one(links[0], weights, segment, deadline)
        with ThreadPoolExecutor(len(links), thread_name_prefix="stage") as pool:
            tasks = [
                pool.submit(self._stage_one, link, weights, segment, deadline) for link in links
            ]
            for task in tasks:
                task.result()

    def exclude_owners(self, links: Collection[WorkerLink]) -> None:
        """Exclude workers that keep their version: others of their hosts must not wait for them."""
        with self._lock:
            hosts = list(self._hosts.values())
        for host in hosts:
            with host.changed:
                # An owner that is not updated would make the others wait OWNER_SECONDS in vain.
                host.owner = None if host.owner in links else host.owner

    def send(
        self,
        link: WorkerLink,
        weights: WeightVersion,
        header: dict[str, Any],
        payload: Sequence[np.ndarray],
        deadline: Deadline,
    ) -> dict[str, Any]:
        """Return a worker's answer to a message of kind stage."""
        identity = {"command": "stage", "version": weights.version, "checksum": weights.checksum}
        # A worker that fetches says nothing until it has everything.
        quiet = self.step_seconds + header.get("from", {}).get("seconds", 0.0)
        answer = link.ask({**identity, **header}, deadline, quiet, payload)
        self.count("sync/tcp_bytes", sum(part.nbytes for part in payload))
        return answer

    def _stage_one(
        self,
        link: WorkerLink,
        weights: WeightVersion,
        trainer_segment: SharedMemorySegment,
        deadline: Deadline,
    ) -> None:
        # On the trainer's host nothing needs to be sent.
        if (
            link.host == link.local_host
            and link.can_share
            and trainer_segment.described is not None
        ):
            if self._share(link, weights, trainer_segment.described, deadline):
                return
        host = self._host(link.host)
        while link.can_share:
            patient = weights.changes is not None
            segment = host.claim(link, weights.version, deadline, patient=patient)
            if segment is None:
                new_segment = None
                try:
                    new_segment = self._transfer(link, weights, deadline).get("segment")
                finally:
                    # Also after an error, or the other links of the host would wait for this one.
                    host.done(
                        link,
                        weights.version,
                        new_segment if isinstance(new_segment, dict) else None,
                    )
                return
            if self._share(link, weights, segment, deadline):
                return
            if host.owner is not None and host.owner.closed:
                host.lost(segment)
                link.can_share = True  # the owner had ended: this says nothing about other memory
        self._transfer(link, weights, deadline)

    def _host(self, address: str) -> StagingHost:
        with self._lock:
            return self._hosts.setdefault(address, StagingHost())

    def _share(
        self, link: WorkerLink, weights: WeightVersion, segment: Any, deadline: Deadline
    ) -> bool:
        """Have a worker read memory of its host; if it cannot, it is not asked again on this
        link."""
        described, payload = wire.pack_full(weights.tensors)
        header = {"kind": "shared", "segment": segment, "tensors": described}
        answer = self.send(link, weights, header, (), deadline)
        link.can_share = "error" not in answer
        if link.can_share:
            # It serves from another process's memory, to which no delta can be applied.
            link.is_base = False
            self._check(answer, weights)
            delta = weights.changes is not None
            size = sum(change.nbytes for change in (weights.changes or {}).values())
            self.count("sync/bytes", size if delta else sum(part.nbytes for part in payload))
        return link.can_share

    def _transfer(
        self, link: WorkerLink, weights: WeightVersion, deadline: Deadline
    ) -> dict[str, Any]:
        """Send a worker the changes that it lacks, or everything; return its answer."""
        changes, base = None, weights.base
        if link.is_base and link.served is not None:
            if link.served[0] == weights.base:
                changes = weights.changes
            else:
                changes, base = self.history.since(link.served, weights), link.served[0]
                self.count("sync/chains", float(changes is not None))
        if changes is not None:
            changed, payload = self._pack(weights.version, base, changes)
            header = {"kind": "delta", "base": base, "tensors": changed}
            answer = self._deliver(link, weights, header, payload, deadline)
            if "error" not in answer:
                return self._check(answer, weights)
        # Whole tensors overwrite what the worker holds; if that fails, it is no base for a delta.
        link.served, link.is_base = None, True
        described, full_payload = wire.pack_full(weights.tensors)
        header = {"kind": "full", "tensors": described}
        return self._check(self._deliver(link, weights, header, full_payload, deadline), weights)

    def _pack(
        self, version: int, base: int, changes: dict[str, wire.Changes]
    ) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        """Call `wire.pack_delta` once for all hosts."""
        # A lock of its own: packing takes long, and _lock must stay short.
        with self._packing:
            if self._packed[0] != version:
                self._packed = (version, {})
            packed = self._packed[1]
            if base not in packed:
                packed[base] = wire.pack_delta(changes)
            return packed[base]

    def _deliver(
        self,
        link: WorkerLink,
        weights: WeightVersion,
        header: dict[str, Any],
        payload: Sequence[np.ndarray],
        deadline: Deadline,
    ) -> dict[str, Any]:
        """Have a worker fetch a payload from another host, or from here if that fails; return its
        answer."""
        name, full = (
            payloads.name_payload(weights.version, weights.checksum, base)
            for base in (header.get("base"), None)
        )
        size = sum(part.nbytes for part in payload)
        # Each failed source is removed or counted against the link, so that this ends with the
        # trainer.
        while True:
            transfer = self.relays.take(weights.version, name, {name, full}, link, deadline)
            answer: dict[str, Any] | None = None
            try:
                if transfer.source is not None:
                    fetch_fields = self._describe_fetch(
                        link, size, transfer.seconds, transfer.source.address
                    )
                    answer = self.send(link, weights, {**header, **fetch_fields}, (), deadline)
                else:
                    answer = self._send_from_here(link, weights, name, header, payload, deadline)
            finally:
                arrived = self.relays.done(transfer, link, answer)
            assert answer is not None, "an error was raised otherwise"
            if arrived:
                self.count("sync/bytes", size)
            if transfer.source is not None:
                self.count("sync/relayed_bytes", size * arrived)
                self.count("sync/relay_failures", not arrived)
            if arrived or transfer.source is None:
                return answer

    def _send_from_here(
        self,
        link: WorkerLink,
        weights: WeightVersion,
        name: str,
        header: dict[str, Any],
        payload: Sequence[np.ndarray],
        deadline: Deadline,
    ) -> dict[str, Any]:
        """Send over several connections if the payload is large, else over the link alone."""
        size = sum(part.nbytes for part in payload)
        if self.offers is not None and link.can_fetch and self._count_streams(size) > 1:
            # Idempotent: several hosts fetch the same memory, which is not written before `clear`.
            self.offers.put(name, payload)
            seconds = deadline.left(self.step_seconds + size / FETCH_BYTES)
            fetch_fields = self._describe_fetch(link, size, seconds)
            answer = self.send(link, weights, {**header, **fetch_fields}, (), deadline)
            self.count("sync/tcp_bytes", size)
            if "error" not in answer:
                return answer
            link.can_fetch = False
        fetch_fields = {"pass_on": self.relays.wants(link)}
        return self.send(link, weights, {**header, **fetch_fields}, payload, deadline)

    def _describe_fetch(
        self, link: WorkerLink, size: int, seconds: float, address: tuple[str, int] | None = None
    ) -> dict[str, Any]:
        """Return the message fields of a payload to be fetched. address: None for the trainer's."""
        fetch = {"bytes": size, "streams": self._count_streams(size), "seconds": seconds}
        return {"from": {**fetch, "place": address}, "pass_on": self.relays.wants(link)}

    def _count_streams(self, size: int) -> int:
        return self.streams if size >= STREAM_BYTES else 1

    def _check(self, answer: dict[str, Any], weights: WeightVersion) -> dict[str, Any]:
        if answer.get("staged") != weights.version:
            raise ServerGone(f"a worker did not take the weights: {answer.get('error')}")
        return answer
