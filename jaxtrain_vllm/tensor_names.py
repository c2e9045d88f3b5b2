"""The Hugging Face tensors that a served model is made of, to be compared with the trainer's.

Names come from the model itself, taken apart where vLLM fuses and with the files' names where it
has others. Shapes come from the headers of the files that it was started from: layers on CPU are
repacked and those of a rank cut, so the model cannot tell them.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

Shapes = dict[str, list[int]]
Renaming = Mapping[str, str | None]
"""A part of a name in files and what it is in the served model, such as {"model.visual.":
"visual."}; None: what has it is left out."""


class ServedNames(NamedTuple):
    """What a served model calls tensors of the files: vLLM's WeightsMapper, in its order."""

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
    """{name: shape, None where it is not known} of all tensors.

    parameters: names in the served model. fused: {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
    stored: what the files hold. tied: whether the head is the embedding.
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
    """All that the files hold of experts, which are fused in a way that no table tells: below that
    module, or below the one around it ("experts.routed_experts")."""
    names: list[str] = []
    while not names and module:
        names = [key for key in stored if key.startswith(f"{module}.")]
        module, _, last = module.rpartition(".")
        if "experts" not in last:
            break
    return names


def _served(name: str, renamed: ServedNames) -> str | None:
    """A file's name in the served model; None where it has no such tensor."""
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
    """Shapes of the tensors in the safetensors files of a folder or a downloaded Hub id."""
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
