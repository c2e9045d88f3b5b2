"""The newest weights in the trainer's GPU memory, read there by servers of the same host.

    whole tensors, laid out on the device (`device_layout.list_rows`)
          v  copied within the GPU
    device image: all tensors, 2 bytes per weight, outside jax's pool, which CUDA IPC cannot share
          v  a handle, over the authenticated link
    each worker opens it once (`jaxtrain_vllm/cuda_ipc.py`), sums up its contents, loads from it

One page of host memory states which version the image holds, so that a reader notices that it was
written meanwhile. `host_image.HostImage` has the same page in front of its bits.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.generation.weight_sync.host_image import (
    AHEAD_BYTES,
    choose_dtypes,
    look_ahead,
    measure_all,
)
from jaxtrain_vllm import wire
from jaxtrain_vllm.cuda_driver import CudaError
from jaxtrain_vllm.shared_memory import SharedMemorySegment

ALIGNED = 512
"""Every tensor begins at a multiple of this."""


class DeviceRows(NamedTuple):
    """Consecutive complete rows of a tensor, on one device."""

    name: str
    first: int
    array: Any
    """jax array [rows, ...] of the tensor (or a scalar), in the dtype that is sent."""
    sum: Any
    """Contribution to the tensor's sum (`wire.combine_sums`), int32."""


class DeviceTensorLocation(NamedTuple):
    """Location of a tensor in the image."""

    block: int
    start: int


class DeviceBlock(NamedTuple):
    """Memory on one GPU."""

    device: int
    address: int
    size: int
    handle: bytes


