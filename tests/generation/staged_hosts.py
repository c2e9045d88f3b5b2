"""Workers on hosts of any name, over loopback, and a trainer that brings them versions."""

import socket
import threading

import numpy as np

from jaxtrain.generation.vllm.control import Deadline, ServerGone
from jaxtrain.generation.weight_sync.host_image import HostImage
from jaxtrain.generation.weight_sync.staging import Staging, WeightVersion
from jaxtrain.generation.weight_sync.weight_links import WeightLinks, WorkerLink
from jaxtrain.huggingface.ops import SplitPiece, full_index
from jaxtrain_vllm import wire
from jaxtrain_vllm.weight_receiver import WeightReceiver, connect

SHAPES = {"a": (64, 8), "b": (40,)}
WHOLE = (64 * 8 + 40) * 4
ONE = 4 + 4
"""Bytes of one change in a large tensor: its place and its value."""


class Worker:
    """A shelf at the other end of a link, on a host of that name."""

    def __init__(self, host: str, links: WeightLinks | None = None):
        """links: where it connects to, as a server's worker does; None: to a socket alone."""
        self.shelf, self.host, self.link, self.links = WeightReceiver(), host, None, links
        self.connect()

    def connect(self) -> None:
        if self.link is not None:
            self.link.close()
        serves = self.shelf.begin("token")
        if self.links is not None:
            serves = self.shelf.begin(self.links.token)
            connection = connect(self.links.describe(self.host), 0, {}, serves)
            (self.link,) = self.links.wait_for(self.host, 1, 10)
        else:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                connection = socket.create_connection(listener.getsockname())
                ours_here, _ = listener.accept()
            self.link = WorkerLink(ours_here, {"serves": serves})
        self.there = connection
        threading.Thread(target=self.shelf.listen, args=(connection,), daemon=True).start()
        self.link.host, self.link.local_host = self.host, "trainer"

    def commit(self, weights: WeightVersion) -> None:
        self.shelf.commit(weights.version, lambda tensors: None)
        self.link.served = (weights.version, weights.checksum)


class Trainer:
    """Params, the image of them, and what was counted of a publish."""

    def __init__(self, **settings) -> None:
        """settings: of `Staging`."""
        self.hosts = 0
        rng = np.random.default_rng(0)
        self.params = {n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
        self.image, self.newest = HostImage(SHAPES, "float32"), None
        self.counted: dict[str, float] = {}
        self.staging = Staging(self.count, **settings)

    def count(self, name: str, number: float) -> None:
        self.counted[name] = self.counted.get(name, 0.0) + number

    def make(self, *changed: int) -> WeightVersion:
        """The next version; these items of "a" are changed in it, or it is the first."""
        for position in changed:
            self.params["a"].reshape(-1)[position] += 1.0
        pieces = [SplitPiece(n, a.shape, full_index(a.shape), a) for n, a in self.params.items()]
        last = self.newest
        changes = self.image.take(pieces, compare=last is not None)
        checksum = wire.checksum(self.image.tensors)
        version, base = (0, -1) if last is None else (last.version + 1, last.version)
        self.image.segment.seal(version, checksum)
        self.newest = WeightVersion(version, self.image.tensors, checksum, changes, base)
        self.staging.history.add(last, self.newest)
        self.staging.relays.begin(version, self.hosts)
        return self.newest

    def push_weights(self, workers: list[Worker], seconds: float = 10.0) -> float:
        """Stage the newest on all of them at once, as so many servers, and commit; bytes sent."""
        self.counted.clear()
        weights, errors = self.newest, []

        def one(worker: Worker) -> None:
            try:
                local_value = self.image.segment
                self.staging.stage([worker.link], weights, local_value, Deadline(seconds))
            except ServerGone as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        for worker in workers:
            worker.commit(weights)
            for name, array in self.params.items():
                retained = worker.shelf.tensors[name].bits.view(np.float32)
                np.testing.assert_array_equal(retained, array.ravel())
        return self.counted.get("sync/tcp_bytes", 0)
