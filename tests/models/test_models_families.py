"""Every further family against transformers in torch: logits and all gradients of a document and
of a packed tree whose branches torch reads alone; folders; decoding.

A family is a tiny config in one of the files families_*.py. Their gradients are written with
save_pretrained and read as weights are, so that no table of names is needed here.
"""

import copy
import importlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="parity needs torch, which this environment has not")

import jax
import jax.numpy as jnp
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file
from test_models_parity import make_torch, relative_error
from tiny_models import SIZES, check_decoding, documents

from jaxtrain.batch import Batch
from jaxtrain.models import build
from jaxtrain.parallel.mesh import make_mesh

FILES = sorted(path.stem for path in Path(__file__).parent.glob("families_*.py"))
MODULES = [importlib.import_module(name) for name in FILES]
FAMILIES = {
    name: {key: value for key, value in {**SIZES, **raw}.items() if value is not None}
    for module in MODULES
    for name, raw in module.FAMILIES.items()
}
"""A value None in a config takes out what SIZES has."""
DEFAULT = {name for m in MODULES for name in getattr(m, "DEFAULT", ())}
"""Those that run in every test; together they have all blocks that the others are made of."""
SHARDED = {name: sizes for m in MODULES for name, sizes in getattr(m, "SHARDED", {}).items()}

T, PREFIX, BRANCHES, LAST = 48, 16, (14, 10), 8
"""A row: a document, or a prefix with two branches and a document behind them."""


def cases(names):
    return [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.slow) for n in sorted(names)]


def make_batch() -> tuple[Batch, list[tuple[int, np.ndarray, int]]]:
    """[2, T] and its sequences: (row, the places of its tokens, how many of them an earlier one
    has, too)."""
    tokens = np.stack(documents(1, T, T))
    positions = np.tile(np.arange(T, dtype=np.int32), (2, 1))
    prev = positions - 1
    until = np.full((2, T), T, np.int32)
    sequences = [(0, np.arange(T), 0)]
    until[1, :PREFIX] = T - LAST
    start = PREFIX
    for number, length in enumerate(BRANCHES):
        stop = start + length
        prev[1, start] = PREFIX - 1
        positions[1, start:stop] = np.arange(PREFIX, PREFIX + length)
        until[1, start:stop] = stop
        places = np.concatenate([np.arange(PREFIX), np.arange(start, stop)])
        sequences.append((1, places, PREFIX if number else 0))
        start = stop
    prev[1, start] = -1
    positions[1, start:] = np.arange(LAST)
    sequences.append((1, np.arange(start, T), 0))
    weights = {"nll": jnp.asarray((prev >= 0).astype(np.float32))}
    fields = (jnp.asarray(field) for field in (tokens, positions, prev, until))
    return Batch(*fields, weights=weights), sequences


def read_flat(folder) -> dict[str, np.ndarray]:
    found = {}
    for file in Path(folder).glob("*.safetensors"):
        found |= load_file(file)
    return found


def leaves(model) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in flat}


