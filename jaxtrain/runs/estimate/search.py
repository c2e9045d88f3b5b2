"""The meshes that so many devices can form, and how fast each would be."""

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxtrain.distributed.mesh import AXES
from jaxtrain.distributed.sharding import count_ways, mesh_axes
from jaxtrain.runs.estimate.devices import Device
from jaxtrain.runs.estimate.estimate import Estimate, Sizes, StepRows, estimate
from jaxtrain.runs.estimate.work import StepWork

ROOM = 0.92
"""Of a device's memory: what is left for its runtime and for what lies between arrays."""
ALIKE = 0.01
"""Rates that differ by less are alike; of these the mesh of fewer axes is named."""


class SearchTarget(NamedTuple):
    """Quantities held constant while meshes change."""

    tokens: int
    """Of a row."""
    micro_batch: int
    """data.micro_batch_size: rows of a forward pass for each device that has its own."""
    global_batch: int | None
    """data.global_batch_size: rows of an optimizer step."""
    accumulation: int = 1
    """optim.gradient_accumulation_steps, where there is no global batch."""
    buffer: float = 1.25

    def rows(self, mesh: Sizes) -> StepRows | None:
        """None: this mesh does not divide the batch or its rows."""
        shards = count_ways(mesh_axes("rows", mesh), mesh)
        if self.tokens % mesh.shape["context"]:
            return None
        if self.global_batch is None:
            return StepRows(self.tokens, self.micro_batch, self.accumulation)
        microsteps, rest = divmod(self.global_batch, self.micro_batch * shards)
        return None if rest else StepRows(self.tokens, self.micro_batch, microsteps)


class MeshChoice(NamedTuple):
    """A mesh and what it would do."""

    mesh: Mapping[str, int]
    estimate: Estimate


def name_mesh(mesh: Mapping[str, int]) -> str:
    """ "fsdp=8 tensor=2"."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "one device"


def find_meshes(
    work: StepWork, target: SearchTarget, device: Device, count: int
) -> list[MeshChoice]:
    """Return the meshes that fit into the devices' memory, fastest first; of equivalent meshes, the
    simplest."""
    fitting = []
    for sizes in factorize(count, len(AXES)):
        mesh = Sizes(dict(zip(AXES, sizes, strict=True)))
        if not divides(work, mesh) or (rows := target.rows(mesh)) is None:
            continue
        candidate = estimate(work, mesh, rows, device, buffer=target.buffer)
        if candidate.memory <= ROOM * device.memory_gib:
            fitting.append(MeshChoice(mesh.shape, candidate))
    fitting.sort(key=lambda candidate: -candidate.estimate.tokens_per_second)
    distinct: list[MeshChoice] = []
    for _, group in itertools.groupby(fitting, key=AlikeRates()):
        distinct.append(
            min(group, key=lambda candidate: sum(size > 1 for size in candidate.mesh.values()))
        )
    return distinct


class AlikeRates:
    """Groups descending rates that are within ALIKE of the first of their group."""

    def __init__(self) -> None:
        self.first = float("inf")

    def __call__(self, choice: MeshChoice) -> float:
        rate = choice.estimate.tokens_per_second
        if rate < self.first * (1 - ALIKE):
            self.first = rate
        return self.first


def divides(work: StepWork, mesh: Sizes) -> bool:
    """Return whether each axis divides what it shards: anything else would be replicated on its
    devices, or computed twice."""
    shape = mesh.shape
    return (
        work.heads % shape["tensor"] == 0
        and work.num_experts % shape["expert"] == 0
        and (work.num_experts > 1 or shape["expert"] == 1)
        and work.hidden % (shape["fsdp"] * shape["context"] * shape["expert"]) == 0
    )


def factorize(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write `count` as an ordered product of `axes` numbers."""
    if axes == 1:
        yield (count,)
        return
    for size in range(1, count + 1):
        if count % size == 0:
            yield from ((size, *rest) for rest in factorize(count // size, axes - 1))
