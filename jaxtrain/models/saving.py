"""Models to Hugging Face folders, with the tensors that a model only carries along."""

import collections
import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jaxtrain.distributed.feed import to_host
from jaxtrain.distributed.mesh import is_main_process, sync_processes
from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry, SplitPiece, TensorRef, full_index
from jaxtrain.huggingface.packed import open_folder
from jaxtrain.huggingface.remote_code import write_modules
from jaxtrain.huggingface.safetensors import (
    RoundingLoss,
    SafetensorsFolder,
    TensorLocation,
    write_folder,
)
from jaxtrain.models.build import abstract
from jaxtrain.models.check_tensors import fixed_dtypes
from jaxtrain.models.decoder import Decoder
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.families import family

SMALL_BYTES = 2**28
"""Size up to which a parameter is fetched whole."""


def save(
    model: Decoder,
    config: DecoderConfig,
    folder: str | os.PathLike,
    dtype: str | None = None,
    base: Path | None = None,
) -> RoundingLoss:
    """Write safetensors and a config.json that transformers can load.

    dtype None: each tensor in the dtype of the loaded folder, else of the parameter; tensors of
    `wide_tensors` always are. base: the folder from which training began; return what rounding
    takes of the changes since. Every process takes part; the first one writes.
    """
    loss = RoundingLoss()
    stored = dict(model.stored)
    entries, flat = family(config).names(config), nnx.to_flat_state(nnx.state(model))
    params = {".".join(map(str, path)): leaf.get_value() for path, leaf in flat}
    entries = entries + [
        ParameterEntry(param, TensorRef(name))
        for name, param in config.table_copies.items()
        if name in stored
    ]
    plan, wide = {}, wide_tensors(config) if dtype else ()
    for entry in entries:
        param_dtype, fixed = params[entry.param].dtype, fixed_dtypes(entry)
        for name, shape in entry.op.shapes(params[entry.param].shape).items():
            forced = fixed.get(name) or (None if name in wide else dtype)
            chosen = forced or stored.get(name) or stored.get("") or param_dtype
            plan[name] = (shape, np.dtype(chosen))
    pieces = (p for e in entries for p in e.op.write(fetch_small(params[e.param]), to_host))
    if is_main_process():
        files = open_carried(model)
        carried = {} if files is None else carried_tensors(files, model.carries)
        plan |= {name: (stored.shape, stored.dtype) for name, stored in carried.items()}
        copied = (
            SplitPiece(
                name,
                stored.shape,
                full_index(stored.shape),
                files.fetch(name, full_index(stored.shape)),
            )
            for name, stored in carried.items()
        )
        pieces = watch_rounding(pieces, plan, base, loss)
        write_folder(folder, dict(sorted(plan.items())), itertools.chain(pieces, copied))
        write_config(config, plan, Path(folder))
    else:
        collections.deque(pieces, maxlen=0)  # takes part in the gathers
    sync_processes("save")
    return loss


def fetch_small(array: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Return an array on the host, but a large one as it is: to cut layers out of it on a device
    takes two programs for each shape, and to fetch it whole the host's memory."""
    if isinstance(array, np.ndarray):
        return array
    small = array.nbytes <= SMALL_BYTES and array.is_fully_addressable
    return to_host(array) if small else array


def write_config(
    config: DecoderConfig, plan: Mapping[str, tuple[tuple[int, ...], np.dtype]], folder: Path
) -> None:
    """Write config.json, with the modules that it names. plan: (shape, dtype) of each tensor."""
    raw = config.to_hf()
    common = collections.Counter(str(d) for _, d in plan.values()).most_common(1)[0][0]
    raw["torch_dtype"] = common
    if "dtype" in raw:
        raw["dtype"] = common
    write_modules(raw, folder)
    unfinished = folder / ".config.json.unfinished"
    unfinished.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
    os.replace(unfinished, folder / "config.json")


def watch_rounding(
    pieces: Iterable[SplitPiece],
    plan: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    base: Path | None,
    loss: RoundingLoss,
) -> Iterator[SplitPiece]:
    """Yield pieces, adding to `loss` those that are stored in a narrower dtype than they have, and
    that a folder has in the same shape."""
    files: SafetensorsFolder | None = None
    if base is not None:
        with contextlib.suppress(UserError):  # a run goes without the weights that it began with
            files = open_folder(base)
    for piece in pieces:
        dtype = plan[piece.name][1]
        if files is not None and dtype.itemsize < piece.array.dtype.itemsize:
            stored = files.tensors.get(piece.name)
            if stored is not None and stored.shape == piece.shape:
                loss.add(piece.array, dtype, files.fetch(piece.name, piece.index))
        yield piece


def wide_tensors(config: DecoderConfig) -> frozenset[str]:
    """Return the tensors that are float32 whatever the param dtype is, such as the correction bias
    of a router or the decay of linear attention."""
    state = nnx.to_flat_state(nnx.state(abstract(config, param_dtype="bfloat16")))
    params = {".".join(map(str, path)): leaf.get_value() for path, leaf in state}
    return frozenset(
        name
        for entry in family(config).names(config)
        if params[entry.param].dtype == "float32"
        for name in entry.op.shapes(params[entry.param].shape)
    )


def carried_tensors(
    files: SafetensorsFolder, carries: tuple[str, ...]
) -> dict[str, TensorLocation]:
    """Return the tensors of a folder that are copied into every export without being trained."""
    return {name: location for name, location in files.tensors.items() if name.startswith(carries)}


def count_carried(folder: str | os.PathLike, config: DecoderConfig) -> int:
    """Count the numbers in a folder's carried tensors."""
    tensors = carried_tensors(open_folder(folder), config.carries) if config.carries else {}
    return sum(math.prod(stored.shape) for stored in tensors.values())


def count_stale(model: Decoder, config: DecoderConfig) -> int:
    """Count the tensors that an export copies although they belong to the weights before
    training."""
    files = open_carried(model)
    return 0 if files is None else len(carried_tensors(files, config.goes_stale))


def open_carried(model: Decoder) -> SafetensorsFolder | None:
    """Open the folder from which an export copies tensors that no layer has; None if nothing is
    carried. Raises UserError if the folder is gone."""
    if model.carried_from is None:
        return None
    if not Path(model.carried_from).is_dir():
        raise UserError(
            f"{model.carried_from} is gone, from which an export copies what this model only"
            f" carries along ({', '.join(model.carries)}*); put the folder back, and export again"
        )
    return open_folder(model.carried_from)
