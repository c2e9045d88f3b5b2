"""hardware/HOST.jsonl: what a host's accelerators, memory and disk do while a run goes on.

One line every `seconds`, from a thread of the first process of each host that sees the folder:

    {"time": 1795371832.5, "gpus": [{"index": 0, "name": "NVIDIA H200", "use": 0.91,
     "memory": 64.5e9, "memory_total": 150.7e9, "temperature": 61, "power": 612}],
     "cpu": 0.22, "memory": 38.1e9, "memory_total": 128.0e9, "disk_free": 2.1e12, "load": 17.4}

Shares from 0 to 1, bytes, degrees Celsius, watts; null where nobody can tell. GPUs are asked
through NVML (package nvidia-ml-py); without it, and on TPUs, devices know their memory alone. No
jax here.
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

MOST_BYTES = 8 * 2**20
"""Of a file; then it becomes HOST.old.jsonl and a new one begins."""


class Hardware:
    """Context: writes the lines. A full disk or a lost folder costs lines, never the run."""

    def __init__(
        self,
        folder: Path,
        seconds: float,
        devices: Callable[[], list[Any]] = list,
        *,
        primary: bool = True,
    ):
        """devices: jax.local_devices; asked only where there is no NVML."""
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
            with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: jax, of its devices
                if self._is_first():
                    self._write(reader.read())
            if self._stop.wait(self.seconds):
                return

    def _is_first(self) -> bool:
        """Whether this process writes for its host: the one that holds the lock."""
        if self._lock is not None:
            return True
        if not self.primary and not (self.path.parent.parent / "run.json").exists():
            return False  # the run's folder is another host's
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
        if self.path.exists() and self.path.stat().st_size > MOST_BYTES:
            self.path.replace(self.path.with_suffix(".old.jsonl"))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class HardwareReader:
    """What this host's hardware does now."""

    def __init__(self, folder: Path, devices: Callable[[], list[Any]] = list):
        self.folder, self.devices = folder, devices
        self._nvml = open_nvml()
        self._cpu = read_cpu()

    def read(self) -> dict[str, Any]:
        """One line, as above."""
        before, self._cpu = self._cpu, read_cpu()
        memory, total = read_memory()
        gpus = read_gpus(self._nvml) if self._nvml else read_devices(self.devices())
        with contextlib.suppress(OSError):
            return {
                "time": round(time.time(), 3),
                "gpus": gpus,
                "cpu": share(before, self._cpu),
                "memory": memory,
                "memory_total": total,
                "disk_free": shutil.disk_usage(self.folder).free,
                "load": round(os.getloadavg()[0], 2),
            }
        return {"time": round(time.time(), 3), "gpus": gpus}


def open_nvml() -> Any:
    """The module pynvml, ready; None where there is none, or no driver."""
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
    """All GPUs that NVML sees, by their UUIDs: CUDA_VISIBLE_DEVICES renumbers the others' indices.
    What one does not tell (a MIG device its use) is null."""

    def ask(function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except nvml.NVMLError:
            return None

    found = []
    for index in range(ask(nvml.nvmlDeviceGetCount) or 0):
        handle = ask(nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            continue
        use = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        power = ask(nvml.nvmlDeviceGetPowerUsage, handle)
        found.append(
            {
                "index": index,
                "uuid": _text(ask(nvml.nvmlDeviceGetUUID, handle)),
                "name": _text(ask(nvml.nvmlDeviceGetName, handle)),
                "use": None if use is None else use.gpu / 100,
                "memory": None if memory is None else int(memory.used),
                "memory_total": None if memory is None else int(memory.total),
                "temperature": ask(nvml.nvmlDeviceGetTemperature, handle, 0),
                "power": None if power is None else power / 1000,
            }
        )
    return found


def read_devices(devices: list[Any]) -> list[dict[str, Any]]:
    """What jax's devices tell of themselves: their memory. CPUs are no accelerators."""
    found = []
    for device in devices:
        if device.platform == "cpu":
            continue
        stats = device.memory_stats() or {}
        found.append(
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
    return found


def read_cpu() -> tuple[int, int] | None:
    """(busy, all) ticks of all cores since the start; None where there is no /proc."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0]
        ticks = [int(word) for word in first.split()[1:9]]
    except (OSError, ValueError):
        return None
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def share(before: tuple[int, int] | None, now: tuple[int, int] | None) -> float | None:
    """The part of the time between two readings in which cores were busy."""
    if before is None or now is None or now[1] <= before[1]:
        return None
    return round((now[0] - before[0]) / (now[1] - before[1]), 4)


def read_memory() -> tuple[int | None, int | None]:
    """(used, total) bytes of the host; None where there is no /proc."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if ":" in line}
        return found["MemTotal"] - found["MemAvailable"], found["MemTotal"]
    except (OSError, ValueError, KeyError, IndexError):
        return None, None


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
