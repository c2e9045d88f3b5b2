"""A model that was trained: the newest checkpoint of a run, or a Hugging Face or PEFT folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.adapters.attach import split_trained
from jaxtrain.adapters.peft import CONFIG as PEFT_CONFIG
from jaxtrain.adapters.peft import open_peft
from jaxtrain.config import Config, validate_config
from jaxtrain.config.load import apply_overrides, read_saved
from jaxtrain.core.assemble import Parts, abstract_params, assemble, open_frozen, open_params
from jaxtrain.core.step import State
from jaxtrain.errors import UserError
from jaxtrain.models.parameters import Params, Rebuild
from jaxtrain.run.checkpoint import load_checkpoint


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


def open_trained(
    name: str, overrides: list[str], step: int | None = None, *, frozen: bool = True
) -> Trained:
    """A run's output_dir, a Hugging Face or PEFT folder, or a Hub id; UserError for anything else.

    overrides: section.key=value on top of the run's saved config. frozen=False: of a run with
    adapters only what it trained.
    """
    path = Path(name)
    saved = path / "config.json"
    table = read_saved(saved.read_text()) if saved.is_file() else {}
    if not {"run", "model", "optim"} <= set(table):
        if (path / "checkpoints").is_dir():
            raise UserError(f"{path} holds checkpoints but {saved} is not a run's config")
        model, adapter = find_weights(path, name)
        table = {
            "run": {"max_steps": 1},
            "model": {"path": model, "compute_dtype": "float32"},
            "adapter": adapter,
            "data": {"datasets": [{"path": "none"}], "sequence_len": 8},
        }
        config = validate_config(apply_overrides(table, overrides), name)
        parts = assemble(config)
        return Trained(config, parts, open_params(parts, 0), abstract_params(parts)[1], step=0)
    config = validate_config(apply_overrides(table, overrides), str(saved))
    parts = assemble(config)
    shapes, rebuild = abstract_params(parts)
    wanted, _ = split_trained(shapes, parts.adapter)
    found = load_checkpoint(path / "checkpoints", State(None, wanted, None), step)
    base = open_frozen(parts, config.run.seed) if frozen else {}
    params = {**base, **found.arrays.params}
    return Trained(config, parts, params, rebuild, found.step)


def find_weights(path: Path, name: str) -> tuple[str, dict[str, str]]:
    """(model.path, section adapter) for a name that is no run: a PEFT folder names its base."""
    if not (path / PEFT_CONFIG).is_file():
        return name, {}
    peft = open_peft(path)
    base = peft.config.get("base_model_name_or_path")
    if not base:
        raise UserError(
            f"{path / PEFT_CONFIG} names no base model: write base_model_name_or_path there, or"
            " name the base and adapter.kind=lora adapter.path=FOLDER after it"
        )
    return base, {"kind": "dora" if peft.dora else "lora", "path": name}
