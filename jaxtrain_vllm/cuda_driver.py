"""GPU memory shared by processes of one host, through NVIDIA's driver (CUDA IPC).

    owner                                   others, which receive the handle in a message
    allocate -> an address on a GPU          open(handle) -> an address of the same memory
    export -> a handle, 64 bytes            copy from there
    free, once nobody has it open           close

The driver's library (libcuda) is common to jax and torch, whatever CUDA version each ships. Memory
of a framework's pool cannot be shared, hence `allocate`. Errors of the driver are CudaErrors.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

LIBRARIES = ("libcuda.so.1", "libcuda.so")
HANDLE_BYTES = 64
OWN_STREAM = 1
"""CU_STREAM_NON_BLOCKING: does not synchronize with the default stream."""
GRANULE = 2**21
"""The driver shares whole pieces of this size, with whatever else lies in them."""
ORDINAL = 9
"""CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL."""
PEERS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: allows memory of another GPU of this host."""

_number, _place, _size = ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t
_opaque, _unsigned = ctypes.c_void_p, ctypes.c_uint


class Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


ARGUMENTS: dict[str, list[Any]] = {
    "cuInit": [_unsigned],
    "cuGetErrorName": [_number, ctypes.POINTER(ctypes.c_char_p)],
    "cuDeviceGet": [ctypes.POINTER(_number), _number],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(_opaque), _number],
    "cuCtxPushCurrent_v2": [_opaque],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(_opaque)],
    "cuCtxSynchronize": [],
    "cuPointerGetAttribute": [_opaque, _number, _place],
    "cuMemAlloc_v2": [ctypes.POINTER(_place), _size],
    "cuMemFree_v2": [_place],
    "cuIpcGetMemHandle": [ctypes.POINTER(Handle), _place],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_place), Handle, _unsigned],
    "cuIpcCloseMemHandle": [_place],
    "cuStreamCreate": [ctypes.POINTER(_opaque), _unsigned],
    "cuStreamSynchronize": [_opaque],
    "cuMemcpyAsync": [_place, _place, _size, _opaque],
    "cuMemcpyDtoH_v2": [_opaque, _place, _size],
}


class CudaError(OSError):
    """Raised when the driver is missing, or refused a call."""


class Cuda:
    """The driver, for all GPUs that this process sees. Any thread may call."""

    def __init__(self, library: Any = None):
        """library: libcuda, loaded; None: search for it."""
        self._library = _load() if library is None else library
        for name, arguments in ARGUMENTS.items():
            try:
                function = getattr(self._library, name)
            except AttributeError:
                raise CudaError(f"the NVIDIA driver here has no {name}") from None
            function.argtypes, function.restype = arguments, _number
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._streams: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", 0)

    def locate(self, address: int) -> int:
        """Return the number of the GPU whose memory contains an address."""
        ordinal = _number()
        self._call("cuPointerGetAttribute", ctypes.addressof(ordinal), ORDINAL, address)
        return ordinal.value

    def allocate(self, device: int, size: int) -> int:
        """Return the address of `size` new bytes on a GPU that can be shared; release with
        `free`."""
        address = _place()
        with self._on(device):
            self._call("cuMemAlloc_v2", ctypes.byref(address), -(-size // GRANULE) * GRANULE)
        return address.value

    def free(self, device: int, address: int) -> None:
        """Free memory of `allocate`."""
        with self._on(device):
            self._call("cuMemFree_v2", address)

    def export(self, device: int, address: int) -> bytes:
        """Return the handle by which another process opens memory of `allocate`."""
        handle = Handle()
        with self._on(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, device: int, handle: bytes) -> int:
        """Map another process's memory for this GPU; return its address. Release with `close`."""
        if len(handle) != HANDLE_BYTES:
            raise CudaError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        address = _place()
        with self._on(device):
            structure = Handle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), structure, PEERS)
        return address.value

    def close(self, device: int, address: int) -> None:
        """Unmap memory of `open`."""
        with self._on(device):
            self._call("cuIpcCloseMemHandle", address)

    def copy(
        self, device: int, target: int, source: int, size: int, stream: int | None = None
    ) -> None:
        """Start a copy between GPUs, or within one.

        stream: a CUDA stream of `device`; None: an internal stream, which `wait` waits for.
        """
        with self._on(device):
            queue = self._stream(device) if stream is None else ctypes.c_void_p(stream)
            self._call("cuMemcpyAsync", target, source, size, queue)

    def wait(self, device: int) -> None:
        """Wait for the copies on the internal stream."""
        with self._on(device):
            self._call("cuStreamSynchronize", self._stream(device))

    def finish(self, device: int) -> None:
        """Wait for everything that this process started on a GPU, on any stream."""
        with self._on(device):
            self._call("cuCtxSynchronize")

    def copy_to_host(self, device: int, target: int, source: int, size: int) -> None:
        """Copy into host memory, synchronously."""
        with self._on(device):
            self._call("cuMemcpyDtoH_v2", target, source, size)

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """Make a GPU's primary context, which jax and torch use, too, current in this thread."""
        if device not in self._contexts:
            number, context = _number(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(number), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
            self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _stream(self, device: int) -> ctypes.c_void_p:
        if device not in self._streams:
            stream = ctypes.c_void_p()
            self._call("cuStreamCreate", ctypes.byref(stream), OWN_STREAM)
            self._streams[device] = stream
        return self._streams[device]

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            description = text.value.decode() if text.value else "an unknown error"
            raise CudaError(f"{name}: {description} ({code})")


def _load() -> Any:
    problem = None
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problem = error
    raise CudaError(f"no NVIDIA driver is here ({problem})")
