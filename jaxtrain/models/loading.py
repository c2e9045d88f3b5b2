"""Models and parameters from Hugging Face folders, sharded from the first byte.

Parameters come slice by slice from memory-mapped files straight to the devices that hold them;
`mesh=None` means the default device.
"""

import collections
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxtrain.distributed.sharding import shardings
from jaxtrain.huggingface.ops import HEADS, GrownRows, ParameterEntry, StackedOps, full_index
from jaxtrain.huggingface.packed import open_folder
from jaxtrain.huggingface.safetensors import SafetensorsFolder
from jaxtrain.models.build import abstract, draw_params, layer_sharding
from jaxtrain.models.check_tensors import check_tensors
from jaxtrain.models.decoder import Decoder
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.families import family, read_config
from jaxtrain.models.finite import FiniteCheck


def load(folder: str | os.PathLike, mesh: Mesh | None = None, **options: Any) -> Decoder:
    """Load the model of a Hugging Face folder of safetensors, with parameters in `param_dtype`.

    The model remembers the stored dtypes for `saving.save`. Raises one UserError that lists
    missing, unexpected and misshapen tensors, or one for a missing, damaged or truncated file.
    """
    graphdef, state = nnx.split(abstract(read_config(folder), **options))
    flat = dict(nnx.to_flat_state(state))
    for name, value in read_params(folder, mesh, **options):
        path = next(path for path in flat if ".".join(map(str, path)) == name)
        flat[path] = flat[path].replace(value)
    model = nnx.merge(graphdef, nnx.from_flat_state(flat))
    return remember(model, folder)


def read_params(
    folder: str | os.PathLike,
    mesh: Mesh | None = None,
    config: DecoderConfig | None = None,
    seed: int = 0,
    part: Callable[..., nnx.Module] | None = None,
    by_layer: Collection[str] = (),
    **options: Any,
) -> Iterator[tuple[str, Any]]:
    """Yield (path, array) of the parameters of a Hugging Face folder, one at a time.

    config: the folder's, if already read, or one with a head to draw by the seed. part: as in
    `build.abstract`; other tensors of the folder are ignored. by_layer: as in `build.draw_params`.
    Raises UserError as `load` does before the first parameter, and after the last one if a tensor
    holds NaN or infinite values.
    """
    config = config or read_config(folder)
    files = open_folder(folder)
    _, state = nnx.split(abstract(config, part, **options))
    flat = dict(nnx.to_flat_state(state))
    param_shardings = {} if mesh is None else dict(nnx.to_flat_state(shardings(state, mesh)))
    entries = stored_entries(config)
    paths = {path: entries[".".join(map(str, path))] for path in flat}
    assert part is not None or len(paths) == len(entries), "names() and Model differ"
    stored = {path: entry for path, entry in paths.items() if not _is_drawn(entry, config)}
    shapes = {entry: flat[path].get_value().shape for path, entry in stored.items()}
    check_tensors(files, shapes, config, complete=part is None)
    if drawn := {entry.param for entry in paths.values()} - {e.param for e in stored.values()}:
        yield from draw_params(config, seed, mesh, drawn, **options)
    check = FiniteCheck(files)
    for path, entry in stored.items():
        spec, sharding = (
            flat[path].get_value(),
            param_shardings[path].get_value() if param_shardings else None,
        )
        if entry.param in by_layer:
            yield entry.param, _read_layers(files, entry, spec, sharding, check)
            continue
        yield entry.param, read_checked(files, entry, spec, sharding, check)
    check.close()


def _read_layers(
    files: SafetensorsFolder,
    entry: ParameterEntry,
    spec: jax.ShapeDtypeStruct,
    sharding: NamedSharding | None,
    check: FiniteCheck,
) -> Iterator[jax.Array]:
    """Yield the layers of a stacked parameter, reading each on demand."""
    assert isinstance(entry.op, StackedOps), f"{entry.param} is no stack of layers"
    layer_spec = jax.ShapeDtypeStruct(spec.shape[1:], spec.dtype)
    for op in entry.op.ops:
        layer = ParameterEntry(entry.param, op)
        yield read_checked(files, layer, layer_spec, layer_sharding(sharding), check)


