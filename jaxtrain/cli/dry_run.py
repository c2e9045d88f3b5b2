"""`--dry-run`: everything but the memory. Shapes are traced, nothing is allocated or compiled."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.adapters.spec import find_linears
from jaxtrain.adapters.storage import count_weights, find_stored
from jaxtrain.cli.estimate import bytes_per_device, on_one_device, show_estimate
from jaxtrain.config import Config
from jaxtrain.core.auxiliary import AuxiliaryModel
from jaxtrain.core.bundle import ModelBundle, count_microsteps
from jaxtrain.core.optimizer import build_schedule
from jaxtrain.core.roles import Roles, open_optimizer
from jaxtrain.core.session import make_step_noise, open_session
from jaxtrain.core.step import abstract_state, make_step
from jaxtrain.core.task import Task, abstract_batch
from jaxtrain.data.preview import print_pairs
from jaxtrain.distributed.compile_cache import CompileCounter
from jaxtrain.distributed.feed import row_shards
from jaxtrain.distributed.mesh import HOST_MEMORY
from jaxtrain.distributed.sharding import count_ways, mesh_axes
from jaxtrain.errors import UserError
from jaxtrain.generation.evaluation.problem_sets import read_problems
from jaxtrain.generation.local.frozen_folder import frozen_shapes
from jaxtrain.methods.registry import make_task
from jaxtrain.models import loading, saving
from jaxtrain.models.parameters import Shapes
from jaxtrain.runs.console import SafeConsole
from jaxtrain.runs.estimate.devices import read_devices
from jaxtrain.runs.observers.dispatch import find_observer, list_observers
from jaxtrain.runs.sinks import find_sink

GIB = 2.0**30


def dry_run(config: Config, on: str | None = None, compiles: bool = False) -> None:
    """Check data, model and shapes; print parameters, memory per device, packing, a sample, what a
    step would take. on: on which devices, such as "h200:64", rather than on those here. compiles:
    also compile the step's programs into the cache on disk."""
    console = SafeConsole()
    if on is not None:
        read_devices(on)
    for name in config.log.sinks:
        find_sink(name)
    for key, table in list_observers(config):
        find_observer(key, table)
    task = make_task(config if on is None else on_one_device(config))
    for index, eval_set in enumerate(config.eval.sets):
        count = len(read_problems(index, eval_set))
        console.print(
            f"{eval_set.source}: {count:,} problems, {eval_set.k} answers each", markup=False
        )
    roles = [*task.roles.values(), *(eval_set.role for eval_set in task.auxiliary.values())]
    for parts in {id(role.bundle): role.bundle for role in roles}.values():
        if parts.folder is not None:
            loading.check_folder(parts.folder, parts.architecture)
            carried = saving.count_carried(parts.folder, parts.architecture)
            if carried:
                names = ", ".join(f"{name}*" for name in parts.architecture.carries)
                console.print(
                    f"{carried:,} parameters ({names}) are copied into exports, not trained",
                    markup=False,
                )
    task.data.describe(console)
    with jax.set_mesh(task.mesh):
        show_memory(config, task, console, on)
    if compiles:
        fill_cache(config, task, console)
    else:
        console.print("dry run: nothing was allocated, compiled, sampled or written")


