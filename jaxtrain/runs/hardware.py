"""hardware/HOST.jsonl: usage of a host's accelerators, memory and disk during a run.

One line every `seconds`, from a thread of the first process of each host that has the folder:

    {"time": 1795371832.5, "gpus": [{"index": 0, "name": "NVIDIA H200", "use": 0.91,
     "memory": 64.5e9, "memory_total": 150.7e9, "temperature": 61, "power": 612}],
     "cpu": 0.22, "memory": 38.1e9, "memory_total": 128.0e9, "disk_free": 2.1e12, "load": 17.4}

Shares from 0 to 1, bytes, degrees Celsius, watts; null where unknown. GPUs are read through NVML
(package nvidia-ml-py); without it, and on TPUs, only memory is reported. No jax here.
"""

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 8 * 2**20
"""Largest size of a file; then it becomes HOST.old.jsonl and a new one begins."""


class Hardware:
    """Context that writes the lines. A full disk or a lost folder costs lines, never the run."""

    def __init__(
        self,
        folder: Path,
        seconds: float,
        devices: Callable[[], list[Any]] = list,
        *,
        primary: bool = True,
    ):
        """devices: jax.local_devices; called only without NVML."""
        host = re.sub(r"[^\w.-]", "_", platform.node()) or "host"
        self.path = folder / "hardware" / f"{host}.jsonl"
        self.seconds, self.devices, self.primary = seconds, devices, primary
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hardware", daemon=True)
        self._lock: int | None = None

    def __enter__(self) -> "Hardware":
        if self.seconds > 0:
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)  # a driver that hangs must not keep the run from ending
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _watch(self) -> None:
        # The first process may be clearing the folder of an earlier run.
        if not self.primary and self._stop.wait(self.seconds):
            return
        reader = HardwareReader(self.path.parent.parent, self.devices)
        while True:
            with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: from jax devices
                if self._is_first():
                    self._write(reader.read())
            if self._stop.wait(self.seconds):
                return

    def _is_first(self) -> bool:
        """Return True if this process writes for its host, that is, if it holds the lock."""
        if self._lock is not None:
            return True
        if not self.primary and not (self.path.parent.parent / "run.json").exists():
            return False  # this host does not share the run's folder
        self.path.parent.mkdir(exist_ok=True)
        lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        except OSError:  # a file system without locks
            if not self.primary:
                os.close(lock)
                return False
        self._lock = lock
        return True

    def _write(self, line: dict[str, Any]) -> None:
        if self.path.exists() and self.path.stat().st_size > MAX_FILE_BYTES:
            self.path.replace(self.path.with_suffix(".old.jsonl"))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class HardwareReader:
    """Reader of this host's current hardware usage."""

    def __init__(self, folder: Path, devices: Callable[[], list[Any]] = list):
        self.folder, self.devices = folder, devices
        self._nvml = open_nvml()
        self._cpu = read_cpu()

    def read(self) -> dict[str, Any]:
        """Return one line in the format of the module docstring."""
        before, self._cpu = self._cpu, read_cpu()
        memory, total = read_memory()
        gpus = read_gpus(self._nvml) if self._nvml else read_devices(self.devices())
        with contextlib.suppress(OSError):
            return {
                "time": round(time.time(), 3),
                "gpus": gpus,
                "cpu": busy_share(before, self._cpu),
                "memory": memory,
                "memory_total": total,
                "disk_free": shutil.disk_usage(self.folder).free,
                "load": round(os.getloadavg()[0], 2),
            }
        return {"time": round(time.time(), 3), "gpus": gpus}


def open_nvml() -> Any:
    """Return the initialized module pynvml; None if it is not installed or there is no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml if pynvml.nvmlDeviceGetCount() else None
    except pynvml.NVMLError:
        return None


def read_gpus(nvml: Any) -> list[dict[str, Any]]:
    """Return all GPUs that NVML sees, with their UUIDs, because CUDA_VISIBLE_DEVICES renumbers the
    indices of other libraries. Numbers that a GPU does not report (a MIG device's utilization) are
    null."""

    def query(function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except nvml.NVMLError:
            return None

    gpus = []
    for index in range(query(nvml.nvmlDeviceGetCount) or 0):
        handle = query(nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            continue
        use = query(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = query(nvml.nvmlDeviceGetMemoryInfo, handle)
        power = query(nvml.nvmlDeviceGetPowerUsage, handle)
        gpus.append(
            {
                "index": index,
                "uuid": _text(query(nvml.nvmlDeviceGetUUID, handle)),
                "name": _text(query(nvml.nvmlDeviceGetName, handle)),
                "use": None if use is None else use.gpu / 100,
                "memory": None if memory is None else int(memory.used),
                "memory_total": None if memory is None else int(memory.total),
                "temperature": query(nvml.nvmlDeviceGetTemperature, handle, 0),
                "power": None if power is None else power / 1000,
            }
        )
    return gpus


def read_devices(devices: list[Any]) -> list[dict[str, Any]]:
    """Return the memory usage that jax devices report, CPUs excluded."""
    accelerators = []
    for device in devices:
        if device.platform == "cpu":
            continue
        stats = device.memory_stats() or {}
        accelerators.append(
            {
                "index": device.id,
                "name": device.device_kind,
                "use": None,
                "memory": stats.get("bytes_in_use"),
                "memory_total": stats.get("bytes_limit"),
                "temperature": None,
                "power": None,
            }
        )
    return accelerators


def read_cpu() -> tuple[int, int] | None:
    """Return (busy, total) ticks of all cores since boot; None without /proc."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0]
        ticks = [int(word) for word in first.split()[1:9]]
    except (OSError, ValueError):
        return None
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def busy_share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """Return the share of the time between two readings in which cores were busy."""
    if before is None or after is None or after[1] <= before[1]:
        return None
    return round((after[0] - before[0]) / (after[1] - before[1]), 4)


def read_memory() -> tuple[int | None, int | None]:
    """Return (used, total) bytes of the host; None without /proc."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if ":" in line}
        return sizes["MemTotal"] - sizes["MemAvailable"], sizes["MemTotal"]
    except (OSError, ValueError, KeyError, IndexError):
        return None, None


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
