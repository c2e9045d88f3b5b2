"""Accelerators as their makers describe them: what `estimate.py` reckons with."""

import dataclasses
import re

from jaxtrain.core.metrics import PEAK_TFLOPS_BF16
from jaxtrain.errors import UserError


@dataclasses.dataclass(frozen=True)
class Device:
    """Kind of accelerator and its interconnect."""

    name: str
    tflops: float
    """Dense bfloat16 peak."""
    memory_gib: float
    """What programs get of it."""
    memory_gbs: float
    """Bandwidth of its memory, GB/s."""
    link_gbs: float
    """To the others of its host (TPU: of its slice), GB/s in each direction, all links together."""
    host: int
    """Devices that are joined by such links."""
    network_gbs: float
    """Its share of the host's network, GB/s in each direction."""
    pcie_gbs: float
    """To its host's memory, GB/s in each direction; 0: not described."""


def _device(name: str, *numbers: float) -> Device:
    memory, bandwidth, link, host, network, pcie = numbers
    return Device(name, PEAK_TFLOPS_BF16[name], memory, bandwidth, link, int(host), network, pcie)


DEVICES = {
    # GPUs: data sheets; a host is the maker's own of eight, with one adapter of its generation for
    # each GPU (A100: 200, H100 to B200: 400 Gb/s), or eight cards on PCIe with 100 Gb/s together;
    # PCIe 4.0 or 5.0 with 16 lanes.
    "h200": _device("H200", 140, 4800, 450, 8, 50, 64),
    "h100": _device("H100", 79, 3350, 450, 8, 50, 64),
    "b200": _device("B200", 178, 7700, 900, 8, 50, 64),
    "a100": _device("A100", 79, 2039, 300, 8, 25, 32),
    "l40s": _device("L40S", 44, 864, 32, 8, 1.5, 32),
    "l4": _device("L4", 22, 300, 32, 8, 1.5, 32),
    # TPUs: Google Cloud's pages of each generation; half of the bandwidth that they say, which
    # counts both directions. A slice has no hosts: beyond it is the data center's network.
    "v5e": _device("TPU v5e", 15.5, 819, 100, 256, 6, 0),
    "v5p": _device("TPU v5p", 94, 2765, 300, 8960, 6, 0),
    "v6e": _device("TPU v6e", 31, 1640, 224, 256, 6, 0),
}


def find_device(kind: str) -> Device | None:
    """Return the device of a jax device_kind, such as "NVIDIA H200"; None if unknown."""
    kind = kind.lower().replace("tpu v5 lite", "tpu v5e").replace("tpu v6 lite", "tpu v6e")
    kind = "tpu v5p" if kind == "tpu v5" else kind
    matching = (
        device for device in DEVICES.values() if re.search(rf"\b{device.name.lower()}\b", kind)
    )
    return next(matching, None)


def read_devices(text: str) -> tuple[Device, int]:
    """ "h200:64" as a device and how many there are; UserError."""
    name, _, count = text.partition(":")
    device = DEVICES.get(name.lower())
    if device is None:
        raise UserError(f"--on {text!r}: {name!r} is unknown; choose one of {', '.join(DEVICES)}")
    if not count.isdecimal() or not 1 <= int(count) <= 2**17:
        raise UserError(f"--on {text!r}: write {name.lower()}:COUNT, such as {name.lower()}:8")
    return device, int(count)
