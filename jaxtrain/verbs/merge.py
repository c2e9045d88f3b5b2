"""The verb `merge`: a run's adapter, or a PEFT folder, folded into its base's weights."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from jaxtrain.adapters.merge import merge_adapter
from jaxtrain.adapters.peft import write_peft
from jaxtrain.adapters.peft_folder import CONFIG, open_peft
from jaxtrain.core.assemble import find_folder
from jaxtrain.core.export import replace_folder
from jaxtrain.errors import UserError
from jaxtrain.run.belongings import require_replaceable
from jaxtrain.train.trained import open_trained


def merge_command(
    source: Path,
    base: str | None,
    output: Path | None,
    step: int | None,
    dtype: str | None,
    quantize: str = "none",
) -> None:
    """Write a full Hugging Face folder from a run with an adapter, or from a PEFT folder."""
    output = output or source / "merged"
    changed, base = merge_source(source, base, output, step, dtype, quantize)
    print(f"{changed} tensors of {base} changed; the merged model is in {output}")


def merge_source(
    source: Path,
    base: str | None,
    output: Path,
    step: int | None,
    dtype: str | None,
    quantize: str = "none",
) -> tuple[int, str]:
    """The work of it: how many tensors changed, and of which base."""
    require_replaceable(output)  # before anything is read
    if (source / CONFIG).is_file():
        base = base or open_peft(source).config.get("base_model_name_or_path")
        if not base:
            raise UserError(f"{source / CONFIG} names no base model; give it with --base FOLDER")
        return merge(base, source, output, dtype, quantize), base
    is_run = (source / "checkpoints").is_dir()
    trained = open_trained(str(source), [], step, frozen=False) if is_run else None
    parts = None if trained is None else trained.held.roles.parts
    if trained is None or parts is None or parts.adapter is None:
        raise UserError(
            f"merge: {source} is neither a run with an adapter nor a PEFT folder; a run that"
            " trained all weights needs only: jaxtrain export"
        )
    base = base or (trained.config.model.path if parts.folder else None)
    if base is None:
        raise UserError(
            f"merge: the base of {source} has random weights; name the folder to merge into with"
            " --base"
        )
    with tempfile.TemporaryDirectory() as temporary:
        write_peft(trained.held.params(), parts.architecture, parts.adapter, temporary, base)
        parts.tokenizer.save_pretrained(temporary)
        quantize, model = parts.adapter.quantize, trained.config.model
        kept = dict(parts.architecture.kept)
        keys = {f"{role}_id": int(kept[f"{role}_id"]) for role in model.special_tokens.roles()}
        found = merge(base, Path(temporary), output, dtype, quantize, model.family, keys)
        return found, base


def merge(
    base: str,
    adapter: Path,
    output: Path,
    dtype: str | None,
    quantize: str,
    family: str | None = None,
    keys: Mapping[str, int] = MappingProxyType({}),
) -> int:
    """Number of tensors that the adapter changed."""
    with replace_folder(output) as unfinished:
        folder = find_folder(base, weights=True)
        return merge_adapter(
            folder, adapter, unfinished, dtype, quantize=quantize, family=family, keys=keys
        )
