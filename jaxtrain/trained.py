"""A model that was trained: the newest checkpoint of a run, or a Hugging Face folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.assemble import Parts, abstract_params, assemble, open_params
from jaxtrain.checkpoint import load_checkpoint
from jaxtrain.config import Config, validate_config
from jaxtrain.config.load import apply_overrides
from jaxtrain.errors import UserError
from jaxtrain.parameters import Params, Rebuild
from jaxtrain.step import State


@dataclass(frozen=True)
class Trained:
    """Weights on the mesh, with what belongs to them."""

    config: Config
    parts: Parts
    params: Params
    rebuild: Rebuild
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
        return Trained(config, parts, open_params(parts, 0), abstract_params(parts)[1], step=0)
    config = validate_config(apply_overrides(table, overrides), str(saved))
    parts = assemble(config)
    shapes, rebuild = abstract_params(parts)
    found = load_checkpoint(path / "checkpoints", State(None, shapes, None), step)
    return Trained(config, parts, found.arrays.params, rebuild, found.step)
