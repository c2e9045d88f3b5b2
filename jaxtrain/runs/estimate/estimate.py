"""Time and memory of one training step, by a model with few numbers in it.

    time    = multiplications at the rate that was measured + what travels, unhidden + optimizer
    memory  = what a device keeps of weights, gradients and moments + what the backward pass needs

Every step reads the whole batch once forward and once backward. What travels is not hidden: steps
on one, two and four GPUs differ by as much as their collectives take (docs/scale.md). The measured
numbers are below; all of them are of H200s, and taken over as shares for other devices.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxtrain.distributed.sharding import count_ways, mesh_axes, split_axes
from jaxtrain.runs.estimate.devices import Device
from jaxtrain.runs.estimate.work import ParameterArray, StepWork

DENSE_SHARE, DENSE_HALF = 0.69, 800.0
"""Of the peak, that layers of infinite width reach in matmuls and all that is between them; and the
width of the hidden state at which it is half of that."""
EXPERT_SHARE = 0.40
"""Of the peak, in grouped matmuls of experts with all that sorts tokens."""
MIXING_SHARE = 0.475
"""Of the peak, in attention and its relatives."""
MEMORY_SHARE = 0.80
"""Of the memory's bandwidth, in the optimizer."""
LINK_SHARE, NETWORK_SHARE = 0.96, 0.80
"""Of the links' bandwidth in a collective. The network's is an assumption: nothing was measured."""
BACKWARD = 2.5
"""Attention's backward pass over its forward one: five products where that has two."""
LAYER_FACTOR = 3.0
"""Bytes of a layer's backward pass over those that its Linears give."""
GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A mesh without devices: what parallel.rules reads of one."""

    shape: Mapping[str, int]

    @property
    def devices(self) -> int:
        return math.prod(self.shape.values())


@dataclasses.dataclass(frozen=True)
class StepRows:
    """Rows that an optimizer step trains on."""

    tokens: int
    """Of a row, all of one document."""
    rows: int
    """Of a forward pass, on each device that has rows of its own."""
    microsteps: int = 1


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Time and memory of one optimizer step."""

    seconds: float
    parts: Mapping[str, float]
    """Seconds by what they go into."""
    tokens_per_second: float
    """Of one device."""
    mfu: float
    gib: Mapping[str, float]
    """Of one device, by what lies there."""

    @property
    def memory(self) -> float:
        return sum(self.gib.values())


def estimate(
    work: StepWork, mesh: Sizes, rows: StepRows, device: Device, *, buffer: float = 1.25
) -> Estimate:
    """Estimate a step on this mesh. buffer: parallel.expert_buffer."""
    shards = count_ways(mesh_axes("rows", mesh), mesh)
    tokens = rows.tokens * rows.rows * shards / mesh.devices  # of a microstep, for each device
    parts = {
        "layers and head": matmul_seconds(work, tokens, device) * rows.microsteps,
        "attention": mixing_seconds(work, rows, shards, mesh, device) * rows.microsteps,
        **{
            name: seconds * rows.microsteps
            for name, seconds in travel_seconds(work, mesh, rows, device).items()
        },
        "unpacking": unpack_seconds(work, device) * rows.microsteps,
        "copies to the host": host_seconds(work, mesh, rows, device) * rows.microsteps,
        "gradients of replicas": replica_seconds(work, mesh, device),
        "optimizer": optimizer_seconds(work, mesh, device),
    }
    seconds = sum(parts.values())
    flops = 2 * (2 * (work.dense + work.experts) + work.dense_trained + work.experts_trained)
    done = tokens * rows.microsteps
    flops = flops * done + 3 * work.mixing(rows.tokens) * done / rows.tokens
    return Estimate(
        seconds=seconds,
        parts={name: value for name, value in parts.items() if value},
        tokens_per_second=done / seconds,
        mfu=flops / seconds / device.tflops / 1e12,
        gib=memory(work, mesh, rows, buffer),
    )