def fill_cache(config: Config, task: Task, console: SafeConsole) -> None:
    """Compile the programs of the run's steps, so that the run reads them from the cache on disk;
    UserError where a run has no such cache or would start servers, or where they need its data."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    if not folder:
        raise UserError("--compile: there is no cache on disk; set run.compile_cache to true")
    if not task.compiles_ahead or task.data.fields.images is not None:
        raise UserError(
            f"--compile: shapes of the steps of task.kind {config.task.kind!r} depend on its data;"
            " their programs are compiled, and kept on disk, as the run starts"
        )
    if config.rollout.engine != "local":
        raise UserError(
            f"--compile would start the servers of rollout.engine {config.rollout.engine!r}:"
            ' use rollout.engine="local" here, which has the same steps'
        )
    with jax.set_mesh(task.mesh), CompileCounter() as compiled:
        session = open_session(config, task, lambda line: console.print(line, markup=False))
        try:
            session.compile_ahead(compiled, lambda line: console.print(line, markup=False))
            session.wait_for_programs()
            if session.ahead_error is not None:  # a run would fail, too, at its first step
                raise session.ahead_error
        finally:
            session.rounds.close()
    console.print(f"{compiled.describe()}\nkept in {folder}", markup=False, highlight=False)


def show_memory(config: Config, task: Task, console: SafeConsole, on: str | None) -> None:
    """Trace one step on shapes and print what its arrays take on each device, and its time."""
    roles = Roles(task.roles)
    trained, frozen, parts = roles.trained_shapes, roles.frozen_shapes, roles.bundle
    params = {**roles.params(roles.trained, {**frozen, **roles.copy_shapes}), **trained}
    beside = {path: v for path, v in {**frozen, **roles.copy_shapes}.items() if "/" in path}
    on_host = [v for v in beside.values() if v.sharding.memory_kind == HOST_MEMORY]
    optimizer, build = open_optimizer(config.optim, build_schedule(config.optim, 100), roles)
    state = abstract_state(trained, optimizer, roles.copy_shapes, config.optim.offload)
    noise = make_step_noise(roles, config.model.neftune_alpha, config.run.seed)
    step = make_step(
        build, task.loss, task.coef, optimizer, config.optim.max_grad_norm, noise=noise
    )
    microsteps = count_microsteps(config, parts.mesh) if on is None else 1
    rows, length = (
        config.data.micro_batch_size * row_shards(parts.mesh),
        task.prepared_length(task.data.row_tokens),
    )
    jax.eval_shape(step.single, state, abstract_batch(task, (1, rows, length)), frozen)

    weights, slots = bytes_per_device(params), bytes_per_device(state.opt_state)
    away, slots = (slots, 0) if config.optim.offload else (0, slots)
    grads = bytes_per_device(trained)
    mesh = {name: size for name, size in parts.mesh.shape.items() if size > 1} or "one device"
    total = sum(count_weights(path, value) for path, value in params.items())
    learners = [AuxiliaryModel(auxiliary, parts).state for auxiliary in task.auxiliary.values()]
    host_bytes = bytes_per_device(on_host)
    auxiliary_bytes = bytes_per_device(beside) - host_bytes + bytes_per_device(learners)
    frozen_ones = bytes_per_device(list(frozen_shapes(config, parts).values()))
    elsewhere = " that samples" if config.rollout.devices else ""
    frozen_bytes = 0 if elsewhere else frozen_ones
    low = {path: value for path, value in trained.items() if ".experts." in path}
    low = low if parts.adapter is not None else {}
    # Gradients and the optimizer's state of a weight are about alike for all that is trained.
    share = bytes_per_device(low) / max(grads, 1) * (2 * grads + slots)
    pairs = [
        ("parameters", f"{total:,}"),
        ("of these trained", f"{sum(value.size for value in trained.values()):,}"),
        ("in adapters of experts", f"{sum(v.size for v in low.values()):,}" if low else ""),
        ("mesh", str(mesh)),
        ("rows x tokens of an optimizer step", f"{microsteps * rows} x {length}"),
        ("weights, GiB per device", f"{weights / GIB:.3f}"),
        ("gradients, GiB per device", f"{grads / GIB:.3f}"),
        ("optimizer state, GiB per device", f"{slots / GIB:.3f}" if not away else ""),
        ("optimizer state, GiB of host memory per device", f"{away / GIB:.3f}" if away else ""),
        ("other models, GiB per device", f"{auxiliary_bytes / GIB:.3f}" if auxiliary_bytes else ""),
        (
            "other models, GiB of host memory per device",
            f"{host_bytes / GIB:.3f}" if host_bytes else "",
        ),
        (
            f"frozen policies, GiB per device{elsewhere}",
            f"{frozen_ones / GIB:.3f}" if frozen_ones else "",
        ),
        (
            "sum, before activations",
            f"{(weights + grads + slots + auxiliary_bytes + frozen_bytes) / GIB:.3f}",
        ),
        ("adapters of experts in that sum", f"{share / GIB:.3f}" if low else ""),
        ("experts of a layer unpacked, beside it", unpacked(parts, frozen)),
    ]
    print_pairs("model", pairs, console)
    if 2 * share > weights - bytes_per_device(trained):
        console.print(
            "adapters of experts, their gradients and their optimizer state take more than half of"
            " what the frozen weights do: a smaller rank (adapter.rank_pattern = { mlp = 4 }),"
            ' adapter.target = "attention" or adapter.dtype = "bfloat16" take less',
            markup=False,
            highlight=False,
        )
    if parts.mesh.size > 1:
        for path, value in params.items():
            console.print(f"  {path:<50} {value.shape!s:<22} {value.sharding.spec}", markup=False)
    entries = sum(value.size for value in trained.values())
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.opt_state))
    show_estimate(config, parts, trained, length, held / max(entries, 1), console, on)


def unpacked(bundle: ModelBundle, frozen: Shapes) -> str:
    """GiB per device of the packed experts of one layer as they are where they multiply; "" where
    there are none."""
    kind = "none" if bundle.adapter is None else bundle.adapter.quantize
    linears = find_linears(bundle.architecture) if kind != "none" else {}
    layers: dict[str, int] = collections.Counter()
    for path in find_stored(frozen, kind) if linears else ():
        owner, _, name = path.removesuffix(".kernel").rpartition(".")
        if owner.endswith(".experts") and f"{owner}.{name}" in linears:
            layers[owner] += math.prod(linears[f"{owner}.{name}"].shape[1:])
    ways = count_ways(
        [*mesh_axes("experts", bundle.mesh), *mesh_axes("mlp", bundle.mesh)], bundle.mesh
    )
    size = np.dtype(jnp.dtype(bundle.options["dtype"])).itemsize
    return f"{max(layers.values()) * size / ways / GIB:.3f}" if layers else ""
