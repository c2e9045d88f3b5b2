"""Requests of forward_backward as arrays: protobuf bytes ─> Datum ─> trees, packed for the step.

A datum has N tokens and, at each place, a target (or K of them): place i predicts target i. Here a
log-prob lies on the token that it scores, so a datum is a document of N + 1 tokens; the last one is
only scored, and what is scored is the stream `target`. With K targets a place, each is a token of
its own behind the place, which no other token sees.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from jaxtrain.data.packing.pack import Fields, PackedTree, lay_out
from jaxtrain.data.packing.prefixes import FlatSequence, merge_prefixes
from jaxtrain.environments.request_fields import RequestRefused
from jaxtrain.errors import UserError
from jaxtrain.text_safety import show
from jaxtrain.training_api import wire
from jaxtrain.training_api.losses import ADVANTAGES, TARGETS, TOTAL, LossKind

DTYPES = {wire.FLOAT32: np.float32, wire.INT64: np.int64, wire.INT32: np.int32}
FIELDS = Fields((TOTAL,), {"target": np.int32, "logprobs": np.float32, ADVANTAGES: np.float32})
"""One structure for the batches of all losses."""


@dataclass(frozen=True, eq=False)
class Datum:
    """Tokens and the inputs of a loss at each place."""

    tokens: np.ndarray
    """int32 [N]"""
    inputs: Mapping[str, np.ndarray]
    """By name, [N] or [N, K]."""


class TrainingRequest(NamedTuple):
    """Fields of a forward_backward request."""

    model_id: str
    seq_id: int
    forward_only: bool
    loss: str
    settings: dict[str, float | str]
    data: list[Any]
    """Messages of the client; `read_datum` reads one."""


class Packed(NamedTuple):
    """Data of a request as trees, in which those that begin alike share tokens."""

    trees: list[PackedTree]
    places: list[tuple[int, np.ndarray]]
    """By datum: its tree, and the indices in it that are scored, int [N] or [N, K]."""


def read_request(raw: bytes) -> TrainingRequest:
    """Parse the body of a forward_backward request; RequestRefused if it is none."""
    message = wire.ForwardBackwardRequest()
    try:
        message.ParseFromString(raw)
    except DecodeError:
        raise RequestRefused(400, "the body is no ForwardBackwardRequest in protobuf") from None
    settings: dict[str, Any] = {entry.key: entry.value for entry in message.loss_fn_config}
    for entry in message.loss_fn_config_v2:
        settings[entry.key] = getattr(entry.value, entry.value.WhichOneof("value") or "text")
    return TrainingRequest(
        message.model_id,
        message.seq_id,
        message.forward_only,
        message.loss_fn,
        settings,
        list(message.data),
    )


def read_datum(message: Any, index: int, kind: LossKind, vocab_size: int, longest: int) -> Datum:
    """Read and check a datum of a request for a loss; UserError names it and the field."""
    name = f"data[{index}]"
    chunks = []
    for chunk in message.model_input:
        if chunk.WhichOneof("kind") != "encoded_text":
            chunk_kind = chunk.WhichOneof("kind") or "an empty one"
            raise UserError(
                f"{name}.model_input: only chunks of text are read here, not {chunk_kind}"
            )
        chunks.append(read_array(chunk.encoded_text.tokens, np.int32, f"{name}.model_input"))
    tokens = np.concatenate(chunks) if chunks else np.zeros(0, np.int32)
    count = len(tokens)
    if not 0 < count < longest:
        raise UserError(
            f"{name}.model_input has {count:,} tokens; 1 to {longest - 1:,} can be trained here"
        )
    check_ids(tokens, vocab_size, f"{name}.model_input")
    inputs = {
        entry.key: read_tensor(
            entry.value, f"{name}.loss_fn_inputs[{show(entry.key, 40)}]", longest
        )
        for entry in message.loss_fn_inputs
    }
    valid_keys = (TARGETS, *kind.required, *kind.optional)
    for key in (TARGETS, *kind.required):
        if key not in inputs:
            raise UserError(f"{name}.loss_fn_inputs needs {key!r}, and has {sorted(inputs)}")
    shape = inputs[TARGETS].shape
    several = len(shape) == 2 and not kind.required
    if shape[:1] != (count,) or not (len(shape) == 1 or several):
        raise UserError(
            f"{name}.loss_fn_inputs['{TARGETS}'] has shape {list(shape)}; it needs one target for"
            f" each of the {count:,} tokens{' (or K of them)' if not kind.required else ''}"
        )
    for key, value in inputs.items():
        if key not in valid_keys:
            raise UserError(
                f"{name}.loss_fn_inputs has {show(key, 40)}; the loss reads {valid_keys}"
            )
        if value.shape != shape:
            raise UserError(
                f"{name}.loss_fn_inputs[{key!r}] has shape {list(value.shape)}, the targets have"
                f" {list(shape)}"
            )
    check_ids(inputs[TARGETS], vocab_size, f"{name}.loss_fn_inputs['{TARGETS}']")
    return Datum(tokens, inputs)


def check_ids(ids: np.ndarray, vocab_size: int, label: str) -> None:
    """Raise UserError for numbers that are no token ids of the model."""
    if not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"{label} must hold whole numbers, not {ids.dtype}")
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)].flat[0]
        raise UserError(f"{label} holds the id {wrong}; the model has those up to {vocab_size - 1}")


def read_array(raw: bytes, dtype: Any, label: str) -> np.ndarray:
    """Return the numbers [n] in some bytes; UserError if they are none."""
    if len(raw) % np.dtype(dtype).itemsize:
        raise UserError(f"{label}: {len(raw):,} bytes are no {np.dtype(dtype).name} numbers")
    return np.frombuffer(raw, dtype)


def read_tensor(message: Any, label: str, most: int) -> np.ndarray:
    """Return a tensor, a sparse one with 0 at the places that it does not list; UserError. most:
    numbers of a sparse one, zeros included, as a short message may ask for any shape."""
    if message.dtype not in DTYPES:
        raise UserError(f"{label}: dtype {message.dtype} is not read here; send float32 or int64")
    dtype, shape = DTYPES[message.dtype], tuple(message.shape)
    if message.WhichOneof("layout") != "sparse_csr":
        values = read_array(message.dense, dtype, label)
        shape = shape or values.shape
        if any(size < 0 for size in shape) or values.size != math.prod(shape):
            raise UserError(f"{label} has {values.size:,} numbers for the shape {list(shape)}")
        return values.reshape(shape)
    if any(not 0 <= size <= most for size in shape) or math.prod(shape) > most:
        raise UserError(f"{label} has the shape {list(shape)}; at most {most:,} numbers fit")
    csr = message.sparse_csr
    values = read_array(csr.values, dtype, label)
    rows, columns = (
        read_array(part, np.int64, label) for part in (csr.crow_indices, csr.col_indices)
    )
    fits = len(shape) == 2 and len(rows) == shape[0] + 1 and len(columns) == len(values)
    # Neighbors are compared, not subtracted: differences of int64 wrap around, and np.repeat writes
    # outside of its result for counts whose sum does.
    fits = fits and rows[0] == 0 and rows[-1] == len(values) and (rows[:-1] <= rows[1:]).all()
    if not fits or (columns.size and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise UserError(f"{label}: its sparse indices do not fit the shape {list(shape)}")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def weigh(datum: Datum, kind: LossKind) -> np.ndarray:
    """Return the weight of each place, as the targets' shape."""
    if kind.weight_input in datum.inputs:
        return datum.inputs[kind.weight_input].astype(np.float64)
    if kind.counts_all:
        return np.ones(datum.inputs[TARGETS].shape)
    return (datum.inputs[ADVANTAGES] != 0).astype(np.float64)