class DeviceImage:
    """Image of all tensors of a model as raw bits of `dtype`, or float32 for those in `wide`, in
    blocks on the GPUs that train it.

    list_rows(params, homes): yields all rows of the model, each tensor on its device homes[name] of
    `list_devices`. cuda: `jaxtrain_vllm.cuda_driver.Cuda`, or a substitute. Every method may raise
    CudaError, after which the image is unusable.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str,
        list_rows: Callable[[Any, Mapping[str, Any]], Iterable[DeviceRows]],
        cuda: Any,
        wide: Collection[str] = (),
    ):
        self.shapes, self._list_rows, self._cuda = dict(shapes), list_rows, cuda
        self.dtypes = choose_dtypes(shapes, dtype, wide)
        self.sizes = measure_all(shapes, self.dtypes)
        self.state = SharedMemorySegment.create(0)
        self._spots: dict[str, DeviceTensorLocation] = {}
        self._blocks: list[DeviceBlock] = []
        self._homes: dict[str, Any] = {}
        self._sums: list[tuple[str, Any]] = []

    @property
    def nbytes(self) -> int:
        """Total bytes of the tensors."""
        return sum(self.sizes.values())

    def take(self, params: Any) -> None:
        """Overwrite the image with all weights; `params` may be donated once this returns."""
        if not self._blocks:
            self._allocate(list_devices(params))
        self.state.begin()
        missing, self._sums = dict(self.sizes), []
        copying, copying_bytes = [], 0
        for rows in look_ahead(self._list_rows(params, self._homes)):
            block, address = self._find(rows.name)
            size = rows.array.nbytes
            missing[rows.name] -= size
            if not size:
                continue
            # The driver copies outside of jax's streams, so that jax must have written the array.
            rows.array.block_until_ready()
            row_bytes = size // (rows.array.shape[0] if rows.array.ndim else 1)
            target = address + rows.first * row_bytes
            self._cuda.copy(block.device, target, rows.array.unsafe_buffer_pointer(), size)
            self._sums.append((rows.name, rows.sum))
            copying.append(rows.array)  # keep the buffer alive: the copy is asynchronous
            copying_bytes += size
            if copying_bytes > AHEAD_BYTES:
                self._wait()
                copying, copying_bytes = [], 0
        self._wait()
        del copying
        assert not any(missing.values()), f"unwritten parts: {[n for n, m in missing.items() if m]}"

    def seal(self, version: int) -> int:
        """Mark the image as complete; return the checksum of what was sent there."""
        sums = dict.fromkeys(self.shapes, 0)
        # Start all copies before reading the first sum: one transfer latency instead of many.
        for _, partial_sum in self._sums:
            if hasattr(partial_sum, "copy_to_host_async"):
                partial_sum.copy_to_host_async()
        for name, partial_sum in self._sums:
            sums[name] += int(partial_sum)
        tensors = {
            name: wire.WireTensor(shape, self.dtypes[name], np.empty(0))
            for name, shape in self.shapes.items()
        }
        checksum = wire.combine_sums(tensors, sums)
        self.state.seal(version, checksum)
        return checksum

    def describe(self) -> dict[str, Any]:
        """Return the message fields by which a worker opens the image and locates each tensor."""
        blocks = [{"handle": block.handle.hex(), "bytes": block.size} for block in self._blocks]
        tensors = [
            {"name": n, "shape": list(s), "dtype": self.dtypes[n], **self._spots[n]._asdict()}
            for n, s in self.shapes.items()
        ]
        return {"memory": {"state": self.state.described, "blocks": blocks}, "tensors": tensors}

    def read(self, name: str, bits: np.ndarray) -> None:
        """Copy a tensor's bits into a host array."""
        block, address = self._find(name)
        if bits.nbytes:
            self._cuda.copy_to_host(block.device, bits.ctypes.data, address, bits.nbytes)

    def free(self) -> None:
        """Free the memory, once no server reads it."""
        for block in self._blocks:
            with contextlib.suppress(CudaError):  # the device is gone, and its memory with it
                self._cuda.free(block.device, block.address)
        self._blocks = []

    def _find(self, name: str) -> tuple[DeviceBlock, int]:
        spot = self._spots[name]
        block = self._blocks[spot.block]
        return block, block.address + spot.start

    def _wait(self) -> None:
        for block in self._blocks:
            self._cuda.wait(block.device)

    def _allocate(self, devices: Mapping[Any, int]) -> None:
        """Create blocks of about equal size on every device that holds weights. devices: with an
        address in the memory of each, which identifies it to the driver."""
        if self.state.described is None:
            raise CudaError("this system has no memory that processes share")
        self._spots, room = spread(self.sizes, len(devices))
        try:
            for size, near in zip(room, devices.values(), strict=True):
                device = self._cuda.locate(near)
                address = self._cuda.allocate(device, max(size, ALIGNED))
                # Recorded before the export, so that free() releases it if the export fails.
                self._blocks.append(DeviceBlock(device, address, size, b""))
                self._blocks[-1] = DeviceBlock(
                    device, address, size, self._cuda.export(device, address)
                )
        except CudaError as error:
            self.free()
            raise CudaError(f"{error}, for {sum(room) / 2**30:.1f} GiB beside jax's pool") from None
        homes = list(devices)
        self._homes = {name: homes[spot.block] for name, spot in self._spots.items()}


def list_devices(params: Mapping[str, Any]) -> dict[Any, int]:
    """Return {device that holds parameters: an address in its memory}."""
    addresses: dict[Any, int] = {}
    for array in params.values():
        for shard in array.addressable_shards:
            if shard.data.nbytes:
                addresses.setdefault(shard.device, shard.data.unsafe_buffer_pointer())
    return dict(sorted(addresses.items(), key=lambda item: item[0].id))


def spread(
    sizes: Mapping[str, int], count: int
) -> tuple[dict[str, DeviceTensorLocation], list[int]]:
    """Return the location of each tensor in `count` blocks of about equal size, and the blocks'
    bytes."""
    room = [0] * count
    spots = {}
    for name, size in sizes.items():
        block = room.index(min(room))
        spots[name] = DeviceTensorLocation(block, room[block])
        room[block] += -(-size // ALIGNED) * ALIGNED
    return spots, room
