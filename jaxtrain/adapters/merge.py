"""Adapters folded into the weights of a Hugging Face folder, a tensor at a time.

Works on the folders alone, by tensor names, so the host never holds more than one matrix, whatever
the size or the family of the model.
"""

import dataclasses
import os
from pathlib import Path

import numpy as np

from jaxtrain.adapters.peft import PREFIX, SUFFIX, PeftFolder, open_peft
from jaxtrain.adapters.spec import LoRASpec, find_linears
from jaxtrain.adapters.storage import round_trip
from jaxtrain.errors import UserError
from jaxtrain.hf.copy import copy_folder, is_float
from jaxtrain.hf.ops import whole
from jaxtrain.hf.packed import open_folder
from jaxtrain.hf.safetensors import CODES, MAX_SHARD_BYTES, Folder
from jaxtrain.models.build import read_config

TABLES = ("embed_tokens.weight", "lm_head.weight")


@dataclasses.dataclass(frozen=True)
class Correction:
    """What an adapter does to one tensor of the base."""

    peft: PeftFolder
    tensor: str
    slot: LoRASpec | None
    """None: the adapter holds the whole tensor."""

    def apply(self, base: np.ndarray) -> np.ndarray:
        """The merged tensor [out, in] in float32 of the base's."""
        if self.slot is None:
            return self._fetch(self.tensor)
        module = self.tensor.removesuffix(".weight")
        down = self._fetch(f"{module}.{SUFFIX['a']}").astype(np.float32)
        up = self._fetch(f"{module}.{SUFFIX['b']}").astype(np.float32)
        merged = base.astype(np.float32)
        merged += np.float32(self.slot.scale) * (up @ down)
        if self.slot.dora:
            magnitude = self._fetch(f"{module}.{SUFFIX['magnitude']}").astype(np.float32)
            # numpy sums float32 rows pairwise: exact enough for rows of any length.
            merged *= (magnitude / np.sqrt(np.square(merged).sum(1)))[:, None]
        return merged

    def _fetch(self, name: str) -> np.ndarray:
        name = PREFIX + name
        return self.peft.files.fetch(name, whole(self.peft.files.tensors[name].shape))


def merge_adapter(
    base: str | os.PathLike,
    adapter: str | os.PathLike,
    output: str | os.PathLike,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    quantize: str = "none",
    family: str | None = None,
) -> int:
    """Write to `output` the model of `base` with the PEFT folder `adapter` merged in.

    Tensors keep their dtypes but where `dtype` is given. quantize: the adapter was trained beside
    weights in that storage; what was stored so is put through it first. family: as model.family.
    Returns the number of tensors that the adapter changed; raises one UserError for all that cannot
    be merged, before writing.
    """
    base, output = Path(base), Path(output)
    files, peft = open_folder(base), open_peft(adapter)
    corrections = find_corrections(files, peft)
    linears = find_linears(read_config(base, family)).values() if quantize != "none" else ()
    quantised = {f"{module}.weight" for linear in linears for module in linear.modules}

    def change(name: str, array: np.ndarray) -> np.ndarray:
        stored = array.dtype
        if name in quantised:
            array = np.asarray(round_trip(np.asarray(array, np.float32).T, quantize)).T
            array = array.astype(stored)
        if name not in corrections:
            return array
        merged = corrections[name].apply(array)
        if not np.isfinite(merged).all():
            raise UserError(
                f"{name} with {str(adapter)!r} merged in holds NaN or infinite values: it or the"
                f" tensor of {str(base)!r} does, or their sum does not fit into {merged.dtype}"
            )
        return merged

    copy_folder(base, output, dtype, max_shard_bytes, change)
    return len(corrections)


def find_corrections(files: Folder, peft: PeftFolder) -> dict[str, Correction]:
    """{tensor of the base: what the adapter does to it}; UserError where they do not fit."""
    found, problems = {}, []
    for module, slot in peft.modules().items():
        name = f"{module}.weight"
        stored = files.tensors.get(name)
        down, up = (peft.files.tensors[f"{PREFIX}{module}.{SUFFIX[p]}"].shape for p in "ab")
        if stored is None:
            problems.append(f"the base has no {name}")
        elif stored.shape != (up[0], down[1]) or up[1] != down[0]:
            problems.append(f"{name} is {stored.shape}, the adapter is {up} x {down}")
        elif not is_float(stored.dtype):
            problems.append(f"{name} is stored as {CODES[stored.dtype]}, not as floats")
        else:
            found[name] = Correction(peft, name, slot)
    for name in sorted(peft.full()):
        stored, own = files.tensors.get(name), peft.files.tensors[PREFIX + name]
        if stored is None and name == TABLES[1] and _same_tables(peft):
            continue  # tied: the base stores the table once, as the embedding
        if stored is None and name.startswith("score."):
            problems.append(
                f"the adapter holds {name}, the head of a reward model, and the base is a language"
                " model; load both with PEFT as a classifier and use its merge_and_unload, or score"
                " with the adapter as it is (jaxtrain score)"
            )
        elif stored is None:
            problems.append(f"the base has no {name} (a head that it ties to the embedding?)")
        elif stored.shape != own.shape:
            problems.append(f"{name} is {stored.shape}, the adapter's is {own.shape}")
        else:
            found[name] = Correction(peft, name, None)
    if not problems and not found:
        problems.append("the adapter holds nothing")
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise UserError(
            f"{peft.path} cannot be merged into {files.path}: {'; '.join(problems[:4])}{more}"
        )
    return found


def _same_tables(peft: PeftFolder) -> bool:
    names = [n for table in TABLES for n in peft.files.tensors if n.endswith(f".{table}")]
    if len(names) != len(TABLES):
        return False
    embed, head = (peft.files.fetch(n, whole(peft.files.tensors[n].shape)) for n in names)
    return np.array_equal(embed, head)