class ScoredSequence(FlatSequence):
    """Datum as a document; tokens are equal only if their targets are, too."""

    @property
    def keys(self) -> np.ndarray:
        """[n]: token and target as one number."""
        return self.tokens.astype(np.int64) << 32 | self.streams["target"].astype(np.int64)


def lay_out_data(data: list[Datum], kind: LossKind, share: bool, longest: int) -> Packed:
    """Lay out the data of a request as trees of at most `longest` tokens; share: data that begin
    alike share these tokens. UserError for K targets without `share`."""
    trees: list[PackedTree] = []
    places: list[Any] = [None] * len(data)
    groups: dict[Any, list[int]] = {}
    for index, datum in enumerate(data):
        key: Any = index
        if share and datum.inputs[TARGETS].ndim == 1:
            key = f"begins with {datum.tokens[0]}"
        groups.setdefault(key, []).append(index)
    for members in groups.values():
        if data[members[0]].inputs[TARGETS].ndim == 2:
            if not share:
                raise UserError(
                    "several targets a place need trees: a model whose layers follow them, and no"
                    " loss_fn_config.trees 'off'"
                )
            places[members[0]] = (len(trees), _lay_out_several(data[members[0]], kind, trees))
            if len(trees[-1].tokens) > longest:
                raise UserError(
                    f"data[{members[0]}] has {len(trees[-1].tokens):,} tokens and targets together;"
                    f" at most {longest:,} fit a row"
                )
            continue
        for part in _split(data, members, longest) if share else [members]:
            _lay_out_group(data, part, kind, trees, places)
    return Packed(trees, places)


