"""Estimates of a step's time and memory for `--dry-run`, on these devices or on others."""

import math
from collections.abc import Collection
from typing import Any

import jax

from jaxtrain.config import Config
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.weights import abstract_params
from jaxtrain.data.preview import print_pairs
from jaxtrain.distributed.mesh import resolve_sizes
from jaxtrain.models import build
from jaxtrain.models.draft import BaseDraftConfig
from jaxtrain.runs.console import SafeConsole
from jaxtrain.runs.estimate.devices import DEVICES, Device, find_device, read_devices
from jaxtrain.runs.estimate.estimate import Estimate, Sizes, estimate
from jaxtrain.runs.estimate.search import ROOM, MeshChoice, SearchTarget, find_meshes, name_mesh
from jaxtrain.runs.estimate.work import StepWork, read_work

SHOWN = 3
"""Meshes that are named."""
SHORT = 0.02
"""Seconds of a step below which what the estimate leaves out is as long as what it counts."""


def on_one_device(config: Config) -> Config:
    """The config on a mesh that is here whatever it says: shapes are the same on any."""
    parallel = config.parallel.model_copy(
        update={axis: -1 if axis == "data" else 1 for axis in config.parallel.axes()}
    )
    return config.model_copy(update={"parallel": parallel})


def show_estimate(
    config: Config,
    bundle: ModelBundle,
    trained: dict,
    tokens: int,
    slots: float,
    console: SafeConsole,
    on: str | None,
) -> None:
    """Print what a step would take. trained: shapes of what is trained. tokens: of a row. slots:
    bytes of optimizer state an entry. on: "h200:64"; None: the devices that are here."""
    if on is not None:
        device, count = read_devices(on)
    else:
        kind, count = jax.devices()[0].device_kind, bundle.mesh.size
        device = find_device(kind)
        if device is None:
            console.print(
                f"no estimate of a step's time: {kind!r} is not described here; --on DEVICE:COUNT"
                f" estimates for others ({', '.join(DEVICES)})",
                markup=False,
            )
            return
    reason = None
    if isinstance(bundle.architecture, BaseDraftConfig):
        reason = "drafts are not described by it"
    elif (dtype := bundle.options["dtype"]) != "bfloat16":
        reason = f"it is for products in bfloat16, and model.compute_dtype is {dtype}"
    if reason is not None:
        console.print(f"no estimate of a step's time: {reason}", markup=False)
        return
    work = read_bundle_work(bundle, trained, slots)
    target = SearchTarget(
        tokens,
        config.data.micro_batch_size,
        config.data.global_batch_size,
        config.optim.gradient_accumulation_steps,
        config.parallel.expert_buffer,
    )
    mesh = Sizes(resolve_sizes(config.parallel.axes(), count))
    show_one(work, target, mesh, device, console)
    show_meshes(find_meshes(work, target, device, count), console)


def read_bundle_work(bundle: ModelBundle, trained: Collection[str], slots: float) -> StepWork:
    """Return the work of a step on a bundle's model. trained: paths of what is trained; slots: as
    for `show_estimate`."""
    shapes, rebuild = abstract_params(bundle)
    return read_work(
        build.abstract(bundle.architecture),
        rebuild(shapes),
        shapes,
        trained,
        remat=bundle.options["remat"],
        dtype=bundle.options["dtype"],
        slots=slots,
    )


def bytes_per_device(tree: Any) -> int:
    """Bytes that one device holds of a tree of placed shapes."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def show_one(
    work: StepWork, target: SearchTarget, mesh: Sizes, device: Device, console: SafeConsole
) -> None:
    """The config's own mesh."""
    rows = target.rows(mesh)
    named = name_mesh(mesh.shape)
    if rows is None:
        console.print(
            f"{named} does not divide the batch: data.global_batch_size {target.global_batch},"
            f" data.micro_batch_size {target.micro_batch}, rows of {target.tokens} tokens",
            markup=False,
        )
        return
    step_estimate = estimate(work, mesh, rows, device, buffer=target.buffer)
    fits = step_estimate.memory <= ROOM * device.memory_gib
    pairs = [
        ("mesh", named),
        ("optimizer step, s", f"{step_estimate.seconds:.3g}"),
        ("tokens/s per device", f"{step_estimate.tokens_per_second:,.0f}"),
        ("MFU", f"{step_estimate.mfu:.0%}"),
        ("of the time", describe_parts(step_estimate)),
        ("memory, GiB per device", f"{step_estimate.memory:.1f} of {device.memory_gib:g}"),
        ("", "" if fits else "this does not fit"),
        ("", "so short a step waits for launches" if step_estimate.seconds < SHORT else ""),
    ]
    print_pairs(f"estimate for {mesh.devices} x {device.name} (docs/scale.md)", pairs, console)
    console.print(
        "counted is the trained model's step: no rollouts, no other models nor their copies from"
        " the host"
    )


def describe_parts(step_estimate: Estimate) -> str:
    """List the parts that take at least a twentieth of the time."""
    parts = sorted(step_estimate.parts.items(), key=lambda entry: -entry[1])
    shares = [(name, seconds / step_estimate.seconds) for name, seconds in parts]
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.05)


def show_meshes(choices: list[MeshChoice], console: SafeConsole) -> None:
    """The fastest of all meshes."""
    if not choices:
        console.print(
            "no mesh of so many devices divides the batch and fits into their memory: another"
            " number of them, model.remat = 'full', shorter rows or an adapter may"
            " (docs/how_to/fit_memory.md)"
        )
        return
    console.print("fastest meshes by this estimate:")
    for choice in choices[:SHOWN]:
        step_estimate = choice.estimate
        console.print(
            f"  {name_mesh(choice.mesh):<32} {step_estimate.tokens_per_second:>9,.0f} tokens/s"
            f" per device,"
            f" {step_estimate.memory:.1f} GiB",
            markup=False,
            highlight=False,
        )
