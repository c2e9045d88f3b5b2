"""Whether the tensors of a folder are those that its config.json asks for."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import spell
from jaxtrain.huggingface.ops import TIED_COPY, ParameterEntry, whole
from jaxtrain.huggingface.safetensors import SafetensorsFolder
from jaxtrain.models.decoder_config import DecoderConfig


def fixed_dtypes(entry: ParameterEntry) -> Mapping[str, Any]:
    """{tensor: dtype} of those tensors of an entry whose dtype is not that of the weights."""
    return getattr(entry.op, "dtypes", {})


def check_tensors(
    files: SafetensorsFolder,
    shapes: Mapping[ParameterEntry, tuple[int, ...]],
    config: DecoderConfig,
    whole: bool = True,
) -> None:
    """One UserError for all tensors that are missing, unexpected (whole), misshapen, no floats."""
    wanted, fixed = {}, {}
    for entry, shape in shapes.items():
        wanted |= entry.op.shapes(shape)
        fixed |= fixed_dtypes(entry)
    found = files.tensors
    tables = [e.op.shapes(s) for e, s in shapes.items() if e.param == "embed.embedding"]
    table_name = next(iter(tables[0])) if tables else None
    problems = [f"missing {name} {shape}" for name, shape in wanted.items() if name not in found]
    for name, stored in found.items():
        if name in wanted:
            if stored.shape != wanted[name]:
                problems.append(
                    f"{stored.file.name}: {name} is {stored.shape}, config.json says {wanted[name]}"
                )
            elif name in fixed:
                if stored.dtype.kind not in "iub":
                    problems.append(f"{stored.file.name}: {name} is stored as {stored.dtype}")
            elif not jax.dtypes.issubdtype(stored.dtype, np.floating):
                problems.append(
                    f"{stored.file.name}: {name} is stored as {stored.dtype}, as quantized weights"
                    " are; convert the model to floats"
                )
        elif name == TIED_COPY and config.score is not None:
            continue  # the head of the language model that it was
        elif name == TIED_COPY and config.tie_word_embeddings:
            if table_name in found and not _equal(files, TIED_COPY, table_name):
                problems.append(
                    f"{stored.file.name}: {name} differs from the embedding, but config.json says "
                    "tie_word_embeddings=true"
                )
        elif name.startswith(config.carries):
            continue
        # The last is a buffer of old transformers, not a weight.
        elif whole and not name.endswith("rotary_emb.inv_freq"):
            problems.append(f"{stored.file.name}: unexpected {spell(name)} {stored.shape}")
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        listed = "".join(f"\n  {problem}" for problem in problems[:8])
        raise UserError(
            f"{files.path}: the tensors do not fit {config.architecture} with this config.json:"
            f"{listed}{more}"
        )


def _equal(files: SafetensorsFolder, name: str, other: str) -> bool:
    a, b = files.tensors[name], files.tensors[other]
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return (
        a.file.samefile(b.file)
        and a.offset == b.offset
        or bool(
            np.array_equal(files.fetch(name, whole(a.shape)), files.fetch(other, whole(b.shape)))
        )
    )