def matmul_seconds(work: StepWork, tokens: float, device: Device) -> float:
    """Seconds of the weights' matmuls: forward, recomputation, gradients of inputs and weights."""
    again = 0.0 if work.remat in ("none", "elementwise", "dots") else 1.0
    dense = 2.0 * work.dense + again * work.dense_again + work.dense_trained
    experts = (2.0 + again) * work.experts + work.experts_trained
    share = DENSE_SHARE * work.hidden / (work.hidden + DENSE_HALF)
    flops = dense / share + experts / EXPERT_SHARE
    return 2.0 * tokens * flops / device.tflops / 1e12


def mixing_seconds(
    work: StepWork, rows: StepRows, shards: int, mesh: Sizes, device: Device
) -> float:
    again = 1.0 if work.remat in ("full", "offload") else 0.0
    flops = work.mixing(rows.tokens) * rows.rows * shards / mesh.devices
    return (1.0 + BACKWARD + again) * flops / (MIXING_SHARE * device.tflops * 1e12)


def travel_seconds(work: StepWork, mesh: Sizes, rows: StepRows, device: Device) -> dict[str, float]:
    """Seconds of communication in one microstep."""
    seconds = {"weights": 0.0, "tensor": 0.0, "context": 0.0, "experts' tokens": 0.0}
    for array in work.arrays:
        gathered, axes = gathered_bytes(array, mesh)
        if axes:
            # Forward and backward, and the gradient back to its owners.
            times = 3 if array.trained else 2
            seconds["weights"] += times * collective_seconds(gathered, axes, mesh, device)
    # Bytes of a hidden state of this device's rows, before the tensor axis cuts it.
    activation_bytes = rows.rows * rows.tokens / mesh.shape["context"] * work.hidden * 2.0
    full = 0 if work.remat in ("none", "elementwise", "dots") else 1
    if mesh.shape["tensor"] > 1:
        # Two gathers and two scatters of a layer forward, as many back; what is computed again.
        per_exchange = collective_seconds(activation_bytes, ("tensor",), mesh, device)
        seconds["tensor"] = work.layers * (8 + 3 * full) * per_exchange
    if mesh.shape["context"] > 1:
        # Keys and values: about as wide as the state with few key heads; gathered twice, summed.
        gathered = activation_bytes * mesh.shape["context"] / mesh.shape["tensor"]
        per_exchange = collective_seconds(gathered, ("context",), mesh, device)
        seconds["context"] = work.layers * (3 + full) * per_exchange
    if mesh.shape["expert"] > 1:
        gathered = activation_bytes / mesh.shape["tensor"] * mesh.shape["expert"]
        per_exchange = collective_seconds(gathered, ("expert",), mesh, device)
        seconds["experts' tokens"] = work.expert_layers * 5 * per_exchange
    return seconds


def unpack_seconds(work: StepWork, device: Device) -> float:
    """Seconds to unpack quantized weights in the forward, recomputed and backward passes."""
    moved = sum(
        math.prod(array.shape) * (array.itemsize + array.unpacked)
        for array in work.arrays
        if array.unpacked
    )
    return 3.0 * moved / (MEMORY_SHARE * device.memory_gbs * 1e9)


def host_seconds(work: StepWork, mesh: Sizes, rows: StepRows, device: Device) -> float:
    """Seconds of inputs of blocks that go to the host and come back; as for all that travels, as if
    nothing hid them. 0 where the way there is not described."""
    if work.remat != "offload" or not device.pcie_gbs:
        return 0.0
    tokens = rows.rows * rows.tokens / mesh.shape["context"]
    states = 2.0 * tokens * work.layers * work.hidden / mesh.shape["tensor"]
    return 2.0 * states / (device.pcie_gbs * 1e9)


def replica_seconds(work: StepWork, mesh: Sizes, device: Device) -> float:
    """Gradients summed over full copies, once a step: there and back."""
    if mesh.shape["data"] == 1:
        return 0.0
    gradient_bytes = sum(
        local_entries(array, mesh) * array.travels for array in work.arrays if array.trained
    )
    return 2.0 * collective_seconds(gradient_bytes, ("data",), mesh, device)


def optimizer_seconds(work: StepWork, mesh: Sizes, device: Device) -> float:
    """Weights and moments read and written, gradients read twice, for clipping first."""
    moved = sum(
        local_entries(array, mesh) * (2 * array.slots + 4 * array.itemsize)
        for array in work.arrays
        if array.trained
    )
    return moved / (MEMORY_SHARE * device.memory_gbs * 1e9)


