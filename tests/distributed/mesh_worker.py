"""Run by test_distributed_exactness.py with 8 fake devices: one step of many models on many meshes.

Prints a JSON line for each case: the loss, and the largest difference of loss and gradients from
one device, relative to the largest gradient of the same parameter.
"""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.core.step import init_state, make_step
from jaxtrain.core.weights import abstract_params, open_params, split_trained
from jaxtrain.data.comparisons.pairs import PairTrees
from jaxtrain.data.comparisons.ranked import Ranked, RankedAnswer, RankedPair
from jaxtrain.data.packing.pack import Fields, build_batch, lay_out, stack_batches
from jaxtrain.data.packing.tree import build_tree
from jaxtrain.distributed.feed import feed
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.methods.preference.loss import PreferenceObjective, preference_loss
from jaxtrain.models import families

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_models import RAW

MESHES = {
    "context": {"context": 8},
    "hsdp": {"data": 2, "fsdp": 4},
    "fsdp+tensor": {"fsdp": 4, "tensor": 2},
    "context+tensor": {"context": 4, "tensor": 2},
    "expert+context": {"expert": 2, "context": 4},
    "all": {"fsdp": 2, "context": 2, "tensor": 2},
}
ROWS, TOKENS = 16, 48


def keep_gradients() -> optax.GradientTransformation:
    """An optimizer that changes nothing and whose state is the last gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params: (jax.tree.map(jnp.zeros_like, params), grads),
    )


def make_batch(kind: str, microsteps: int):
    """[A, B, T] of packed documents, or of random trees and documents."""
    rng = np.random.default_rng(7)
    rows = []
    if kind == "pairs":
        return make_pairs(rng, microsteps)
    for _ in range(ROWS):
        row, remaining = [], TOKENS
        while remaining >= 6:
            size = min(int(rng.integers(4, 24)), remaining)
            row.append(lay_out(make_tree(rng, size, branches=kind == "trees")))
            remaining -= size
        rows.append(row)
    size = ROWS // microsteps
    return stack_batches([build_batch(rows[i * size :][:size], TOKENS) for i in range(microsteps)])


def make_pairs(rng: np.random.Generator, microsteps: int):
    """[A, B, T] of a prompt with two answers in each row, half of them as flat rows."""
    rows = []
    for number in range(ROWS):
        answers = [
            RankedAnswer(rng.integers(1, 97, n).astype(np.int32), np.ones(n))
            for n in rng.integers(2, 9, 2)
        ]
        prompt = rng.integers(1, 97, int(rng.integers(2, 12))).astype(np.int32)
        tree = PairTrees(number % 2 > 0)(Ranked(prompt, tuple(answers), (RankedPair(1, 0),)))
        rows.append([lay_out(tree, "branch")])
    streams = {"chosen": np.int32, "rejected": np.int32}
    size, fields = ROWS // microsteps, Fields(("preference", "score"), streams)
    return stack_batches(
        [build_batch(rows[i * size :][:size], TOKENS, fields) for i in range(microsteps)]
    )


LOSSES = {
    "preference": functools.partial(
        preference_loss,
        objective=PreferenceObjective(
            (("sigmoid", 1.0), ("ipo", 0.01)), reference=False, weighted=True
        ),
    ),
    "nll": nll_loss,
}


def make_tree(rng: np.random.Generator, size: int, branches: bool):
    """A chain, or a tree of a few nodes in depth-first order, of `size` tokens."""
    cuts = sorted({0, *rng.integers(1, size, 4).tolist(), size}) if branches else [0, size]
    parts, path = [], [-1]
    for index, (start, stop) in enumerate(zip(cuts, cuts[1:], strict=False)):
        del path[int(rng.integers(min(2, len(path)), len(path) + 1)) :]  # up to some ancestor
        tokens = rng.integers(1, 97, stop - start).astype(np.int32)
        parts.append((path[-1], tokens, rng.integers(0, 2, stop - start), ""))
        path.append(index)
    return build_tree(parts)


def run(model: str, batch, mesh, adapter_kind: str):
    """(loss, {path: gradient}) of one step on a mesh."""
    architecture = families.config_from_hf(RAW[model])
    adapter = None
    if adapter_kind:
        slots = choose_slots(
            find_linears(architecture),
            ("all-linear",),
            LoRASpec(4, 8.0, dora=adapter_kind == "dora"),
            {},
            {},
        )
        adapter = Adapter(slots, ("embed.embedding",))
    parts = ModelBundle(None, architecture, mesh, None, {"remat": "full"}, adapter)
    with jax.set_mesh(mesh):
        params = open_params(parts, seed=3)
        for path, value in params.items():
            if path.endswith("adapter.b"):  # zero would hide the gradient of A
                noise = np.random.default_rng(len(path)).normal(0, 0.1, value.shape)
                params[path] = jax.device_put(noise.astype(np.float32), value.sharding)
        trained, frozen = split_trained(params, adapter)
        optimizer = keep_gradients()
        name = "preference" if "preference" in batch.weights else "nll"
        step = make_step(abstract_params(parts)[1], LOSSES[name], {name: 1.0}, optimizer, None)
        state, output = step(init_state(trained, optimizer), feed(batch, mesh), frozen)
        loss, _ = output.metrics["loss"]
        return float(loss), jax.tree.map(np.asarray, state.opt_state)


def compare(name: str, model: str, kind: str, adapter: str, microsteps: int, meshes: list[str]):
    reference = run(model, make_batch(kind, 1), make_mesh(jax.devices()[:1]), adapter)
    for mesh_name in meshes:
        sizes = MESHES[mesh_name]
        mesh = make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
        steps = microsteps if ROWS % (8 * microsteps) == 0 else 1
        loss, grads = run(model, make_batch(kind, steps), mesh, adapter)
        assert grads.keys() == reference[1].keys()
        errors = {
            path: float(np.abs(value - reference[1][path]).max() / np.abs(reference[1][path]).max())
            for path, value in grads.items()
        }
        worst = max(errors, key=errors.get)
        line = {"case": name, "mesh": mesh_name, "loss": loss, "one": reference[0], "worst": worst}
        print(json.dumps({**line, "error": errors[worst]}), flush=True)


CASES = {
    "documents": ("qwen3", "documents", "", 2, ["all"]),
    "trees": ("qwen3_yarn", "trees", "", 2, list(MESHES)),
    "pairs": ("qwen3_even", "pairs", "", 2, ["context", "all"]),
    "documents, DoRA": ("llama_bias", "documents", "dora", 2, ["all"]),
    "biases and windows, trees": ("qwen2_window", "trees", "", 1, ["all"]),
}
"""(model, rows, adapter, microsteps, meshes) by the case's name."""


if __name__ == "__main__":
    # Tables that the tensor axis divides, beside the odd ones.
    RAW["qwen3_even"] = {**RAW["qwen3"], "vocab_size": 104, "tie_word_embeddings": False}
    for name in sys.argv[1:]:
        compare(name, *CASES[name])
