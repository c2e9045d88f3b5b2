"""Transfer of arrays between meshes of one process, device to device.

`jax.device_put` goes through the host if both sides are sharded differently. Here each target
device receives the pieces that it needs from the devices that hold them, and joins them.
"""

import itertools
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

Span = tuple[int, int]


def move(x: jax.Array, target: Sharding, shape: tuple[int, ...] | None = None) -> jax.Array:
    """Return `x` with sharding `target` on another mesh of this process, asynchronously.

    shape: the part to move, from the first element on; None: all.
    """
    shape = x.shape if shape is None else shape
    pieces: dict[tuple[Span, ...], Any] = {
        _spans(shard.index, x.shape): _free(shard.data, shard.device)
        for shard in x.addressable_shards
    }
    shards = []
    for device, index in target.addressable_devices_indices_map(shape).items():
        assert index is not None, "every device of the place holds a part"
        shards.append(_gather(_spans(index, shape), pieces, device))
    return jax.make_array_from_single_device_arrays(shape, target, shards)


def _gather(
    target_spans: tuple[Span, ...], pieces: dict[tuple[Span, ...], Any], device: Any
) -> Any:
    """Return the part `target_spans` of an array, of which `pieces` are all parts, on a device."""
    cuts = [_cuts(axis, target_spans, pieces) for axis in range(len(target_spans))]

    def join(axis: int, spans: tuple[Span, ...]) -> Any:
        if axis == len(target_spans):
            return jax.device_put(_cut(spans, pieces), device)
        parts = [join(axis + 1, (*spans, span)) for span in itertools.pairwise(cuts[axis])]
        if len(parts) == 1:
            return parts[0]
        with _alone(device):
            return jnp.concatenate(parts, axis)

    return join(0, ())


def _cuts(
    axis: int, target_spans: tuple[Span, ...], pieces: dict[tuple[Span, ...], Any]
) -> list[int]:
    """Return the positions where the part is cut along an axis, including its ends."""
    start, stop = target_spans[axis]
    ends = {end for spans in pieces for end in spans[axis] if start < end < stop}
    return sorted({start, stop, *ends})


def _cut(target_spans: tuple[Span, ...], pieces: dict[tuple[Span, ...], Any]) -> Any:
    """Return a part that lies within one of the pieces, on the piece's device."""
    for spans, piece in pieces.items():
        if all(a <= c and d <= b for (a, b), (c, d) in zip(spans, target_spans, strict=True)):
            inside = [
                slice(c - a, d - a) for (a, _), (c, d) in zip(spans, target_spans, strict=True)
            ]
            if spans == target_spans:
                return piece
            with _alone(piece.device):
                return piece[tuple(inside)]
    raise AssertionError("the pieces do not cover the array")


def _free(piece: jax.Array, device: Any) -> jax.Array:
    """Return a shard's data without its mesh: `device_put` would keep a mesh of one device."""
    sharding = SingleDeviceSharding(device)
    return jax.make_array_from_single_device_arrays(piece.shape, sharding, [piece])


def _alone(device: Any) -> AbstractContextManager[Any]:
    """Set a mesh of one device in place of the current one."""
    return jax.set_mesh(jax.make_mesh((1,), ("x",), devices=[device]))


def _spans(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[Span, ...]:
    ends = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in ends)