def collective_seconds(
    gathered_bytes: float, axes: tuple[str, ...], mesh: Sizes, device: Device
) -> float:
    """Seconds of an all-gather to `gathered_bytes` on each device, or of the matching
    reduce-scatter.

    Within a host as long as the whole array takes through a device's links. Beyond it, what comes
    from other hosts goes through the network of all members that a host has, at the same time.
    """
    members = count_ways(axes, mesh)
    order = list(mesh.shape)
    inner = math.prod(mesh.shape[axis] for axis in order[order.index(axes[-1]) + 1 :])
    local_members = max(1, min(members, device.host // inner))
    links = gathered_bytes / (LINK_SHARE * device.link_gbs * 1e9)
    if local_members == members:
        return links
    outside = (
        gathered_bytes
        * (1 - local_members / members)
        / (local_members * NETWORK_SHARE * device.network_gbs * 1e9)
    )
    return max(outside, links if local_members > 1 else 0.0)


def local_entries(array: ParameterArray, mesh: Sizes) -> float:
    """Entries of a parameter on one device."""
    cut = split_axes(array.axes, array.shape, mesh)
    return math.prod(array.shape) / math.prod(count_ways(axes, mesh) for axes in cut)


def gathered_bytes(array: ParameterArray, mesh: Sizes) -> tuple[float, tuple[str, ...]]:
    """(bytes of a parameter once it is gathered along what only storage is cut along, over which
    axes that is)."""
    cut = split_axes(array.axes, array.shape, mesh)
    stored = [axes for name, axes in zip(array.axes, cut, strict=True) if is_storage(name)]
    axes = tuple(axis for axes_of_dim in stored for axis in axes_of_dim)
    order = list(mesh.shape)
    axes = tuple(sorted(axes, key=order.index))
    return local_entries(array, mesh) * count_ways(axes, mesh) * array.travels, axes


def is_storage(name: str | None) -> bool:
    return name in ("embed", "expert_embed")


def memory(work: StepWork, mesh: Sizes, rows: StepRows, buffer: float) -> dict[str, float]:
    """GiB of one device, at the end of the backward pass."""
    weights = sum(local_entries(stored, mesh) * stored.itemsize for stored in work.arrays)
    trained = [stored for stored in work.arrays if stored.trained]
    grads = sum(local_entries(stored, mesh) * stored.itemsize for stored in trained)
    slots = sum(local_entries(stored, mesh) * stored.slots for stored in trained)
    tokens = rows.rows * rows.tokens / mesh.shape["context"]
    cut = mesh.shape["tensor"]
    outputs, mixed = 2.0 * work.outputs / cut, 2.0 * work.mixed / cut
    states = 2.0 * work.layers * work.hidden / cut
    # What a layer's last matrix gives is not kept, but the next layer's input is: as wide, mostly.
    saved = {
        "none": 2.0 * outputs,
        "elementwise": outputs + mixed,
        "dots": outputs,
        "save_attention": states + mixed,
        "full": states,
        "offload": 0.0,
    }[work.remat]
    one_layer = 0.0 if work.remat == "none" else LAYER_FACTOR * outputs / work.layers
    gathered = 0.0
    for array in work.arrays:
        gathered_size, axes = gathered_bytes(array, mesh)
        if axes:
            gathered = max(gathered, gathered_size / stacked(array))
    # Keys and values of whole rows, and their gradients: about four hidden states.
    keys = 0.0 if mesh.shape["context"] == 1 else 8.0 * rows.rows * rows.tokens * work.hidden / cut
    parts = {
        "weights": weights,
        "gradients": grads if rows.microsteps == 1 else 2 * grads,
        "optimizer": slots,
        "kept for the backward pass": tokens * saved,
        "of one layer": tokens * one_layer * (buffer if work.num_experts > 1 else 1.0),
        "gathered": gathered + keys,
    }
    return {name: size / GIB for name, size in parts.items() if size}


def stacked(array: ParameterArray) -> int:
    return array.shape[0] if array.axes[:1] == ("layers",) else 1
