"""The trainer's GPU memory as a worker of the same host reads it, verified by a checksum.

The owner's side is `jaxtrain/generation/weight_sync/device_image.py`. Tensors are copied out before
they are used; no reference to the trainer's memory survives a commit.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from jaxtrain_vllm import wire
from jaxtrain_vllm.cuda_driver import Cuda, CudaError
from jaxtrain_vllm.shared_memory import SharedMemorySegment

CHUNK_BYTES = 2**26
"""Size of the pieces that are copied and summed: all the memory that checking takes."""


class CudaIpcMemory:
    """Memory of another process, opened by its owner's description."""

    def __init__(self, described: Any, device: Any, cuda: Any):
        """described: of `DeviceImage.describe`. device: where this worker computes. cuda: `Cuda`,
        or a substitute. Raises OSError or ValueError if it cannot be opened."""
        if not isinstance(described, dict) or not isinstance(described.get("blocks"), list):
            raise ValueError(f"lent memory is described by a table, not {described!r:.80}")
        self.device, self._cuda = torch.device(device), cuda
        self._index = self.device.index or 0
        if self.device.type == "cuda" and self.device.index is None:
            self._index = torch.cuda.current_device()
        self._state = SharedMemorySegment.attach(described.get("state"))
        self._blocks: list[tuple[int, int]] = []
        # One for good: torch keeps the memory that was used on each stream for that stream.
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        try:
            for block in described["blocks"]:
                handle, size = bytes.fromhex(block["handle"]), block["bytes"]
                if type(size) is not int or size < 0:
                    raise ValueError(f"a block of {size!r:.80} bytes")
                self._blocks.append((cuda.open(self._index, handle), size))
        except BaseException:
            self.close()
            raise

    def state(self) -> tuple[int, int]:
        """Return (version, checksum) of its contents; (-1, 0) while it is being written."""
        return self._state.state()

    def read(self, described: list[dict[str, Any]]) -> dict[str, wire.WireTensor]:
        """Return the tensors that a message describes; their bits are `CudaIpcTensor`."""
        tensors = {}
        for item in described:
            shape, dtype, size = wire.measure(item)
            block, start = item["block"], item["start"]
            if type(block) is not int or not 0 <= block < len(self._blocks):
                raise wire.WireError(f"{item['name']} lies in block {block!r:.80}")
            address, room = self._blocks[block]
            if type(start) is not int or not 0 <= start <= room - size:
                raise wire.WireError(f"{item['name']} reaches out of its block")
            bits: Any = CudaIpcTensor(self, address + start)
            tensors[item["name"]] = wire.WireTensor(shape, dtype, bits)
        return tensors

    def checksum(self, tensors: wire.Tensors) -> int:
        """Return `wire.combine_sums` of the current contents."""
        sums: dict[str, torch.Tensor] = {}
        with self._aside():
            room = torch.empty(CHUNK_BYTES // 4, dtype=torch.int32, device=self.device)
            for name, (shape, dtype, ipc_tensor) in tensors.items():
                bits: Any = ipc_tensor
                sums[name] = self._add_up(bits.address, shape, dtype, room)
            values = torch.stack(list(sums.values())).tolist() if sums else []
        return wire.combine_sums(tensors, dict(zip(sums, values, strict=True)))

    def copy(self, address: int, target: torch.Tensor) -> None:
        """Start a copy out of it, ordered with work on torch's current stream."""
        stream = None
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device).cuda_stream
        self._cuda.copy(self._index, target.data_ptr(), address, target.nbytes, stream)

    def close(self) -> None:
        """Unmap the memory, once no copy is in progress.

        Without torch: a link's thread may do this while the process exits, and a thread that exits
        inside torch takes the process down ("terminate called without an active exception").
        """
        blocks, self._blocks = self._blocks, []
        with contextlib.suppress(CudaError):  # the device is of no use any more
            if blocks:
                self._cuda.finish(self._index)
            for address, _ in blocks:
                self._cuda.close(self._index, address)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Work on a separate stream: the model keeps drawing tokens meanwhile."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def _add_up(self, address: int, shape: tuple[int, ...], dtype: str, room: torch.Tensor) -> Any:
        """Return the sum of a tensor, some rows at a time; see `wire.combine_sums`."""
        kind = torch.int16 if wire.ITEM_BYTES[dtype] == 2 else torch.int32
        rows = shape[0] if shape else 1
        width = 1
        for size in shape[1:]:
            width *= size
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        if not rows * width:
            return total
        height = max(1, CHUNK_BYTES // (width * kind.itemsize))
        for first in range(0, rows, height):
            count = min(height, rows - first)
            if count * width * kind.itemsize > room.nbytes:
                chunk = torch.empty(count * width, dtype=kind, device=self.device)
            else:
                chunk = room.view(kind)[: count * width]
            self.copy(address + first * width * kind.itemsize, chunk)
            sums = chunk.view(count, width).sum(1, dtype=torch.int64)
            weights = torch.arange(first + 1, first + 1 + count, device=self.device)
            total += (sums * weights).sum()
        return total


class CudaIpcTensor:
    """Bits of one tensor in that memory, in place of a numpy array."""

    def __init__(self, memory: CudaIpcMemory, address: int):
        self.memory, self.address = memory, address

    def to_torch(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Return a copy on the worker's device, ordered with work on torch's current stream."""
        target = torch.empty(shape, dtype=getattr(torch, dtype), device=self.memory.device)
        if target.nbytes:
            self.memory.copy(self.address, target)
        return target


def open_ipc_memory(device: Any) -> Callable[[Any], CudaIpcMemory] | None:
    """Return the function that opens shared GPU memory for a worker on `device`; None without a
    GPU."""
    if torch.device(device).type != "cuda":
        return None
    return lambda described: CudaIpcMemory(described, device, Cuda())
