"""A tiny model to train on, and requests as the `tinker` client writes them."""

import numpy as np

from jaxtrain.config import validate_config
from jaxtrain.core.roles import ModelSnapshot, Roles
from jaxtrain.methods.registry import make_task
from jaxtrain.training_api import wire
from jaxtrain.training_api.trainer import Base

ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def make_config(**sections):
    table = {
        "run": {"max_steps": 1},
        "model": {"tokenizer": "builtin", "compute_dtype": "float32", "architecture": ARCHITECTURE},
        "parallel": {"data": 1, "fsdp": -1},
        "data": {"datasets": [{"path": "none"}], "sequence_len": 256},
    }
    return validate_config({**table, **sections}, "toy")


def open_base(**sections):
    config = make_config(**sections)
    roles = Roles(make_task(config).roles)
    weights, frozen, copies = roles.open(0)
    return Base(config, ModelSnapshot(roles, {**frozen, **copies, **weights}, 0), 200)


def write_tensor(message, values):
    values = np.asarray(values)
    dtype = np.int64 if np.issubdtype(values.dtype, np.integer) else np.float32
    message.dense = values.astype(dtype).tobytes()
    message.dtype = wire.INT64 if dtype == np.int64 else wire.FLOAT32
    message.shape.extend(values.shape)


def write_request(model_id, seq_id, data, loss="cross_entropy", settings=None, forward_only=False):
    """data: (tokens, {input: values}) each."""
    message = wire.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn=loss, forward_only=forward_only
    )
    for tokens, inputs in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
        for name, values in inputs.items():
            write_tensor(datum.loss_fn_inputs.add(key=name).value, values)
    for name, value in (settings or {}).items():
        entry = message.loss_fn_config_v2.add(key=name)
        setattr(entry.value, "text" if isinstance(value, str) else "number", value)
    return message.SerializeToString()


def read_output(raw):
    """(log-probs by datum, metrics)."""
    message = wire.ForwardBackwardOutput()
    message.ParseFromString(raw)
    logprobs = []
    for record in message.loss_fn_outputs:
        (field,) = record.fields
        values = np.frombuffer(field.value.data, np.float32)
        offsets = np.frombuffer(field.value.offsets, np.int64) // 4
        shape = tuple(field.value.trailing_shape)
        logprobs += [
            values[a:b].reshape(-1, *shape)
            for a, b in zip(offsets[:-1], offsets[1:], strict=True)
        ]
    return logprobs, {entry.key: entry.value for entry in message.metrics}


def draw_documents(count, seed=0, longest=40):
    """Documents [n + 1] of random ids and the weights of their targets [n]."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        length = int(rng.integers(4, longest))
        weights = rng.integers(0, 2, length).astype(np.float32)
        weights[-1] = 1
        documents.append((rng.integers(4, 512, length + 1).astype(np.int32), weights))
    return documents


def as_data(documents):
    return [(ids[:-1], {"target_tokens": ids[1:], "weights": w}) for ids, w in documents]
