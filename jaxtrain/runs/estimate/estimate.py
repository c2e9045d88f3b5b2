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
    """What an optimizer step trains on."""

    tokens: int
    """Of a row, all of one document."""
    rows: int
    """Of a forward pass, on each device that has rows of its own."""
    microsteps: int = 1


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Of one optimizer step."""

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
    """Of a step on this mesh. buffer: parallel.expert_buffer."""
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
    """Of weights: forward, again where that is not kept, gradients of inputs and of weights."""
    again = 0.0 if work.remat in ("none", "elementwise", "dots") else 1.0
    dense = 2.0 * work.dense + again * work.dense_again + work.dense_trained
    experts = (2.0 + again) * work.experts + work.experts_trained
    share = DENSE_SHARE * work.hidden / (work.hidden + DENSE_HALF)
    flops = dense / share + experts / EXPERT_SHARE
    return 2.0 * tokens * flops / device.tflops / 1e12


def mixing_seconds(
    work: StepWork, rows: StepRows, shards: int, mesh: Sizes, device: Device
) -> float:
    again = 1.0 if work.remat == "full" else 0.0
    flops = work.mixing(rows.tokens) * rows.rows * shards / mesh.devices
    return (1.0 + BACKWARD + again) * flops / (MIXING_SHARE * device.tflops * 1e12)


def travel_seconds(work: StepWork, mesh: Sizes, rows: StepRows, device: Device) -> dict[str, float]:
    """Of one microstep."""
    found = {"weights": 0.0, "tensor": 0.0, "context": 0.0, "experts' tokens": 0.0}
    for array in work.arrays:
        whole, axes = gathered_bytes(array, mesh)
        if axes:
            # Forward and backward, and the gradient back to its owners.
            times = 3 if array.trained else 2
            found["weights"] += times * collective_seconds(whole, axes, mesh, device)
    # Bytes of a hidden state of this device's rows, before the tensor axis cuts it.
    own = rows.rows * rows.tokens / mesh.shape["context"] * work.hidden * 2.0
    full = 0 if work.remat in ("none", "elementwise", "dots") else 1
    if mesh.shape["tensor"] > 1:
        # Two gathers and two scatters of a layer forward, as many back; what is computed again.
        one = collective_seconds(own, ("tensor",), mesh, device)
        found["tensor"] = work.layers * (8 + 3 * full) * one
    if mesh.shape["context"] > 1:
        # Keys and values: about as wide as the state with few key heads; gathered twice, summed.
        whole = own * mesh.shape["context"] / mesh.shape["tensor"]
        one = collective_seconds(whole, ("context",), mesh, device)
        found["context"] = work.layers * (3 + full) * one
    if mesh.shape["expert"] > 1:
        whole = own / mesh.shape["tensor"] * mesh.shape["expert"]
        one = collective_seconds(whole, ("expert",), mesh, device)
        found["experts' tokens"] = work.expert_layers * 5 * one
    return found


def unpack_seconds(work: StepWork, device: Device) -> float:
    """Of packed weights, wherever they are multiplied: forward, again, backward."""
    moved = sum(
        math.prod(one.shape) * (one.itemsize + one.unpacked) for one in work.arrays if one.unpacked
    )
    return 3.0 * moved / (MEMORY_SHARE * device.memory_gbs * 1e9)


def replica_seconds(work: StepWork, mesh: Sizes, device: Device) -> float:
    """Gradients summed over full copies, once a step: there and back."""
    if mesh.shape["data"] == 1:
        return 0.0
    own = sum(local_entries(one, mesh) * one.travels for one in work.arrays if one.trained)
    return 2.0 * collective_seconds(own, ("data",), mesh, device)


def optimizer_seconds(work: StepWork, mesh: Sizes, device: Device) -> float:
    """Weights and moments read and written, gradients read twice, for clipping first."""
    moved = sum(
        local_entries(one, mesh) * (2 * one.slots + 4 * one.itemsize)
        for one in work.arrays
        if one.trained
    )
    return moved / (MEMORY_SHARE * device.memory_gbs * 1e9)


def collective_seconds(whole: float, axes: tuple[str, ...], mesh: Sizes, device: Device) -> float:
    """Of an all-gather to `whole` bytes on each device, or a reduce-scatter of as many.

    Within a host as long as the whole array takes through a device's links. Beyond it, what comes
    from other hosts goes through the network of all members that a host has, at the same time.
    """
    members = count_ways(axes, mesh)
    order = list(mesh.shape)
    inner = math.prod(mesh.shape[axis] for axis in order[order.index(axes[-1]) + 1 :])
    here = max(1, min(members, device.host // inner))
    links = whole / (LINK_SHARE * device.link_gbs * 1e9)
    if here == members:
        return links
    outside = whole * (1 - here / members) / (here * NETWORK_SHARE * device.network_gbs * 1e9)
    return max(outside, links if here > 1 else 0.0)


def local_entries(array: ParameterArray, mesh: Sizes) -> float:
    """Entries of a parameter on one device."""
    cut = split_axes(array.axes, array.shape, mesh)
    return math.prod(array.shape) / math.prod(count_ways(axes, mesh) for axes in cut)


def gathered_bytes(array: ParameterArray, mesh: Sizes) -> tuple[float, tuple[str, ...]]:
    """(bytes of a parameter once it is gathered along what only storage is cut along, over which
    axes that is)."""
    cut = split_axes(array.axes, array.shape, mesh)
    stored = [axes for name, axes in zip(array.axes, cut, strict=True) if is_storage(name)]
    axes = tuple(axis for one in stored for axis in one)
    order = list(mesh.shape)
    axes = tuple(sorted(axes, key=order.index))
    return local_entries(array, mesh) * count_ways(axes, mesh) * array.travels, axes


def is_storage(name: str | None) -> bool:
    return name in ("embed", "expert_embed")


def memory(work: StepWork, mesh: Sizes, rows: StepRows, buffer: float) -> dict[str, float]:
    """GiB of one device, at the end of the backward pass."""
    weights = sum(local_entries(one, mesh) * one.itemsize for one in work.arrays)
    trained = [one for one in work.arrays if one.trained]
    grads = sum(local_entries(one, mesh) * one.itemsize for one in trained)
    slots = sum(local_entries(one, mesh) * one.slots for one in trained)
    tokens = rows.rows * rows.tokens / mesh.shape["context"]
    cut = mesh.shape["tensor"]
    outputs, mixed = 2.0 * work.outputs / cut, 2.0 * work.mixed / cut
    states = 2.0 * work.layers * work.hidden / cut
    # What a layer's last matrix gives is not kept, but the next layer's input is: as wide, mostly.
    kept = {
        "none": 2.0 * outputs,
        "elementwise": outputs + mixed,
        "dots": outputs,
        "save_attention": states + mixed,
        "full": states,
    }[work.remat]
    one_layer = 0.0 if work.remat == "none" else LAYER_FACTOR * outputs / work.layers
    gathered = 0.0
    for array in work.arrays:
        whole, axes = gathered_bytes(array, mesh)
        if axes:
            gathered = max(gathered, whole / stacked(array))
    # Keys and values of whole rows, and their gradients: about four hidden states.
    keys = 0.0 if mesh.shape["context"] == 1 else 8.0 * rows.rows * rows.tokens * work.hidden / cut
    found = {
        "weights": weights,
        "gradients": grads if rows.microsteps == 1 else 2 * grads,
        "optimizer": slots,
        "kept for the backward pass": tokens * kept,
        "of one layer": tokens * one_layer * (buffer if work.num_experts > 1 else 1.0),
        "gathered": gathered + keys,
    }
    return {name: size / GIB for name, size in found.items() if size}


def stacked(array: ParameterArray) -> int:
    return array.shape[0] if array.axes[:1] == ("layers",) else 1
