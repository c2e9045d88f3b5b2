"""Fake `jaxtrain_vllm.cuda_driver.Cuda` without a GPU: host memory that processes share."""

import ctypes
import mmap
import os

from jaxtrain_vllm.cuda_driver import HANDLE_BYTES, CudaError


class HostCuda:
    """The calls of Cuda on host memory, with hooks for tests: `refuses` are names of calls that
    fail, `spoils` flips a bit of the next copy."""

    def __init__(self):
        self.refuses: set[str] = set()
        self.spoils = False
        self.freed: list[int] = []
        self.opened: list[int] = []
        self._memory: dict[int, tuple] = {}

    def locate(self, position):
        self._try("locate")
        return 0

    def allocate(self, device, size):
        self._try("allocate")
        handle = os.memfd_create("double")
        os.ftruncate(handle, size)
        return self._map(handle, size)

    def free(self, device, position):
        self.freed.append(position)

    def export(self, device, position):
        self._try("export")
        handle, size, _ = self._memory[position]
        return f"{os.getpid()} {handle} {size}".encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, device, handle):
        self._try("open")
        owner, number, size = handle.rstrip(b"\0").decode().split()
        position = self._map(os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR), int(size))
        self.opened.append(position)
        return position

    def close(self, device, position):
        self.opened.remove(position)

    def copy(self, device, target, source, size, stream=None):
        self._try("copy")
        ctypes.memmove(target, source, size)
        if self.spoils:
            self.spoils = False
            ctypes.c_ubyte.from_address(target).value ^= 1

    def copy_to_host(self, device, target, source, size):
        self._try("copy_to_host")
        ctypes.memmove(target, source, size)

    def finish(self, device):
        self._try("finish")

    def wait(self, device):
        self._try("wait")

    def _map(self, handle, size):
        memory = mmap.mmap(handle, size)
        position = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
        self._memory[position] = handle, size, memory
        return position

    def _try(self, name):
        if name in self.refuses:
            raise CudaError(f"{name}: CUDA_ERROR_OF_A_TEST (999)")
