"""Models from a config or a Hugging Face folder, sharded from the first byte, and back.

Loaded parameters come slice by slice from memory-mapped files straight to the devices that hold
them; random ones are drawn where they live. `mesh=None` means the default device.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxtrain.errors import UserError
from jaxtrain.hf.safetensors import Folder
from jaxtrain.models import ARCHITECTURES
from jaxtrain.models.decoder import Decoder, DecoderConfig, Options
from jaxtrain.parallel.rules import shardings

TIED_COPY = "lm_head.weight"
"""Some folders store a tied head a second time."""


def family(architecture: str) -> ModuleType:
    """The module of an architecture; UserError names those that exist."""
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"config.json: architecture {architecture!r} is not supported; supported: "
            f"{sorted(ARCHITECTURES)}"
        )
    return ARCHITECTURES[architecture]


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Config of the family that a config.json names, by `architectures` or else `model_type`."""
    named = raw.get("architectures") or [
        name
        for name, module in ARCHITECTURES.items()
        if module.Config.model_type == raw.get("model_type")
    ]
    if not named:
        kinds = sorted(module.Config.model_type for module in ARCHITECTURES.values())
        raise UserError(
            f"config.json: neither architectures ({sorted(ARCHITECTURES)}) nor a known model_type "
            f"({kinds}); found model_type={raw.get('model_type')!r}"
        )
    return family(named[0]).Config.from_hf(raw)


def read_config(folder: str | os.PathLike) -> DecoderConfig:
    """Config of a Hugging Face folder; UserError where there is none."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a Hugging Face model folder")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    return config_from_hf(raw)


def abstract(config: DecoderConfig, **options: Any) -> Decoder:
    """The model with shapes for parameters; allocates nothing. `options` are those of Options."""
    module = family(config.architecture)
    return nnx.eval_shape(lambda: module.Model(config, Options(**options), nnx.Rngs(0)))


def init(config: DecoderConfig, seed: int, mesh: Mesh | None = None, **options: Any) -> Decoder:
    """Randomly initialised model: normal(0, initializer_range), zero biases, unit norms.

    The numbers depend on the seed alone, not on the mesh.
    """
    module = family(config.architecture)
    graphdef, state = nnx.split(abstract(config, **options))

    def draw(key: jax.Array) -> nnx.State:
        return nnx.state(module.Model(config, Options(**options), nnx.Rngs(params=key)))

    out_shardings = None if mesh is None else shardings(state, mesh)
    return nnx.merge(graphdef, jax.jit(draw, out_shardings=out_shardings)(jax.random.key(seed)))


def load(
    folder: str | os.PathLike, mesh: Mesh | None = None, **options: Any
) -> tuple[Decoder, DecoderConfig]:
    """(model, config) of a Hugging Face folder of safetensors, in `param_dtype`.

    The config remembers the stored dtypes for `save`. Raises one UserError that lists missing,
    unexpected and misshapen tensors, and one for a file that is missing or truncated.
    """
    config = read_config(folder)
    files = Folder(folder)
    graphdef, state = nnx.split(abstract(config, **options))
    params = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    entries = family(config.architecture).names(config)
    assert sorted(entry.param for entry in entries) == sorted(params), "names() and Model differ"
    copied = _check(files, entries, params, tied=config.tie_word_embeddings)
    places = {} if mesh is None else dict(nnx.to_flat_state(shardings(state, mesh)))
    loaded = {}
    for entry in entries:
        path = next(p for p, _ in nnx.to_flat_state(state) if ".".join(map(str, p)) == entry.param)
        place = places[path].get_value() if places else None
        loaded[path] = params[entry.param].replace(
            _read(files, entry, params[entry.param].get_value(), place)
        )
    model = nnx.merge(graphdef, nnx.from_flat_state(loaded))
    return model, _remember(config, files, copied)
