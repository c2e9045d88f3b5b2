"""Publishes whole weights over TCP, in full or as deltas, committed by one short pause.

Per server: stage over its workers' links while it keeps sampling (`staging.py`), then

    /pause keep (or abort) -> /start_weight_update -> /update_weights -> /finish_weight_update
    -> /resume, whatever happened -> ask every worker for version and checksum

A server gets requests for a version only after every worker has confirmed its checksum. The last
published bits stay in the host's image: the next delta is taken against them, and a server that
came back receives them whole. Or they stay on the device, where servers of the same host read them
(`device_image.py`); if one cannot, the host's image replaces the device's for the rest of the run.
"""

import contextlib
import math
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxtrain.errors import UserError
from jaxtrain.generation.vllm.control import Deadline, ServerGone, ServerHung, ServerRefused
from jaxtrain.generation.vllm.messages import GENERATE
from jaxtrain.generation.vllm.server import VllmServer
from jaxtrain.generation.vllm.servers import Servers
from jaxtrain.generation.weight_sync.delivery import Delivery, push_to_all, put_to_sleep, wake
from jaxtrain.generation.weight_sync.device_image import DeviceImage
from jaxtrain.generation.weight_sync.host_image import HostImage, as_numpy, choose_dtypes
from jaxtrain.generation.weight_sync.staging import MAX_DELTA_FRACTION, Staging, WeightVersion
from jaxtrain.generation.weight_sync.weight_links import WeightLinks, WorkerLink
from jaxtrain.huggingface.ops import TIED_COPY, SplitPiece
from jaxtrain_vllm import BACKEND, wire
from jaxtrain_vllm.cuda_driver import CudaError
from jaxtrain_vllm.listener import LOOPBACK

COUNTERS = (
    "sync/bytes",
    "sync/tcp_bytes",
    "sync/chains",
    "sync/relayed_bytes",
    "sync/relay_failures",
    "sync/stage_seconds",
    "sync/pause_seconds",
)
RESUME_SECONDS = 5.0
"""Time to resume a server that missed a limit: it is dropped, but should not stay paused."""
SMALL_MODEL_BYTES = 2**28
"""Up to this size changes are always computed, even if no server needs them."""


class TensorSet(NamedTuple):
    """The Hugging Face tensors that a run publishes."""

    shapes: Mapping[str, tuple[int, ...]]
    wide: Collection[str] = ()
    """Names of those that are sent in float32 rather than in rollout.vllm.weight_dtype."""
    carried: tuple[str, ...] = ()
    """Prefixes of the names of tensors that servers have and no run trains."""


