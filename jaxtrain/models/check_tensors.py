"""Check the tensors of a folder against its config.json."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import spell
from jaxtrain.huggingface.ops import HEAD_BIAS, HEADS, ParameterEntry, full_index
from jaxtrain.huggingface.safetensors import SafetensorsFolder
from jaxtrain.models.decoder_config import DecoderConfig


def fixed_dtypes(entry: ParameterEntry) -> Mapping[str, Any]:
    """Return {tensor: dtype} for the tensors of an entry whose dtype is not that of the weights."""
    return getattr(entry.op, "dtypes", {})


def check_tensors(
    files: SafetensorsFolder,
    shapes: Mapping[ParameterEntry, tuple[int, ...]],
    config: DecoderConfig,
    complete: bool = True,
) -> None:
    """Raise one UserError for all tensors that are missing, unexpected (if `complete`), misshapen
    or not floats."""
    expected, fixed = {}, {}
    for entry, shape in shapes.items():
        expected |= entry.op.shapes(shape)
        fixed |= fixed_dtypes(entry)
    tensors = files.tensors
    tables = {e.param: next(iter(e.op.shapes(s))) for e, s in shapes.items()}
    copies = config.table_copies
    problems = [
        f"missing {name} {shape}" for name, shape in expected.items() if name not in tensors
    ]
    for name, stored in tensors.items():
        if name in expected:
            if stored.shape != expected[name]:
                problems.append(
                    f"{stored.file.name}: {name} is {stored.shape}, config.json says"
                    f" {expected[name]}"
                )
            elif name in fixed:
                if stored.dtype.kind not in "iub":
                    problems.append(f"{stored.file.name}: {name} is stored as {stored.dtype}")
            elif not jax.dtypes.issubdtype(stored.dtype, np.floating):
                problems.append(
                    f"{stored.file.name}: {name} is stored as {stored.dtype}, as quantized weights"
                    " are; convert the model to floats"
                )
        elif name.endswith((*HEADS, HEAD_BIAS)) and config.score is not None:
            continue  # the head of the language model that it was
        elif name in copies:
            table = tables.get(copies[name])
            if table in tensors and not _equal(files, name, table):
                reason = "config.json says tie_word_embeddings=true"
                if name not in HEADS:
                    reason = 'a head is trained only with the same: set model.mtp.train to "none"'
                kind = "embedding" if copies[name] == "embed.embedding" else "head"
                problems.append(f"{stored.file.name}: {name} differs from the {kind}, but {reason}")
        elif name.startswith(config.carries):
            continue
        elif complete:
            problems.append(f"{stored.file.name}: unexpected {spell(name)} {stored.shape}")
    if problems:
        overflow = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        listed = "".join(f"\n  {problem}" for problem in problems[:8])
        raise UserError(
            f"{files.path}: the tensors do not fit {config.architecture} with this config.json:"
            f"{listed}{overflow}"
        )


def _equal(files: SafetensorsFolder, name: str, copy: str) -> bool:
    a, b = files.tensors[name], files.tensors[copy]
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return (
        a.file.samefile(b.file)
        and a.offset == b.offset
        or bool(
            np.array_equal(
                files.fetch(name, full_index(a.shape)), files.fetch(copy, full_index(b.shape))
            )
        )
    )
