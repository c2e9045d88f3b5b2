"""`--dry-run`: everything but the memory. Shapes are traced, nothing is allocated or compiled."""

import math

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jaxtrain.adapters.attach import split_trained
from jaxtrain.adapters.storage import count_weights
from jaxtrain.batch import Batch
from jaxtrain.config import Config, RLTask
from jaxtrain.core.assemble import Parts, abstract_params, assemble
from jaxtrain.core.optim import build_optimizer, build_schedule
from jaxtrain.core.step import abstract_state, make_step
from jaxtrain.data.pipeline import probe_dataset, row_tokens
from jaxtrain.data.preview import show_sample
from jaxtrain.data.sample import Sample
from jaxtrain.data.sources import open_rows
from jaxtrain.data.tree import Tree
from jaxtrain.data.workload import describe_tree
from jaxtrain.parallel.feed import row_shards
from jaxtrain.rollout.labels import STREAMS
from jaxtrain.rollout.problem_sets import read_problems
from jaxtrain.tasks import build_task
from jaxtrain.train.session import count_microsteps
from jaxtrain.verbs.preprocess import show_packing

GIB = 2.0**30


def dry_run(config: Config) -> None:
    """Check data, model and shapes; print parameters, memory per device, packing and a sample."""
    console = Console()
    parts = assemble(config)
    for index, one in enumerate(config.eval.sets):
        count = len(read_problems(index, one))
        console.print(f"{one.path}: {count:,} problems, {one.k} answers each", markup=False)
    if isinstance(config.task, RLTask):
        for dataset in config.data.datasets:
            console.print(f"{dataset.path}: {len(open_rows(dataset)):,} prompts", markup=False)
        with jax.set_mesh(parts.mesh):
            show_memory(config, parts, console)
        console.print("dry run: nothing was allocated, compiled, sampled or written")
        return
    first = None
    for dataset in [*config.data.datasets, *config.data.eval_datasets]:
        found = probe_dataset(dataset, config.data, parts.tokenizer, config.task)
        console.print(str(found), markup=False)
        first = first or next(
            iter(getattr(found, "trees", ()) or getattr(found, "samples", ())), None
        )
    with jax.set_mesh(parts.mesh):
        show_memory(config, parts, console)
    show_packing(config, parts.tokenizer, console, num_batches=4)
    if isinstance(first, Tree):
        console.print(describe_tree(first, parts.tokenizer.decode), markup=False, soft_wrap=True)
    elif isinstance(first, Sample):
        show_sample(first, parts.tokenizer, console)
    console.print("dry run: nothing was allocated, compiled or written")


def show_memory(config: Config, parts: Parts, console: Console) -> None:
    """Trace one step on shapes and print what its arrays take on each device."""
    params, rebuild = abstract_params(parts)
    trained, frozen = split_trained(params, parts.adapter)
    optimizer = build_optimizer(config.optim, build_schedule(config.optim, 100), trained)
    state = abstract_state(trained, optimizer)
    task = build_task(config)
    step = make_step(rebuild, task.loss, task.coef, optimizer, config.optim.max_grad_norm)
    microsteps = count_microsteps(config, parts.mesh)
    batch = abstract_batch(config, parts, microsteps, task.coef)
    jax.eval_shape(step, state, batch, frozen)

    weights, slots = bytes_per_device(params), bytes_per_device(state.opt_state)
    grads = bytes_per_device(trained)
    mesh = {name: size for name, size in parts.mesh.shape.items() if size > 1} or "one device"
    total = sum(count_weights(path, value) for path, value in params.items())
    rows = config.data.micro_batch_size * row_shards(parts.mesh)
    length = row_tokens(config.data, config.task)
    table = Table(show_header=False, title="model", title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for name, value in [
        ("parameters", f"{total:,}"),
        ("of these trained", f"{sum(value.size for value in trained.values()):,}"),
        ("mesh", str(mesh)),
        ("rows x tokens of an optimizer step", f"{microsteps * rows} x {length}"),
        ("weights, GiB per device", f"{weights / GIB:.3f}"),
        ("gradients, GiB per device", f"{grads / GIB:.3f}"),
        ("optimizer state, GiB per device", f"{slots / GIB:.3f}"),
        ("sum, before activations", f"{(weights + grads + slots) / GIB:.3f}"),
    ]:
        table.add_row(name, value)
    console.print(table)
    if parts.mesh.size > 1:
        for path, value in params.items():
            console.print(f"  {path:<50} {value.shape!s:<22} {value.sharding.spec}", markup=False)


def abstract_batch(config: Config, parts: Parts, microsteps: int, components):
    """Shapes of one optimizer step's batch."""
    rows = config.data.micro_batch_size * row_shards(parts.mesh)
    shape = (microsteps, rows, row_tokens(config.data, config.task))
    ints = jax.ShapeDtypeStruct(shape, jnp.int32)
    floats = jax.ShapeDtypeStruct(shape, jnp.float32)
    weights = {name: floats for name in components}
    batch = Batch(tokens=ints, positions=ints, prev=ints, until=ints, weights=weights)
    if isinstance(config.task, RLTask):
        batch = batch._replace(owner=ints, streams={name: floats for name in STREAMS})
    return batch


def bytes_per_device(tree) -> int:
    """Bytes that one device holds of a tree of placed shapes."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