def read_checked(
    files: SafetensorsFolder,
    entry: ParameterEntry,
    spec: jax.ShapeDtypeStruct,
    sharding: NamedSharding | None,
    check: FiniteCheck,
) -> jax.Array:
    """Read the parameter of an entry and add it to the check."""
    finite: list[bool] = []

    def see(part: np.ndarray) -> None:
        finite.append(bool(np.isfinite(part).all()))

    # What another process holds is checked by all devices, so that all processes fail together.
    local = sharding is None or sharding.is_fully_addressable
    if local and check.takes(spec.size * spec.dtype.itemsize):
        value = read_entry(files, entry, spec, sharding, see)
        check.add(entry, value, all(finite))
    else:
        value = read_entry(files, entry, spec, sharding)
        check.add(entry, value)
    return value


def stored_entries(config: DecoderConfig) -> dict[str, ParameterEntry]:
    """Return {parameter: its entry} for the folder that a config is read from."""
    entries = {entry.param: entry for entry in family(config).names(config)}
    for param in ("embed.embedding", "lm_head.embedding", "lm_head.bias"):
        if config.grown and param in entries:
            stored = config.vocab_size - config.grown
            entries[param] = entries[param]._replace(op=GrownRows(entries[param].op, stored))
    return entries


def _is_drawn(entry: ParameterEntry, config: DecoderConfig) -> bool:
    """Return True for a parameter that the folder of the config does not have."""
    drawn = {"score.": config.score, "mtp.": config.mtp}
    return any(
        head is not None and head.drawn and entry.param.startswith(path)
        for path, head in drawn.items()
    )


def check_folder(folder: str | os.PathLike, config: DecoderConfig) -> None:
    """Raise UserError as `load` does if a folder's tensors do not fit the config; reads the
    headers, and both tables of a tied head that is stored twice."""
    _, state = nnx.split(abstract(config))
    entries = stored_entries(config)
    flat = nnx.to_flat_state(state)
    shapes = {entries[".".join(map(str, p))]: leaf.get_value().shape for p, leaf in flat}
    stored = {entry: shape for entry, shape in shapes.items() if not _is_drawn(entry, config)}
    check_tensors(open_folder(folder), stored, config)


def remember(model: Decoder, folder: str | os.PathLike) -> Decoder:
    """Return `model` as if loaded from `folder`: `saving.save` will use that folder's dtypes.

    For a model with weights from a checkpoint; reads only the headers.
    """
    dtypes = {name: str(stored.dtype) for name, stored in open_folder(folder).tensors.items()}
    common = collections.Counter(dtypes.values()).most_common(1)[0][0]
    copies = {*HEADS, *getattr(getattr(model, "mtp", None), "copies", ())}
    exceptions = {name: d for name, d in dtypes.items() if d != common or name in copies}
    model.stored = (("", common), *sorted(exceptions.items()))
    if any(name.startswith(model.carries) for name in dtypes):
        model.carried_from = os.path.abspath(folder)
    return model


def read_entry(
    files: SafetensorsFolder,
    entry: ParameterEntry,
    spec: jax.ShapeDtypeStruct,
    sharding: NamedSharding | None,
    see: Callable[[np.ndarray], None] | None = None,
) -> jax.Array:
    """Read the parameter of an entry with the shape and dtype of `spec`, placed by `sharding`.
    see: gets each part on its way to a device."""

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        index = full_index(spec.shape) if index is None else index
        closed = tuple(
            slice(s.start or 0, size if s.stop is None else s.stop)
            for s, size in zip(index, spec.shape, strict=True)
        )
        array = entry.op.read(files.fetch, closed)
        array = np.ascontiguousarray(array).astype(spec.dtype, copy=False)
        if see is not None:
            see(array)
        return array

    if sharding is None:
        return jax.device_put(part(None))
    return jax.make_array_from_callback(spec.shape, sharding, part)