class WeightPublisher:
    """`publisher.Publisher` by TCP.

    write(params): yields the pieces of all tensors, of any float dtype. delta: send only changes if
    that is less.
    """

    def __init__(
        self,
        servers: Servers,
        write: Callable[[Any], Iterable[SplitPiece]],
        tensors: TensorSet,
        *,
        delta: bool,
        ahead: bool = False,
        find: Callable[[Any], Iterable[SplitPiece]] | None = None,
        device: DeviceImage | None = None,
    ):
        """find: like `write`, but yields what changed since the last call of either
        (`host_image.DeviceChange`). ahead: `publish` returns once the weights are copied, and
        servers receive them meanwhile. device: image to use as long as all servers can read it."""
        config = servers.config
        self.servers, self.write, self.shapes = servers, write, dict(tensors.shapes)
        self.find, self.device = find, device
        self.wide, self.carried = frozenset(tensors.wide), tensors.carried
        self._retired: list[DeviceImage] = []
        """Retired device images, which servers may still have open."""
        self.dtype, self.delta, self.ahead = config.weight_dtype, delta, ahead
        dtypes = choose_dtypes(self.shapes, self.dtype, self.wide)
        sizes = [math.prod(self.shapes[name]) * wire.ITEM_BYTES[t] for name, t in dtypes.items()]
        self.step_seconds = servers.step_seconds(sum(sizes))
        """Limit for a step of a server without progress."""
        self.links = WeightLinks(config.listen or LOOPBACK[0], config.listen_port)
        self.image: HostImage | None = None
        self.newest: WeightVersion | None = None
        self.staging = Staging(
            self._count,
            offers=self.links.offers,
            streams=config.streams,
            fan_out=config.fan_out,
            step_seconds=self.step_seconds,
        )
        self.delivery = Delivery(servers)
        self._since_full = 0
        self._sent: dict[str, float] = {}
        self._lock, self._host_lock = threading.Lock(), threading.Lock()
        self._readers, self._readers_changed = 0, threading.Condition()
        servers.push_weights = self.push_weights

    def publish(self, version: int, params: Any, rebuild: Any = None) -> dict[str, float]:
        """Send the weights to every server; see `publisher.Publisher`.

        With `ahead`, all but the first call return as soon as the parameters may change; requests
        wait until a server holds the version. The metrics are then those of the previous delivery,
        whose errors are raised here.
        """
        started = time.perf_counter()
        # One delivery at a time: the image and the delta base are those of the last one until it
        # ends.
        before = self.delivery.wait()
        first = self.newest is None
        # Before the caller's next step, which donates `params`.
        with self._writing():
            weights = self._copy(version, params)
        copied = time.perf_counter() - started

        def deliver() -> dict[str, float]:
            # The checksum is taken here, outside the time for which training is blocked. Only now
            # is the version visible to watchers: an unsealed image must not be staged.
            start = time.perf_counter()
            last, self.newest = self.newest, self._seal(weights)
            self.staging.history.add(last, self.newest)
            self._sent = dict.fromkeys(COUNTERS, 0.0)
            self._sent["sync/checksum_seconds"] = time.perf_counter() - start
            retired, self._retired = self._retired, []
            hosts = {urllib.parse.urlsplit(s.url).hostname for s in self.servers.all}
            self.staging.relays.begin(version, len(hosts))
            kept_urls = [server.url for server in self.servers.all if server.keeps]
            self.staging.exclude_owners(
                [link for url in kept_urls for link in self.links.connected(url)]
            )
            push_to_all(self.servers, self.push_weights, version)
            for image in retired:  # every server that is up reads another image now
                image.free()
            self.servers.asleep = False
            return {**self._describe(weights), **self._sent}

        self.delivery.start(version, deliver, started)
        done = before if self.ahead and not first else self.delivery.wait()
        return {
            **done,
            "sync/gather_seconds": copied,
            "sync/blocked_seconds": time.perf_counter() - started,
        }

    def sleep(self) -> None:
        """Put the servers to sleep until the next publish, if rollout.vllm.sleep is set."""
        if self.servers.config.sleep:
            self.delivery.wait()
            put_to_sleep(self.servers, self.step_seconds)

    def close(self) -> None:
        """Disconnect from the servers, which keep their weights, and stop watching them."""
        self.delivery.close()
        self.servers.close()
        self.links.close()
        for image in filter(None, [self.device, *self._retired]):
            image.free()

    def push_weights(self, server: VllmServer) -> None:
        """Push the newest version to one server and verify that it arrived."""
        deadline = Deadline(self.servers.config.sync_seconds)
        with server.alone(deadline), self._reading(deadline) as weights:
            epoch = server.epoch
            links = self._find_links(server, deadline)
            start = time.perf_counter()
            try:
                weights = self._stage(links, weights, deadline)
            except ServerGone as error:
                hung = isinstance(error, ServerHung)
                if hung or server.state != "up" or not deadline.left():
                    raise
                # An idle link may break unnoticed (a restarted worker, a firewall): try a new one
                # once.
                self.links.forget(server.url)
                links = self._find_links(server, deadline)
                weights = self._stage(links, weights, deadline)
            self._note_longest("sync/stage_seconds", time.perf_counter() - start)
            # In this order: the server gets requests for the version only after every worker has
            # confirmed its checksum, and only if it was not dropped since `epoch` was read.
            self._commit(server, weights, deadline)
            self._verify(server, links, weights, deadline)
            self.servers.mark_up(server, weights.version, epoch)

    @property
    def _image(self) -> HostImage:
        if self.image is None:
            self.image = HostImage(self.shapes, self.dtype, self.wide)
        return self.image

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Wait until no thread reads the image, and block new readers."""
        with self._readers_changed:
            # A reader that exceeds the limit fails safely: the segment's state, or the checksum,
            # shows that the image was overwritten.
            limit = self.servers.config.sync_seconds
            self._readers_changed.wait_for(lambda: not self._readers, limit)
            self.links.offers.clear()
            yield

    @contextlib.contextmanager
    def _reading(self, deadline: Deadline) -> Iterator[WeightVersion]:
        """Yield the newest version, and keep its bits unchanged meanwhile."""
        if not self._readers_changed.acquire(timeout=deadline.left()):
            raise ServerGone("the weights were being written all the time")
        try:
            self._readers += 1
        finally:
            self._readers_changed.release()
        try:
            assert self.newest is not None, "nothing was published yet"
            yield self.newest
        finally:
            with self._readers_changed:
                self._readers -= 1
                self._readers_changed.notify_all()

    def _copy(self, version: int, params: Any) -> WeightVersion:
        """Write the weights to the image, and determine what changed there."""
        if self.device is not None:
            try:
                self.device.take(params)
                return WeightVersion(version, {}, 0, None, device=self.device)
            except CudaError as error:
                self._leave_device(str(error))
        old, image = self.newest, self._image
        self._since_full += 1
        # A delta needs the last version's bits in this image; now and then everything is sent
        # anyway, so that no error could last.
        compare = self.delta and old is not None and old.device is None
        compare = compare and self._since_full < self.servers.config.full_every
        is_small = image.segment.room.nbytes <= SMALL_MODEL_BYTES
        if self.find is None and not is_small and self.links.all_share():
            compare = False  # no server needs the changes, and comparing takes longer than copying
        write = self.find if compare and self.find is not None else self.write
        changes = image.take(write(params), compare=compare)
        if changes is not None:
            size = sum(change.nbytes for change in changes.values())
            if size > MAX_DELTA_FRACTION * image.segment.room.nbytes:
                changes = None
        if changes is None:
            self._since_full = 0
        base = -1 if changes is None or old is None else old.version
        return WeightVersion(version, image.tensors, 0, changes, base)

    def _seal(self, weights: WeightVersion) -> WeightVersion:
        """Return the version with its checksum, and mark its image as readable."""
        if weights.device is not None:
            return weights._replace(checksum=weights.device.seal(weights.version))
        checksum = wire.checksum(weights.tensors)
        self._image.segment.seal(weights.version, checksum)
        return weights._replace(checksum=checksum)

    def _leave_device(self, why: str) -> None:
        """Send weights through host memory from now on."""
        if self.device is not None:
            self._retired.append(self.device)
            self.device = None
            self.servers.log(
                f"rollout.vllm.transport device: {why}; weights go through the host's memory from"
                " now on"
            )

    def _to_host(self, weights: WeightVersion, why: str, deadline: Deadline) -> WeightVersion:
        """Return the same version in the host's image, for a server that cannot read the
        device's."""
        assert weights.device is not None, "it is in host memory already"
        state = weights.device.state
        # Several servers may fail to read the device at once: the first copies, others reuse it.
        with self._host_lock:
            newest, image = self.newest, self._image
            if newest is not None and newest.version == weights.version and newest.device is None:
                return newest
            if state.state() == (weights.version, weights.checksum) and deadline.left():
                self._leave_device(why)
                image.segment.begin()
                try:
                    for name, tensor in image.tensors.items():
                        weights.device.read(name, tensor.bits)
                except CudaError as error:
                    raise ServerGone(f"the device's memory cannot be read: {error}") from None
                total = image.segment.room.nbytes
                added = wire.in_threads(wire.add_up, image.tensors.values(), total)
                sums = dict(zip(image.tensors, added, strict=True))
                if wire.combine_sums(image.tensors, sums) != weights.checksum:
                    raise ServerGone("the device's memory does not hold what was written there")
                checksum = wire.checksum(image.tensors)
                # The next version may have overwritten the device image meanwhile.
                if state.state() == (weights.version, weights.checksum) and deadline.left():
                    image.segment.seal(weights.version, checksum)
                    self.newest = WeightVersion(weights.version, image.tensors, checksum, None)
                    return self.newest
            raise ServerGone("it was too late for this version")

    def _describe(self, weights: WeightVersion) -> dict[str, float]:
        if weights.changes is None:
            return {"sync/delta": 0.0}
        total = sum(tensor.bits.size for tensor in weights.tensors.values())
        changed = sum(change.positions.size for change in weights.changes.values())
        return {"sync/delta": 1.0, "sync/changed": changed / total}

    def _find_links(self, server: VllmServer, deadline: Deadline) -> list[WorkerLink]:
        """Return the links to all workers of a server; have it connect if there are none."""
        count = self._ask_world_size(server, deadline)
        if server.state == "up":
            try:
                return self.links.wait_for(server.url, count, 0.0)
            except ServerGone:
                pass
        # Links of a restarted server are dead, and would count as its workers.
        self.links.forget(server.url)
        info = {"init_info": self.links.describe(server.url)}
        try:
            limit = deadline.left(self.step_seconds)
            server.call("POST", "/init_weight_transfer_engine", info, timeout=limit)
        except ServerRefused as error:
            raise UserError(
                f"{server.url} cannot take weights: {error.message}; start it with python -m"
                " jaxtrain_vllm.serve, or with --weight-transfer-config"
                f' \'{{"backend": "{BACKEND}"}}\', and see that rollout.vllm.listen is an address'
                " of this machine that it reaches"
            ) from None
        limit = deadline.left(self.step_seconds)
        with server.steps.wait("a call to connect its workers", limit):
            links = self.links.wait_for(server.url, count, limit)
        for link in links:
            link.steps = server.steps
            self._compare(server, link.hello.get("tensors"))
        return links

    def _ask_world_size(self, server: VllmServer, deadline: Deadline) -> int:
        try:
            limit = deadline.left(self.step_seconds)
            answer = server.call("GET", "/get_world_size", timeout=limit)
            return int(answer["world_size"])
        except ServerRefused as error:
            if error.status != 404:
                raise
            raise UserError(
                f"{server.url} has no routes for weights; start it with python -m"
                " jaxtrain_vllm.serve, or with VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from None
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{server.url}/get_world_size answers {answer!r}") from None

    def _compare(self, server: VllmServer, server_tensors: Any) -> None:
        """Raise one UserError for all differences in tensor names, and in the shapes that the
        server knows."""
        if not isinstance(server_tensors, dict):
            raise UserError(f"{server.url} does not say which tensors it holds")
        tied = TIED_COPY not in self.shapes
        problems = [f"missing there: {name}" for name in self.shapes if name not in server_tensors]
        for name, shape in server_tensors.items():
            if name == TIED_COPY and tied:
                continue
            if name.startswith(self.carried):
                continue
            if name not in self.shapes:
                problems.append(f"only there: {name}")
            elif shape is not None and tuple(shape) != self.shapes[name]:
                problems.append(
                    f"{name} is {tuple(shape)} there, {self.shapes[name]} in the trainer"
                )
        if problems:
            rest_note = f"\n  and {len(problems) - 6} more" if len(problems) > 6 else ""
            listed = "".join(f"\n  {problem}" for problem in problems[:6])
            raise UserError(
                f"{server.url} serves another model than the one in training; start it with"
                f" model.path or a model of that shape:{listed}{rest_note}"
            )

    def _stage(
        self, links: list[WorkerLink], weights: WeightVersion, deadline: Deadline
    ) -> WeightVersion:
        """Have every worker hold the version besides the one that it samples from.

        Returns the version that they hold: the host's image if a worker cannot read the device's.
        """
        if weights.device is not None:
            refused = self._share_device(links, weights, weights.device, deadline)
            if refused is None:
                return weights
            weights = self._to_host(weights, refused, deadline)
        self.staging.stage(links, weights, self._image.segment, deadline)
        return weights

    def _share_device(
        self,
        links: list[WorkerLink],
        weights: WeightVersion,
        device: DeviceImage,
        deadline: Deadline,
    ) -> str | None:
        """Have every worker read the device's image; return why one cannot, or None."""
        header = {"kind": "lent", **device.describe()}
        for link in links:
            if link.host != link.local_host:
                return f"a server is on another host ({link.host})"
            answer = self.staging.send(link, weights, header, (), deadline)
            if answer.get("staged") != weights.version:
                return f"a server cannot read it: {answer.get('error')}"
            self._count("sync/bytes", device.nbytes)
        return None

    def _note_longest(self, name: str, seconds: float) -> None:
        with self._lock:
            self._sent[name] = max(self._sent.get(name, 0.0), seconds)

    def _count(self, name: str, number: float) -> None:
        with self._lock:
            self._sent[name] = self._sent.get(name, 0.0) + number

    def _commit(self, server: VllmServer, weights: WeightVersion, deadline: Deadline) -> None:
        """Replace the weights that the server samples from; requests in flight survive."""
        # Only the newer route reports which weights drew each token. On the other one, requests in
        # flight are aborted and continued by the engine, so that every answer has one version.
        mode = "keep" if server.route == GENERATE else "abort"
        if self.servers.asleep:  # memory for the weights first, for the cache only after the update
            wake(server, deadline, self.step_seconds, "weights")
        server.updating = True
        started = time.perf_counter()
        try:
            server.call("POST", "/pause", timeout=deadline.left(self.step_seconds), mode=mode)
            resume_seconds = RESUME_SECONDS
            try:
                commit = {"version": weights.version, "checksum": weights.checksum}
                label = {"weight_version": self.servers.label(weights.version)}
                for path, body in (
                    ("/start_weight_update", None),
                    ("/update_weights", {"update_info": commit}),
                    ("/finish_weight_update", label),
                ):
                    server.call("POST", path, body, timeout=deadline.left(self.step_seconds))
                resume_seconds = max(RESUME_SECONDS, deadline.left(self.step_seconds))
                # Without labels an answer is dated by the server's version; it must change before
                # the first request after /resume.
                if mode == "abort":
                    server.version = weights.version
            finally:
                # Even past the deadline: a paused server would never answer again.
                server.call("POST", "/resume", timeout=resume_seconds)
            if self.servers.asleep:
                wake(server, deadline, self.step_seconds, "kv_cache")
        finally:
            server.updating = False
        self._note_longest("sync/pause_seconds", time.perf_counter() - started)

    def _verify(
        self,
        server: VllmServer,
        links: list[WorkerLink],
        weights: WeightVersion,
        deadline: Deadline,
    ) -> None:
        """Raise ServerGone unless all workers hold exactly what was sent."""
        for link in links:
            answer = link.ask({"command": "status"}, deadline, self.step_seconds)
            state = (answer.get("version"), answer.get("checksum"))
            if state != (weights.version, weights.checksum):
                raise ServerGone(
                    f"after the sync a worker holds version {state[0]} with checksum {state[1]},"
                    f" not version {weights.version} with {weights.checksum}"
                )
            link.served = (weights.version, weights.checksum)


def collect(
    pieces: Iterable[SplitPiece],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    wide: Collection[str] = (),
) -> dict[str, wire.WireTensor]:
    """Assemble pieces as bits of `dtype` (float32 for `wide`), rounded to nearest even like the
    trainer's cast: the plain reference for `host_image.HostImage`."""
    collected = {
        name: wire.WireTensor(shapes[name], sent, wire.empty_bits(shapes[name], sent))
        for name, sent in choose_dtypes(shapes, dtype, wide).items()
    }
    missing = {name: tensor.bits.size for name, tensor in collected.items()}
    for piece in pieces:
        tensor = collected[piece.name]
        assert piece.shape == tensor.shape, f"{piece.name}: {piece.shape} is not {tensor.shape}"
        target = as_numpy(tensor.dtype)
        tensor.bits.view(target).reshape(tensor.shape)[piece.index] = piece.array.astype(target)
        missing[piece.name] -= piece.array.size
    assert not any(missing.values()), f"unwritten parts: {[n for n, m in missing.items() if m]}"
    return collected
