"""The device mesh.

Axes, outermost first: data (replicas), fsdp (shards of parameters and rows), expert (shards of the
experts), context (shards of a row's tokens), tensor (shards of heads, ffn, vocabulary). Axis types
are set only here: all Auto, so that the compiler places every intermediate that
`sharding.constrain` leaves open.
"""

import contextlib
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from jaxtrain.distributed.processes import peers
from jaxtrain.errors import UserError

Device: TypeAlias = Any
"""A jax.Device, which jax declares as a variable."""

AXES = ("data", "fsdp", "expert", "context", "tensor")
HOST_MEMORY = "pinned_host"
"""The kind of memory of a host that its devices copy from and to by themselves."""


def resolve_sizes(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Return the sizes of all axes, with the one -1 replaced by the remaining devices.

    A missing axis has size 1; without any -1 the product must be the device count. Raises UserError
    for an unknown axis, two -1, or sizes that do not fit the devices.
    """
    unknown = sorted(set(sizes) - set(AXES))
    if unknown:
        raise UserError(f"parallel: unknown mesh axis {unknown[0]!r}; the axes are {list(AXES)}")
    full = {axis: sizes.get(axis, 1) for axis in AXES}
    for axis, size in full.items():
        if size < 1 and size != -1:
            raise UserError(f"parallel.{axis}={size}: must be at least 1, or -1 for the rest")
    open_axes = [axis for axis, size in full.items() if size == -1]
    if len(open_axes) > 1:
        raise UserError(f"parallel: only one axis may be -1, found {open_axes}")
    fixed = math.prod(size for size in full.values() if size != -1)
    if open_axes:
        if num_devices % fixed:
            raise UserError(
                f"parallel: {num_devices} devices cannot be divided by {fixed}, the product of the "
                f"fixed axes {_named(full)}; choose sizes that divide {num_devices}"
            )
        full[open_axes[0]] = num_devices // fixed
    elif fixed != num_devices:
        raise UserError(
            f"parallel: the axes {_named(full)} need {fixed} devices, but there are {num_devices}; "
            "set one axis to -1 to take the rest"
        )
    return full


def _named(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "all 1"


def make_mesh(devices: Sequence[Device] | None = None, **sizes: int) -> Mesh:
    """Return a mesh over all devices (or the given ones) with every axis of AXES, of type Auto.

    make_mesh(data=2, fsdp=-1); a missing axis has size 1. See `resolve_sizes`.
    """
    devices = jax.devices() if devices is None else list(devices)
    full = resolve_sizes(sizes, len(devices))
    return jax.make_mesh(
        tuple(full.values()), tuple(full), axis_types=(AxisType.Auto,) * len(full), devices=devices
    )


def start_devices() -> None:
    """Have jax open its devices in a thread, which takes seconds on GPUs, while modules are
    imported and files are read. A failure shows again where devices are first used. With several
    processes, which meet there, that one is the start."""

    def start() -> None:
        with contextlib.suppress(Exception):
            jax.devices()

    if peers() is None:
        # No daemon: at the exit of Python it might be within the driver.
        threading.Thread(target=start, name="devices").start()


def split_devices(reserved: int, key: str = "rollout.devices") -> tuple[list[Device], list[Device]]:
    """Return (devices to train on, the `reserved` last ones for another purpose, configured by
    `key`).

    Raises UserError if there are too few, or if there are several processes.
    """
    devices = jax.devices()
    if not reserved:
        return devices, []
    if jax.process_count() > 1:
        raise UserError(
            f"{key} {reserved}: devices are set aside in one process only, here are"
            f" {jax.process_count()}; "
            + (
                "remove it, or let vLLM servers sample"
                if key == "rollout.devices"
                else "start one process, or take the states from the step or from disk"
            )
        )
    if reserved >= len(devices):
        raise UserError(
            f"{key} {reserved}: there are {len(devices)} devices in all, and at least one"
            " must be left to train on"
        )
    return devices[:-reserved], devices[-reserved:]


def require_host_memory(mesh: Mesh, key: str) -> None:
    """Raise UserError, naming `key`, where a device cannot reach pinned memory of its host."""
    for device in mesh.devices.flat:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST_MEMORY not in kinds:
            raise UserError(
                f"{key} needs devices that reach pinned memory of their host;"
                f" {device.device_kind} has {', '.join(kinds)}: remove it"
            )


def is_main_process() -> bool:
    """Return True on the process that logs, writes metrics and exports."""
    return jax.process_index() == 0


def sync_processes(name: str) -> None:
    """Wait until every process has reached the point `name`; does nothing with one process."""
    connection = peers()
    if connection is not None:
        connection.meet(name)
    elif jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
