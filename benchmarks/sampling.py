"""Speed of the local sampler: prompts read, tokens drawn, and how far from the memory's bound.

python benchmarks/sampling.py --model qwen3-0.6b --rows 128 --prompt 256 --new 1024
python benchmarks/sampling.py --weights int8 --cache int8

Random weights and prompts, bf16; all answers run to their limit. --weights and --cache are config
keys rollout.local.weights and .cache: what makes the local engine's model makes this one.
Everything is compiled by a first, short round.

prompt ms     reading all prompts and drawing the first token
ms/token      a token of all rows, in the first and the last chunk and on average
tok/s         answers' tokens / whole time, prompts included
bound ms      weights and filled slots read once at 4.8 TB/s (H200), averaged over the answer
"""

import argparse
import contextlib
import json
import time
from pathlib import Path

import jax
import numpy as np
from step_work import MODELS

from jaxtrain.core.bundle import ModelBundle
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.local.slots import CHUNK
from jaxtrain.generation.local.weights import Copier
from jaxtrain.layers.attention import store_cache
from jaxtrain.models import build, families
from jaxtrain.models.parameters import split_model

BYTES_PER_SECOND = 4.8e12


def open_model(name: str, weights: str, cache: str, stacked: bool, mesh: jax.sharding.Mesh):
    """The sampler's model of random weights; stacked: with its layers as one array."""
    config = families.config_from_hf(MODELS[name])
    options = {"param_dtype": "bfloat16", "dtype": "bfloat16"}
    model = build.init(config, 0, **options)
    if stacked:
        store_cache(model, cache)
        return model
    params, rebuild = split_model(model)
    copy = Copier(ModelBundle(None, config, mesh, None, options), mesh, weights, cache)
    return copy.build(copy(params), rebuild)


def measure(model, mesh, rows: int, groups: int, prompt: int, new: int, trace: Path | None) -> dict:
    """Numbers of one round of `rows` answers to `groups` different prompts."""
    vocab = model.head().shape[0]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, prompt).tolist() for _ in range(groups)]
    sampler = LocalSampler(model, (), max_len=prompt + new, max_batch=rows, mesh=mesh)
    for _ in range(2):
        requests = [
            sampler.request(prompts[i * groups // rows], Sampling(**DRAW | {"max_new_tokens": new}))
            for i in range(rows)
        ]
        for request in requests:
            sampler.add(request)
        seconds = []
        while sampler.busy:
            tracing = trace is not None and len(seconds) == new // CHUNK // 2
            with jax.profiler.trace(str(trace)) if tracing else contextlib.nullcontext():
                start = time.perf_counter()
                sampler.step()
                seconds.append(time.perf_counter() - start)
    assert all(len(request.tokens) == new for request in requests)
    # A step of fewer tokens at the end, and prompts in the first, would blur the rate.
    chunks = sorted(seconds[1 : new // CHUNK])
    weights = sum(x.nbytes for x in jax.tree.leaves(model))
    cache = jax.eval_shape(lambda: model.init_cache(1, 1))
    slot = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.states))
    bound = (weights + rows * (prompt + new / 2) * slot) / BYTES_PER_SECOND
    mean = sum(chunks) / len(chunks)
    return {
        "rows": rows,
        "prompts": groups,
        "prompt": prompt,
        "new": new,
        "prompt ms": 1e3 * (seconds[0] - seconds[1]),
        "first ms/token": 1e3 * seconds[1] / CHUNK,
        "last ms/token": 1e3 * seconds[new // CHUNK - 1] / CHUNK,
        "ms/token": 1e3 * mean / CHUNK,
        "bound ms": 1e3 * bound,
        "tok/s": rows * new / sum(seconds),
        "peak GiB": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30,
    }


DRAW = {"temperature": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=[128])
    parser.add_argument("--prompts", type=int, default=8, help="different prompts of a round")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=1024, help="tokens of an answer")
    parser.add_argument("--stacked", action="store_true", help="layers stored as one array")
    parser.add_argument("--weights", default="default", choices=["default", "int8"])
    parser.add_argument("--cache", default="default", choices=["default", "int8", "fp8"])
    parser.add_argument("--trace", type=Path, help="folder for a profile of one chunk")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    if args.stacked and args.weights != "default":
        parser.error("--stacked is for weights as they are")
    mesh = make_mesh(jax.devices()[:1])
    model = open_model(args.model, args.weights, args.cache, args.stacked, mesh)
    stored = {"weights": args.weights, "cache": args.cache}
    actual = []
    for rows in args.rows:
        groups = min(args.prompts, rows)
        actual.append(
            stored | measure(model, mesh, rows, groups, args.prompt, args.new, args.trace)
        )
        cells = (
            f"{name} {v if isinstance(v, str) else f'{round(v, 2):g}'}"
            for name, v in actual[-1].items()
        )
        print(args.model, "  ".join(cells))
    if args.out:
        device = jax.devices()[0].device_kind
        args.out.write_text(json.dumps({"device": device, "cases": actual}, indent=1) + "\n")


if __name__ == "__main__":
    main()
