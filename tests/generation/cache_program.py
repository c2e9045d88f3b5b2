"""Use of the KV cache by the compiled program of a chunk of tokens.

`python cache_program.py` compiles it for an H200 that is not there and prints JSON; the test on the
CPU calls `describe`.
"""

import json
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxtrain.generation.local import slots, speculation
from jaxtrain.generation.local.token_sampling import DrawKind
from jaxtrain.layers.attention import store_cache
from jaxtrain.layers.kv_cache import Stored
from jaxtrain.models import build, families

LAYERS = 4
RAW = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "attention_bias": False,
}


def compile_chunk(scan: bool, dtype: str, sharding=None, stored: Stored = "default"):
    """(decode_chunk for 8 rows of 2,048 slots, shape of one layer's k); stored: how it is kept."""
    config = families.config_from_hf(RAW)
    model = build.abstract(config, param_dtype=dtype, dtype=dtype, scan_layers=scan)
    store_cache(model, stored)
    return compile_rows(slots.decode_chunk, model, sharding)


def compile_cycles(dtype: str, sharding=None):
    """(speculate_chunk with a DFlash draft for the same rows, shape of one of the target's k)."""
    local_value = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "block_size": 8,
        "num_target_layers": LAYERS,
        "dflash_config": {"mask_token_id": 500, "target_layer_ids": [0, 2]},
        "tie_word_embeddings": False,
    }
    models = [
        jax.eval_shape(
            lambda model: model.unstack(),
            build.abstract(families.config_from_hf(raw), param_dtype=dtype, dtype=dtype),
        )
        for raw in (RAW, {**RAW, **local_value})
    ]
    return compile_rows(speculation.speculate_chunk, speculation.DraftedModel(*models), sharding)


def compile_rows(chunk, model, sharding=None):
    """(a chunk of 8 rows of 2,048 slots, shape of one layer's k)."""
    rows = jax.eval_shape(lambda model: slots.empty_rows(model, B=8, S=2048, E=1), model)
    over = slots.ChunkEnd(*[jax.ShapeDtypeStruct((), jnp.int32)] * 2)
    shapes = (model, rows, jax.ShapeDtypeStruct((8,), bool), over)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
    traced = chunk.trace(*placed, DrawKind(random=True, truncate=False))
    cache = getattr(rows.cache, "target", rows.cache)
    return traced.lower().compile(), cache.states[0].k


def describe(compiled, cache) -> dict:
    """List the operations that allocate another array of the size of a layer's keys, and memory:
    {made, temp, cache}; the latter of all layers' keys."""
    size = cache.size
    created = []
    for line in compiled.as_text().splitlines():
        actual = re.match(r"\s*(?:ROOT )?%?\S+ = \w+\[([\d,]+)\]\S* ([\w-]+)\(", line)
        if actual and math.prod(map(int, actual[1].split(","))) == size:
            created.append(actual[2])
    temp = compiled.memory_analysis().temp_size_in_bytes
    return {
        "made": sorted(set(created)),
        "temp": temp,
        "cache": LAYERS * size * cache.dtype.itemsize,
    }


def main():
    sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
    from sm90a import make_mesh

    mesh = make_mesh()
    named_sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        for scan in (True, False):
            print(
                json.dumps(describe(*compile_chunk(scan, "bfloat16", named_sharding))), flush=True
            )
        for stored in ("int8", "fp8"):
            actual = describe(*compile_chunk(False, "bfloat16", named_sharding, stored))
            print(json.dumps(actual), flush=True)
        print(json.dumps(describe(*compile_cycles("bfloat16", named_sharding))), flush=True)


if __name__ == "__main__":
    main()
