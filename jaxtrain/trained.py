"""A model that was trained: the newest checkpoint of a run, or a Hugging Face folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxtrain.assemble import Parts, assemble, open_model
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import Config, validate_config
from jaxtrain.config.load import apply_overrides
from jaxtrain.errors import UserError
from jaxtrain.parameters import Params, split_model
from jaxtrain.step import State


@dataclass(frozen=True)
class Trained:
    """Weights on the mesh, with what belongs to them."""

    config: Config
    parts: Parts
    architecture: Any
    params: Params
    rebuild: Any
    """parameters.split_model's function from params to the model."""
    step: int
    """Steps trained by this project; 0 for a Hugging Face folder."""

    @property
    def model(self) -> Any:
        return self.rebuild(self.params)


def open_trained(name: str, overrides: list[str], step: int | None = None) -> Trained:
    """A run's output_dir, a Hugging Face folder or a Hub id; raises UserError for anything else.

    overrides: section.key=value on top of the run's saved config.
    """
    path = Path(name)
    saved = path / "config.json"
    table = json.loads(saved.read_text()) if saved.is_file() else {}
    if not {"run", "model", "optim"} <= set(table):
        if (path / "checkpoints").is_dir():
            raise UserError(f"{path} holds checkpoints but {saved} is not a run's config")
        table = {
            "run": {"max_steps": 1},
            "model": {"path": name, "compute_dtype": "float32"},
            "data": {"datasets": [{"path": "none"}], "sequence_len": 8},
        }
        config = validate_config(apply_overrides(table, overrides), name)
        parts = assemble(config)
        model, architecture = open_model(parts, seed=0)
        return Trained(config, parts, architecture, *split_model(model), step=0)
    config = validate_config(apply_overrides(table, overrides), str(saved))
    parts = assemble(config)
    model, architecture = open_model(parts, config.run.seed)
    params, rebuild = split_model(model)
    checkpoints = Checkpoints(path / "checkpoints", keep=10**9)
    try:
        shapes = State(None, jax.tree.map(shape_of, params), None)
        if step is not None and step not in checkpoints.steps():
            raise UserError(
                f"{path} has no checkpoint of step {step}; there are {checkpoints.steps()}"
            )
        found = checkpoints.restore(shapes) if step is None else checkpoints.load(step, shapes)
    finally:
        checkpoints.close()
    if found is None:
        raise UserError(f"{path} is a run without a finished checkpoint; train it first")
    return Trained(config, parts, architecture, found.arrays.params, rebuild, found.step)


def shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape, dtype and place of an array, without its values."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
