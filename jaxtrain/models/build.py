"""Models with random parameters, or with shapes only.

Parameters are drawn where they live; `mesh=None` means the default device.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.distributed.sharding import shardings
from jaxtrain.models.decoder import Decoder, DecoderOptions
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.families import family

SMALL_MODEL = 2**22
"""Parameters up to which a model is drawn without a program of its own."""


def abstract(
    config: DecoderConfig, part: Callable[..., nnx.Module] | None = None, **options: Any
) -> Any:
    """Return the model with shapes for parameters; allocates nothing. `options` are those of
    DecoderOptions.

    part: builds, from the same arguments, a module with some of the model's parameters under the
    same paths, such as models.draft.TargetEmbeddingAndHead.
    """
    chosen = DecoderOptions(**options)
    if part is not None:
        return nnx.eval_shape(lambda: part(config, chosen, nnx.Rngs(0)))
    return nnx.merge(*_shapes(config, chosen, jax.config.read("jax_enable_x64")))


@functools.lru_cache(maxsize=64)
def _shapes(config: DecoderConfig, options: DecoderOptions, wide: bool) -> tuple[Any, Any]:
    """Return the abstract model, split, from which `abstract` builds one for each caller: a run
    needs it a dozen times, and tracing all layers is slow."""
    return nnx.split(nnx.eval_shape(lambda: family(config).Model(config, options, nnx.Rngs(0))))


def init(config: DecoderConfig, seed: int, mesh: Mesh | None = None, **options: Any) -> Decoder:
    """Draw a random model: normal(0, initializer_range), zero biases, unit norms.

    The numbers depend on the seed alone, not on the mesh.
    """
    chosen, wide = DecoderOptions(**options), jax.config.read("jax_enable_x64")
    graphdef, shapes = _shapes(config, chosen, wide)
    key = jax.random.key(seed)
    if count_elements(shapes) > SMALL_MODEL or (mesh is not None and mesh.is_multi_process):
        return nnx.merge(graphdef, _draw_program(config, chosen, mesh, wide)(key))
    # Drawn on one device, array by array: a program would take longer to compile.
    state = nnx.state(family(config).Model(config, chosen, nnx.Rngs(params=key)))
    placed = None if mesh is None else shardings(shapes, mesh)
    return nnx.merge(graphdef, jax.device_put(state, placed))


@functools.lru_cache(maxsize=64)
def _draw_program(
    config: DecoderConfig, options: DecoderOptions, mesh: Mesh | None, wide: bool
) -> Callable[[jax.Array], nnx.State]:
    """Return the jitted function of `init`, traced and compiled once for all seeds."""

    def draw(key: jax.Array) -> nnx.State:
        return nnx.state(family(config).Model(config, options, nnx.Rngs(params=key)))

    state = _shapes(config, options, wide)[1]
    placed = None if mesh is None else shardings(state, mesh)
    return jax.jit(draw, out_shardings=placed, compiler_options=draw_options())


def draw_options() -> dict[str, Any]:
    """Return XLA's options for programs that draw weights, which run once: on CPUs LLVM's last
    level takes two thirds of the time that such a program compiles, and the bits are the same.
    Empty where jax compiles all programs with fewer optimizations than that."""
    if jax.default_backend() != "cpu" or jax.config.read("jax_disable_most_optimizations"):
        return {}
    return {"xla_backend_optimization_level": 2}


def draw_params(
    config: DecoderConfig,
    seed: int,
    mesh: Mesh | None = None,
    only: Collection[str] | None = None,
    part: Callable[..., nnx.Module] | None = None,
    by_layer: Collection[str] = (),
    **options: Any,
) -> Iterator[tuple[str, Any]]:
    """Yield (path, array) of the parameters that `init` draws, with the same numbers, one at a
    time: for callers that quantize each before the next is drawn.

    only: paths to draw; None: all, or with `part` (see `abstract`) those that it has. by_layer:
    paths that yield an iterator over layers instead of an array, so that no array is ever whole.
    """
    _, state = nnx.split(abstract(config, part, **options))
    param_shardings = {} if mesh is None else dict(nnx.to_flat_state(shardings(state, mesh)))
    chosen, wide = DecoderOptions(**options), jax.config.read("jax_enable_x64")
    key = jax.random.key(seed)
    for path, leaf in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        if only is not None and name not in only:
            continue
        sharding = param_shardings[path].get_value() if param_shardings else None
        draw = _draw_param_program(config, chosen, path, name in by_layer, sharding, wide)
        if name in by_layer:
            layers = range(leaf.get_value().shape[0])
            yield name, (draw(key, layer) for layer in layers)
        else:
            yield name, draw(key)


@functools.lru_cache(maxsize=256)
def _draw_param_program(
    config: DecoderConfig,
    options: DecoderOptions,
    path: tuple,
    by_layer: bool,
    sharding: NamedSharding | None,
    wide: bool,
) -> Callable[..., jax.Array]:
    """Return the jitted function that draws one parameter from (key,), or one layer of it from
    (key, layer)."""

    def draw(key: jax.Array, layer: Any = None) -> jax.Array:
        model_options = dataclasses.replace(options, only_layer=layer)
        model = family(config).Model(config, model_options, nnx.Rngs(params=key))
        value = dict(nnx.to_flat_state(nnx.state(model)))[path].get_value()
        return value if layer is None else value[0]

    placed = layer_sharding(sharding) if by_layer else sharding
    return jax.jit(draw, out_shardings=placed, compiler_options=draw_options())


def param_count(config: DecoderConfig) -> int:
    """Count the parameters; a tied head counts once."""
    return count_elements(nnx.state(abstract(config)))


def count_elements(state: nnx.State) -> int:
    """Count the numbers of all arrays."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))


def layer_sharding(sharding: NamedSharding | None) -> NamedSharding | None:
    """Return the sharding of one layer of a stacked parameter."""
    if sharding is None:
        return None
    assert not sharding.spec or sharding.spec[0] is None, "layers are cut over no axis"
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
