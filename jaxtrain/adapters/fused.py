"""NF4 over whole tensors, as bitsandbytes quantizes what transformers 5 has in memory.

bitsandbytes cuts a tensor, flat, into blocks of 64, and the magnitudes of all its blocks have one
mean and groups of 256. transformers has gate and up of all experts of a layer in one tensor
[E, 2 F, D], down in another [E, D, F], whatever the folder is like, and there a base differs from
one whose every matrix is quantized by itself: in the mean of each, and, where a matrix has no
multiple of 256 blocks, in what belongs to a group. Axolotl trains beside such tensors
(quantize_moe_experts).

Where the inputs are the last dim of a tensor and a multiple of 64, a block lies within one output
of one expert, so that matrices can be stored each with a copy of the scales that it needs.
"""

import functools
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np

from jaxtrain.adapters.nf4 import TensorPart, find_absmax, restore_absmax
from jaxtrain.adapters.peft_experts import find_wrapped, innermost
from jaxtrain.adapters.spec import find_linears
from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import (
    Fetch,
    PermutedRows,
    SplitRows,
    StackedOps,
    TensorOp,
    TensorRef,
    Transpose,
    full_index,
)
from jaxtrain.models.decoder_config import DecoderConfig
from jaxtrain.models.families import family

NAME = "nf4_fused"
RECENT = 4  # tensors whose magnitudes are kept: a folder has those of a layer after each other


def find_tensors(config: DecoderConfig) -> dict[str, TensorPart]:
    """Return {path of a Linear that is only a part of its tensor: that part}. Raises UserError if
    blocks span several outputs."""
    linears = find_linears(config)
    wrapped = find_wrapped(config, linears)
    ops = {entry.param: entry.op for entry in family(config).names(config)}
    parts_by_path = {}
    for path, linear in linears.items():
        op, outputs = ops[f"{path}.kernel"], linear.shape[-1]
        leaf = innermost(op)
        if path in wrapped:
            experts = wrapped[path]
            if not _is_transposed(op) or experts.step != 1:
                raise UserError(
                    f"{_refused(config, path)}: {experts.parameters[0]} has its inputs before its"
                    ' outputs, so that a block of 64 is of many outputs; set it to "nf4", or to'
                    ' "mxfp4" for gpt-oss, and merge what Axolotl trained with Axolotl'
                )
            runs = ((experts.start, outputs),)
            parts_by_path[path] = TensorPart(
                experts.parameters[0], runs, experts.total, experts.num_experts
            )
        elif path.split(".")[-2] == "experts":
            raise UserError(f'{_refused(config, path)}; set it to "nf4"')
        elif not isinstance(leaf, TensorRef):
            part = _find_rows(leaf, outputs) if _is_transposed(op) else None
            if part is None:
                reason = ", whose tensor has its inputs before its outputs"
                reason = reason if config.inputs_first else ""
                raise UserError(f'{_refused(config, path)}{reason}; set it to "nf4"')
            parts_by_path[path] = part
    return {path: part for path, part in parts_by_path.items() if not part.is_whole}


def _refused(config: DecoderConfig, path: str) -> str:
    return f'adapter.quantize "{NAME}" has no form for {path} of {config.architecture}'


def _is_transposed(op: TensorOp) -> bool:
    """Return True if tensors have the outputs of a kernel before its inputs."""
    return _is_transposed(op.ops[0]) if isinstance(op, StackedOps) else isinstance(op, Transpose)


def _find_rows(leaf: TensorOp, outputs: int) -> TensorPart | None:
    """Locate the outputs of a matrix among the rows of its tensor."""
    if isinstance(leaf, SplitRows) and leaf.axis == 0:
        return TensorPart(leaf.name, ((leaf.start, outputs),), leaf.total)
    if not isinstance(leaf, PermutedRows) or leaf.axis != 0:
        return None
    runs: list[tuple[int, int]] = []
    for start, size in leaf.runs:
        if runs and sum(runs[-1]) == start:
            start, size = runs[-1][0], runs.pop()[1] + size
        runs.append((start, size))
    return TensorPart(leaf.name, tuple(runs), leaf.total)


class TensorScales:
    """Scales of the blocks of a folder's matrices, float32 [out, blocks], computed from the
    magnitudes of a whole tensor, read one matrix at a time."""

    def __init__(self, config: DecoderConfig, tensors: Mapping[str, TensorPart], fetch: Fetch):
        self.tensors = tensors
        shapes = {path: linear.shape for path, linear in find_linears(config).items()}
        ops = {entry.param: entry.op for entry in family(config).names(config)}

        def read(path: str, op: TensorOp, expert: int) -> np.ndarray:
            shape = shapes[path][1:]
            if len(shape) == 2:
                kernel = op.read(fetch, full_index(shape))
            else:
                kernel = op.read(fetch, (slice(expert, expert + 1), *full_index(shape[1:])))[0]
            return np.asarray(find_absmax(jnp.asarray(kernel, jnp.float32)))

        @functools.lru_cache(RECENT)
        def restored(tensor: str, layer: int) -> np.ndarray:
            members = {path: part for path, part in tensors.items() if part.tensor == tensor}
            absmax = None
            for path, part in members.items():
                for expert in range(part.num):
                    block_absmax = read(path, ops[f"{path}.kernel"].ops[layer], expert)
                    if absmax is None:
                        absmax = np.zeros((part.num, part.total, block_absmax.shape[1]), np.float32)
                    absmax[expert, part.rows] = block_absmax
            return np.asarray(restore_absmax(jnp.asarray(absmax)))

        self._restored: Callable[[str, int], np.ndarray] = restored

    def __call__(self, path: str, layer: int, expert: int) -> np.ndarray:
        part = self.tensors[path]
        return self._restored(part.tensor, layer)[expert, part.rows]
