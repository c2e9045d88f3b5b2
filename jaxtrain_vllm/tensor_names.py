"""The Hugging Face tensors of a served model, for comparison with the trainer's.

Names come from the model itself: fused layers are split, and vLLM's names are mapped back to those
of the files. Shapes come from the headers of the files that it was started from, because layers on
CPU are repacked and those of a tensor-parallel rank are cut.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

Shapes = dict[str, list[int]]
Renaming = Mapping[str, str | None]
"""A part of a name in files and its counterpart in the served model, such as {"model.visual.":
"visual."}; None: tensors with that part are omitted."""


class ServedNames(NamedTuple):
    """Names of the files' tensors in a served model: vLLM's WeightsMapper, in its order."""

    parts: Renaming = {}
    prefixes: Renaming = {}
    suffixes: Renaming = {}


AS_STORED = ServedNames()


def describe(
    parameters: Iterable[str],
    fused: Mapping[str, Sequence[str]],
    stored: Shapes,
    tied: bool,
    renamed: ServedNames = AS_STORED,
) -> dict[str, list[int] | None]:
    """Return {name: shape, None if unknown} of all tensors.

    parameters: names in the served model. fused: {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
    stored: shapes in the files. tied: True if the head is the embedding.
    """
    tensors: dict[str, list[int] | None] = {}
    names = {_served(name, renamed): name for name in stored}
    stored = {served: stored[name] for served, name in names.items() if served is not None}
    for name in parameters:
        name = name.replace(".base_layer.", ".")
        module, _, leaf = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        parts = [".".join(filter(None, (parent, p, leaf))) for p in fused.get(last, [last])]
        if stored and not any(part in stored for part in parts):
            parts = _experts(module, stored) or parts
        tensors |= {part: stored.get(part) for part in parts}
    if tied:
        # On CPU the head is listed, but only as a copy of the embedding.
        for name in [name for name in tensors if name.endswith("lm_head.weight")]:
            del tensors[name]
    return {names.get(name, name): shape for name, shape in tensors.items()}


def _experts(module: str, stored: Shapes) -> list[str]:
    """Return the files' tensors of experts, whose fusion no table describes: below that module, or
    below the enclosing one ("experts.routed_experts")."""
    names: list[str] = []
    while not names and module:
        names = [key for key in stored if key.startswith(f"{module}.")]
        module, _, last = module.rpartition(".")
        if "experts" not in last:
            break
    return names


def _served(name: str, renamed: ServedNames) -> str | None:
    """Return the name in the served model; None if it has no such tensor."""
    for stored_part, served_part in renamed.parts.items():
        if stored_part in name:
            if served_part is None:
                return None
            name = name.replace(stored_part, served_part, 1)
    for stored_part, served_part in renamed.prefixes.items():
        if name.startswith(stored_part):
            if served_part is None:
                return None
            name = served_part + name.removeprefix(stored_part)
    for stored_part, served_part in renamed.suffixes.items():
        if name.endswith(stored_part):
            if served_part is None:
                return None
            name = name.removesuffix(stored_part) + served_part
    return name


def read_shapes(model: str) -> Shapes:
    """Return the shapes of the tensors in the safetensors files of a folder or a downloaded Hub
    id."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(model, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError, OSError):
            return {}
    shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        shapes |= {name: item["shape"] for name, item in header.items() if name != "__metadata__"}
    return shapes
