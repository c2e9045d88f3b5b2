"""GGUF files written tensor by tensor, and numbers as blocks of their types.

The package `gguf` encodes the simple types; Q4_K is encoded here: a block of 256 numbers is eight
groups of 32, x = d * s * q - dmin * m with 4-bit q, 6-bit s and m of a group, and d and dmin in
float16 (llama.cpp's k-quants).
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.huggingface.gguf_file import PLAIN, load_package

F32, F16, Q4_0, Q5_0, Q8_0, Q4_K, BF16 = 0, 1, 2, 6, 8, 12, 30
ROWS = 2**16
"""Blocks that are encoded at once."""
STEPS = 16
"""How many scales are tried for each group."""


def encode(array: np.ndarray, kind: int) -> np.ndarray:
    """Return the bytes uint8 of float numbers in a type, whose last dim holds whole blocks."""
    if kind in PLAIN:
        return np.ascontiguousarray(array.astype(PLAIN[kind])).view(np.uint8)
    wide = np.ascontiguousarray(array, np.float32)
    if kind == Q4_K:
        blocks = wide.reshape(-1, 256)
        parts = [encode_q4_k(blocks[start : start + ROWS]) for start in range(0, len(blocks), ROWS)]
        return np.concatenate(parts)
    package = load_package("writing GGUF")
    return package.quants.quantize(wide, package.GGMLQuantizationType(kind))


def encode_q4_k(blocks: np.ndarray) -> np.ndarray:
    """Encode float32 [n, 256] as uint8 [n, 144]."""
    x = blocks.reshape(-1, 8, 32)
    scale, low = _fit_groups(x)
    d = (scale.max(-1) / 63).astype(np.float16)
    dmin = (low.max(-1) / 63).astype(np.float16)
    s, m = _to_six_bits(scale, d), _to_six_bits(low, dmin)
    step = d.astype(np.float32)[:, None] * s
    offset = dmin.astype(np.float32)[:, None] * m
    safe = np.where(step > 0, step, 1)
    codes = np.clip(np.rint((x + offset[..., None]) / safe[..., None]), 0, 15).astype(np.uint8)
    pairs = codes.reshape(-1, 4, 2, 32)
    packed = pairs[:, :, 0] | (pairs[:, :, 1] << 4)
    s, m = s.astype(np.uint8), m.astype(np.uint8)
    scales = np.concatenate(
        [
            (s[:, :4] & 63) | ((s[:, 4:] >> 4) << 6),
            (m[:, :4] & 63) | ((m[:, 4:] >> 4) << 6),
            (s[:, 4:] & 15) | ((m[:, 4:] & 15) << 4),
        ],
        -1,
    )
    heads = np.stack([d, dmin], -1).view(np.uint8)
    return np.concatenate([heads, scales, packed.reshape(-1, 128)], -1)


def _to_six_bits(values: np.ndarray, unit: np.ndarray) -> np.ndarray:
    wide = unit.astype(np.float32)[:, None]
    return np.clip(np.rint(values / np.where(wide > 0, wide, 1)), 0, 63) * (wide > 0)


def _fit_groups(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (scale, minus the minimum) [n, 8] of groups x [n, 8, 32], both at least 0: of several
    scales below the range's, the ones with the least squared error after a linear fit."""
    low = np.minimum(x.min(-1), 0)
    span = np.maximum(x.max(-1), 0) - low
    scale, best_low = span / 15, -low
    best = np.full(span.shape, np.inf, np.float32)
    safe = np.where(span > 0, span, 1)
    for step in range(STEPS):
        levels = 15.9 - 0.1 * step if step else 15.0
        q = np.clip(np.rint((x - low[..., None]) * (levels / safe)[..., None]), 0, 15)
        # The line x = a q + b with the least squares, b at most 0.
        mean_q, mean_x = q.mean(-1), x.mean(-1)
        variance = (q * q).mean(-1) - mean_q**2
        slope = ((q * x).mean(-1) - mean_q * mean_x) / np.where(variance > 0, variance, 1)
        shift = mean_x - slope * mean_q
        through_zero = (q * x).sum(-1) / np.maximum((q * q).sum(-1), 1)
        slope = np.where(shift > 0, through_zero, slope)
        shift = np.minimum(shift, 0)
        error = np.square(slope[..., None] * q + shift[..., None] - x).sum(-1)
        better = (error < best) & (slope > 0)
        best = np.where(better, error, best)
        scale = np.where(better, slope, scale)
        best_low = np.where(better, -shift, best_low)
    return scale.astype(np.float32), best_low.astype(np.float32)


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    plan: Mapping[str, tuple[tuple[int, ...], int]],
    make: Callable[[str], Iterable[np.ndarray]],
) -> None:
    """Write a file, tensor by tensor. metadata: values of Python's types; ints become uint32. plan:
    {tensor: (shape, type number)}. make: yields float arrays that follow each other along the first
    dim of a tensor."""
    package = load_package("writing GGUF")
    writer = package.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, (shape, number) in plan.items():
        kind = package.GGMLQuantizationType(number)
        block, width = package.GGML_QUANT_SIZES[kind]
        count = math.prod(shape) // block * width
        writer.add_tensor_info(name, shape, np.dtype(np.float32), count, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as stream:
        stream.write(b"\0" * (-stream.tell() % writer.data_alignment))
        for name, (_, number) in plan.items():
            for part in make(name):
                stream.write(encode(np.asarray(part), number).tobytes())
            stream.write(b"\0" * (-stream.tell() % writer.data_alignment))
        stream.flush()
        os.fsync(stream.fileno())


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