def _split(data: list[Datum], members: list[int], longest: int) -> list[list[int]]:
    """Split data into parts that fit a row even if they share nothing."""
    parts: list[list[int]] = []
    size = 0
    for index in members:
        length = len(data[index].tokens) + 1
        if not parts or size + length > longest:
            parts.append([])
            size = 0
        parts[-1].append(index)
        size += length
    return parts


def _flatten(datum: Datum, kind: LossKind) -> ScoredSequence:
    """Return a datum as a document of N + 1 tokens; the first is not scored."""
    targets = datum.inputs[TARGETS]

    def shift(values: np.ndarray, dtype: Any) -> np.ndarray:
        return np.concatenate([np.zeros(1, dtype), values.astype(dtype)])

    streams = {"target": shift(targets, np.int32)}
    for name in FIELDS.streams:
        if name in datum.inputs:
            streams[name] = shift(datum.inputs[name], np.float32)
    tokens = np.append(datum.tokens, np.int32(targets[-1])).astype(np.int32)
    return ScoredSequence(tokens, {TOTAL: shift(weigh(datum, kind), np.float64)}, streams)


def _lay_out_group(
    data: list[Datum], members: list[int], kind: LossKind, trees: list, places: list
) -> None:
    branches = [_flatten(data[index], kind) for index in members]
    share = "all" if kind.shares_trained else "context"
    [tree] = merge_prefixes(branches, share=share)  # all begin with the same token
    packed = lay_out(tree, "branch")
    for index, end in zip(members, tree.ends, strict=True):
        path = tree.root_path(end)
        slots = np.concatenate([np.flatnonzero(packed.node == node) for node in path])
        places[index] = (len(trees), slots[1:])
    trees.append(packed)


def _lay_out_several(datum: Datum, kind: LossKind, trees: list[PackedTree]) -> np.ndarray:
    """Lay out a datum with K targets a place; returns the indices [N, K] that are scored."""
    targets = datum.inputs[TARGETS]
    count, several = targets.shape
    width = several + 1
    # A place, then its targets, which only it precedes; the next place follows it, too.
    index = np.arange(count * width, dtype=np.int32)
    position, offset = np.divmod(index, width)
    is_place = offset == 0
    prev = np.where(is_place, (position - 1) * width, position * width)
    prev[0] = -1
    scored = np.arange(count)[:, None] * width + 1 + np.arange(several)

    def spread(values: np.ndarray, dtype: Any) -> np.ndarray:
        result = np.zeros(len(index), dtype)
        result[scored] = values
        return result

    tokens = spread(targets, np.int32)
    tokens[is_place] = datum.tokens
    trees.append(
        PackedTree(
            tokens=tokens,
            positions=(position + ~is_place).astype(np.int32),
            prev=prev.astype(np.int32),
            until=np.where(is_place, len(index), index + 1).astype(np.int32),
            owner=np.zeros(len(index), np.int32),
            node=position.astype(np.int32),
            weights={TOTAL: spread(weigh(datum, kind), np.float64)},
            streams={"target": spread(targets, np.int32)},
            num_branches=1,
        )
    )
    return scored