@pytest.mark.parametrize("name", cases(FAMILIES))
def test_it_computes_and_stores_what_transformers_does(name, tmp_path):
    theirs = make_torch(FAMILIES[name])
    theirs.save_pretrained(tmp_path / "theirs")
    model = build.load(tmp_path / "theirs")
    config = build.read_config(tmp_path / "theirs")

    # Folders: the same tensors, bit by bit, and a config.json that says the same to both.
    build.save(model, config, tmp_path / "ours")
    wanted, found = read_flat(tmp_path / "theirs"), read_flat(tmp_path / "ours")
    assert {k: v.dtype for k, v in found.items()} == {k: v.dtype for k, v in wanted.items()}
    for tensor, array in wanted.items():
        assert found[tensor].tobytes() == array.tobytes(), tensor
    assert build.read_config(tmp_path / "ours") == config
    said = [
        transformers.AutoConfig.from_pretrained(tmp_path / which).to_dict()
        for which in ("ours", "theirs")
    ]
    aside = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
    for one in said:
        for key in [key for key, value in one.items() if key in aside or value is None]:
            del one[key]
    assert said[0] == said[1]

    # The loss is a random linear function of the logits: no direction of theirs can go unseen.
    batch, sequences = make_batch()
    vocab = config.vocab_size
    probe = np.random.default_rng(2).standard_normal((2, T, vocab)).astype(np.float32)
    graphdef, state = nnx.split(model)

    def loss(state):
        logits = nnx.merge(graphdef, state)
        logits = logits.logits(logits.hidden(batch).hidden)
        return (logits * probe).sum() / probe.size, logits

    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
    tokens, logits = np.asarray(batch.tokens), np.asarray(logits)
    for row, places, seen in sequences:
        out = theirs(torch.from_numpy(tokens[row, places][None]).long(), use_cache=False).logits[0]
        # 1e-4 of the largest value: float32 sums in another order, through some layers and back.
        assert relative_error(logits[row, places], out.detach().numpy()) < 1e-4, (row, len(places))
        mine = torch.from_numpy(probe[row, places[seen:]])
        (out[seen:] * mine).sum().div(probe.size).backward()

    shell = copy.deepcopy(theirs)
    with torch.no_grad():
        for own, other in zip(theirs.parameters(), shell.parameters(), strict=True):
            other.copy_(torch.zeros_like(own) if own.grad is None else own.grad)
        for buffer in shell.buffers():  # such as a bias that moves the choice of experts alone
            buffer.zero_()
    shell.save_pretrained(tmp_path / "grads")
    their_grads = leaves(build.load(tmp_path / "grads"))
    our_grads = leaves(grads)
    assert set(our_grads) == set(their_grads)
    scale = max(np.abs(grad).max() for grad in their_grads.values())
    for path, grad in their_grads.items():
        if np.abs(grad).max() < 1e-6 * scale:  # none, or rounding noise as of a bias on keys
            assert np.abs(our_grads[path]).max() < 1e-5 * scale, path
        else:
            assert relative_error(our_grads[path], grad) < 1e-4, path

    # Decoding in chunks through the cache, windows going round.
    chunk, text = 4, tokens[:1]
    cache, decode = model.init_cache(1, T), jax.jit(type(model).decode)
    for start in range(0, T, chunk):
        hidden, cache, _ = decode(model, jnp.asarray(text[:, start : start + chunk]), cache)
        np.testing.assert_allclose(
            model.logits(hidden)[0],
            logits[0, start : start + chunk],
            atol=1e-4 * float(np.abs(logits[0]).max()),
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_prefill_and_steps_equal_full_forward(name):
    """Prompts of several lengths in one batch, and rows that pause."""
    check_decoding(FAMILIES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHARDED))
def test_sharded_gradients_equal_one_device(name):
    """In float64, so that nothing but the order of sums differs."""
    with jax.enable_x64(True):
        config = build.config_from_hf(FAMILIES[name])
        batch, _ = make_batch()
        rows = jax.tree.map(lambda x: jnp.concatenate([x, x[::-1]]), batch)

        def run(mesh):
            model = build.init(config, 0, mesh=mesh, param_dtype="float64", dtype="float64")
            graphdef, state = nnx.split(model)

            def loss(state):
                model = nnx.merge(graphdef, state)
                return (model.logits(model.hidden(rows).hidden) ** 2).mean()

            value, grads = jax.jit(jax.value_and_grad(loss))(state)
            return float(value), leaves(grads)

        value, grads = run(None)
        for sizes in SHARDED[name] if isinstance(SHARDED[name], list) else [SHARDED[name]]:
            mesh = make_mesh(**sizes)
            with jax.set_mesh(mesh):
                found, found_grads = run(mesh)
            np.testing.assert_allclose(found, value, rtol=1e-10)
            for path, grad in grads.items():
                error = np.abs(found_grads[path] - grad).max()
                assert error <= 1e-9 * max(np.abs(grad).max(), 1e-6), (sizes, path)
