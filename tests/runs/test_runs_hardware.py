"""The lines about a host's hardware."""

import json
import time
from types import SimpleNamespace

from jaxtrain.runs.hardware import Hardware, busy_share, read_devices, read_gpus


class Nvml:
    """Two GPUs, the second a MIG device, which tells neither its use nor its power."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle == 1:
            raise self.NVMLError
        return SimpleNamespace(gpu=91)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=60, total=143)

    def nvmlDeviceGetPowerUsage(self, handle):
        if handle == 1:
            raise self.NVMLError
        return 612_000

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}".encode()

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H200"

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 61


def test_gpus_tell_what_they_can():
    first, second = read_gpus(Nvml())
    assert first == {
        **{"index": 0, "uuid": "GPU-0", "name": "NVIDIA H200", "use": 0.91},
        **{"memory": 60, "memory_total": 143, "temperature": 61, "power": 612.0},
    }
    assert second["use"] is None and second["power"] is None and second["memory"] == 60


def test_devices_without_nvml_tell_their_memory():
    stats = {"bytes_in_use": 5, "bytes_limit": 16}
    tpu = SimpleNamespace(id=3, platform="tpu", device_kind="TPU v5e", memory_stats=lambda: stats)
    cpu = SimpleNamespace(id=0, platform="cpu")
    (actual,) = read_devices([cpu, tpu])
    assert actual["index"] == 3 and actual["memory"] == 5 and actual["memory_total"] == 16
    assert actual["use"] is None


def test_share_of_busy_time():
    assert busy_share((10, 100), (30, 140)) == 0.5
    assert busy_share(None, (1, 2)) is None and busy_share((1, 2), (1, 2)) is None


def read_lines(folder):
    return [
        json.loads(line)
        for path in folder.glob("hardware/*.jsonl")
        for line in path.read_text().splitlines()
    ]


def test_the_first_process_of_a_host_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxtrain.runs.hardware.MAX_FILE_BYTES", 200)
    with Hardware(tmp_path, 0.01), Hardware(tmp_path, 0.01):
        deadline = time.monotonic() + 20
        while not list(tmp_path.glob("hardware/*.old.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = read_lines(tmp_path)
    assert len(lines) >= 2 and len({line["time"] for line in lines}) == len(lines)
    assert {"gpus", "cpu", "memory", "disk_free", "load"} <= lines[-1].keys()


def test_who_does_not_see_the_run_writes_nothing(tmp_path):
    with Hardware(tmp_path / "gone", 0.01, primary=False), Hardware(tmp_path, 0):
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())
