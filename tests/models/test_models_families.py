"""Every family against transformers in torch: logits and all gradients of a document and
of a packed tree whose branches torch reads alone; folders; decoding.

A family is a tiny config in one of the files families_*.py. Their gradients are written with
save_pretrained and read as weights are, so that no table of names is needed here.
"""

import copy
import dataclasses
import importlib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="parity needs torch, which this environment has not")

import jax
import jax.numpy as jnp
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file
from tiny_models import SIZES, check_decoding, compute_logits, documents, pack
from tiny_vision import VISION

from jaxtrain.adapters.fused import find_tensors
from jaxtrain.batch import Batch
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.distributed.sharding import shardings
from jaxtrain.errors import UserError
from jaxtrain.models import ARCHITECTURES, build, families, loading, saving

FILES = sorted(path.stem for path in Path(__file__).parent.glob("families_*.py"))
MODULES = [importlib.import_module(name) for name in FILES]
FAMILIES = {
    name: {key: value for key, value in {**SIZES, **raw}.items() if value is not None}
    for module in MODULES
    for name, raw in module.FAMILIES.items()
}
"""A value None in a config takes out what SIZES has."""
DEFAULT = {name for m in MODULES for name in getattr(m, "DEFAULT", ())}
"""Families in the quick tests: one of each kind of attention, state and mixture of experts."""
CHOSEN = {name for m in MODULES for name in getattr(m, "CHOSEN", ())}
"""Families in the slow tests: one of what no DEFAULT has; all others are in the thorough tests."""
DECODED = {name for m in MODULES for name in getattr(m, "DECODED", ())}
"""Those whose caches are not like those of others."""
SHARDED = {name: sizes for m in MODULES for name, sizes in getattr(m, "SHARDED", {}).items()}

LONG = {name for m in MODULES for name in getattr(m, "LONG", ())}
"""Those with chunks of 64 tokens."""


CHOICE_BIASES = ("e_score_correction_bias", "expert_bias")
"""Mostly negative, so that a candidate of a closed group would win if it were at 0."""


def cases(names, quick=(), slow=()):
    return [
        pytest.param(
            name,
            marks=()
            if name in quick
            else pytest.mark.slow
            if name in slow
            else pytest.mark.thorough,
        )
        for name in sorted(names)
    ]


def make_batch(name) -> tuple[Batch, list[tuple[int, np.ndarray, int]]]:
    """[2, T] and its sequences: (row, the places of its tokens, how many of them an earlier one
    has, too). One row is a document, the other a prefix with two branches and a document."""
    T = 96 if name in LONG else 48
    PREFIX, BRANCHES, LAST = T // 3, (14 * T // 48, 10 * T // 48), T // 6
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


def make_torch(raw, seed=0):
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**raw)
    auto = transformers.AutoModelForCausalLM
    if "vision_config" in raw or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation="eager")
    with torch.no_grad():  # norms and biases start at 1 and 0, which would hide a mix-up
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # as drawn, heads forget within a token or two
                parameter.uniform_(-4.6, 0.4)
            elif name.endswith("input_projection_weight"):  # drawn as zeros
                parameter.normal_(std=0.3)
            elif name.endswith("position_embedding_table"):  # drawn as ones
                parameter.normal_(std=0.1)
            elif parameter.ndim == 1 or name.endswith("bias"):  # experts' have more dims
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(CHOICE_BIASES):
                buffer.uniform_(-0.2, 0.1)
            elif name.endswith(("layer_scalar", "std_scale")):
                buffer.uniform_(0.5, 1.5)
            elif name.endswith("std_bias"):
                buffer.normal_(std=0.3)
            elif name.endswith(("q_proj.input_max", "up_proj.output_min", "v_proj.input_min")):
                buffer.fill_(0.7 if name.endswith("max") else -0.6)  # the others are infinite
    return model.float().eval()


def relative_error(actual_values, reference):
    scale = np.abs(reference).max()
    return np.abs(np.asarray(actual_values) - reference).max() / scale


def read_flat(folder) -> dict[str, np.ndarray]:
    actual = {}
    for file in Path(folder).glob("*.safetensors"):
        actual |= load_file(file)
    return actual


def leaves(model) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in flat}


def within_layers(name: str) -> str:
    """Return what follows "layers." or "h." in a tensor's name."""
    return re.split(r"\.(?:layers|h)\.", name, maxsplit=1)[-1]


def check_tensors(reference, config, params) -> None:
    """Check that tensors which bitsandbytes would quantize as one are treated as one here, row by
    row."""
    try:
        parts = find_tensors(config)
    except UserError as reason:
        assert config.model_type in ("gpt2", "gpt_oss", "llama4") and "inputs before" in str(reason)
        return
    expected = {within_layers(name): value for name, value in reference.named_parameters()}
    for path, part in parts.items():
        tensor = expected[within_layers(part.tensor)].detach().numpy()
        kernel = params[f"{path}.kernel"][0].swapaxes(-1, -2)
        assert tensor.reshape(part.num, -1, tensor.shape[-1]).shape[1] == part.total, path
        rows = tensor[..., part.rows, :]
        np.testing.assert_array_equal(kernel, rows, err_msg=path)


def test_no_family_is_left_out():
    local_result = {raw["model_type"] for raw in (FAMILIES | VISION).values()}
    for name in ARCHITECTURES:
        config = families.find_family(name).Config
        assert local_result & {config.model_type, getattr(config, "text_type", "")}, name


@pytest.mark.parametrize("name", cases(FAMILIES, DEFAULT, CHOSEN))
def test_it_computes_and_stores_what_transformers_does(name, tmp_path):
    reference = make_torch(FAMILIES[name])
    reference.save_pretrained(tmp_path / "theirs")
    model = loading.load(tmp_path / "theirs")
    config = families.read_config(tmp_path / "theirs")

    check_tensors(reference, config, leaves(model))
    # Folders: the same tensors, bit by bit, and a config.json that says the same to both.
    saving.save(model, config, tmp_path / "ours")
    expected, actual = read_flat(tmp_path / "theirs"), read_flat(tmp_path / "ours")
    assert {k: v.dtype for k, v in actual.items()} == {k: v.dtype for k, v in expected.items()}
    for tensor, array in expected.items():
        assert actual[tensor].tobytes() == array.tobytes(), tensor
    assert families.read_config(tmp_path / "ours") == config
    output = [
        transformers.AutoConfig.from_pretrained(tmp_path / selection).to_dict()
        for selection in ("ours", "theirs")
    ]
    aside = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
    for entry in output:
        for key in [key for key, value in entry.items() if key in aside or value is None]:
            del entry[key]
    extra = output[0].keys() - output[1].keys()  # what vLLM asks for
    assert extra <= type(config).fixed.keys()
    assert {key: value for key, value in output[0].items() if key not in extra} == output[1]

    # The loss is a random linear function of the logits: no direction of theirs can go unseen.
    batch, sequences = make_batch(name)
    T, vocab = batch.tokens.shape[1], config.vocab_size
    probe = np.random.default_rng(2).standard_normal((2, T, vocab)).astype(np.float32)
    graphdef, state = nnx.split(model)

    def loss(state):
        logits = nnx.merge(graphdef, state)
        logits = logits.logits(logits.hidden(batch).hidden)
        return (logits * probe).sum() / probe.size, logits

    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
    tokens, logits = np.asarray(batch.tokens), np.asarray(logits)
    for row, places, seen in sequences:
        out = reference(torch.from_numpy(tokens[row, places][None]).long(), use_cache=False).logits[
            0
        ]
        # 1e-4 of the largest value: float32 sums in another order, through some layers and back.
        assert relative_error(logits[row, places], out.detach().numpy()) < 1e-4, (row, len(places))
        local_copy = torch.from_numpy(probe[row, places[seen:]])
        (out[seen:] * local_copy).sum().div(probe.size).backward()

    shell = copy.deepcopy(reference)
    with torch.no_grad():
        for local_value, second in zip(reference.parameters(), shell.parameters(), strict=True):
            second.copy_(
                torch.zeros_like(local_value) if local_value.grad is None else local_value.grad
            )
        for buffer in shell.buffers():  # such as a bias that moves the choice of experts alone
            buffer.zero_()
    shell.save_pretrained(tmp_path / "grads")
    their_grads = leaves(loading.load(tmp_path / "grads"))
    our_grads = leaves(grads)
    assert set(our_grads) == set(their_grads)
    scale = max(np.abs(grad).max() for grad in their_grads.values())
    for path, grad in their_grads.items():
        if np.abs(grad).max() < 1e-6 * scale:  # none, or rounding noise as of a bias on keys
            assert np.abs(our_grads[path]).max() < 1e-5 * scale, path
        else:
            assert relative_error(our_grads[path], grad) < 1e-4, path

    # Decoding in chunks through the cache, windows going round.
    chunk, text = T // 12, tokens[:1]
    cache, decode = model.init_cache(1, T), jax.jit(type(model).decode)
    for start in range(0, T, chunk):
        hidden, cache, *_ = decode(model, jnp.asarray(text[:, start : start + chunk]), cache)
        np.testing.assert_allclose(
            model.logits(hidden)[0],
            logits[0, start : start + chunk],
            atol=1e-4 * float(np.abs(logits[0]).max()),
        )


@pytest.mark.parametrize("name", cases(DECODED, slow=["nemotron_h_moe"]))
def test_prefill_and_steps_equal_full_forward(name):
    """Prompts of several lengths in one batch, and rows that pause."""
    check_decoding(FAMILIES[name])


@pytest.mark.parametrize("name", cases(SHARDED, slow=["ministral3"]))
def test_sharded_gradients_equal_one_device(name):
    """In float64, so that nothing but the order of sums differs."""
    with jax.enable_x64(True):
        config = families.config_from_hf(FAMILIES[name])
        batch, _ = make_batch(name)
        rows = jax.tree.map(lambda x: jnp.concatenate([x, x[::-1]]), batch)

        model = build.init(config, 0, param_dtype="float64", dtype="float64")
        graphdef, state = nnx.split(model)

        def run(state):
            def loss(state):
                model = nnx.merge(graphdef, state)
                return (model.logits(model.hidden(rows).hidden) ** 2).mean()

            value, grads = jax.jit(jax.value_and_grad(loss))(state)
            return float(value), leaves(grads)

        value, grads = run(state)
        for sizes in SHARDED[name] if isinstance(SHARDED[name], list) else [SHARDED[name]]:
            mesh = make_mesh(**sizes)
            with jax.set_mesh(mesh):
                actual, found_grads = run(jax.device_put(state, shardings(state, mesh)))
            np.testing.assert_allclose(actual, value, rtol=1e-10)
            for path, grad in grads.items():
                error = np.abs(found_grads[path] - grad).max()
                assert error <= 1e-9 * max(np.abs(grad).max(), 1e-6), (sizes, path)


@pytest.mark.slow
def test_folders_of_gpt2_have_no_head_and_masks(tmp_path):
    reference = make_torch(FAMILIES["gpt2"])
    reference.save_pretrained(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "bare")
    tensors = {
        name.removeprefix("transformer."): value
        for name, value in read_flat(tmp_path / "whole").items()
    }
    tensors["h.0.attn.bias"] = np.ones((1, 1, 128, 128), np.float32)
    save_file(tensors, tmp_path / "bare" / "model.safetensors")
    whole, bare = (leaves(loading.load(tmp_path / name)) for name in ("whole", "bare"))
    assert whole.keys() == bare.keys()
    for path, value in whole.items():
        np.testing.assert_array_equal(bare[path], value)


@pytest.mark.slow
def test_losses_and_added_tokens_know_the_bias_of_a_head():
    config = families.config_from_hf(FAMILIES["phi"])
    model = build.init(config, 0)
    bias = np.random.default_rng(0).standard_normal(config.vocab_size).astype(np.float32)
    model.lm_head.bias.set_value(jnp.asarray(bias))
    batch, _ = make_batch("phi")
    logp = jax.nn.log_softmax(model.logits(model.hidden(batch).hidden))
    rows, prev = np.arange(2)[:, None], np.maximum(batch.prev, 0)
    expected = -(logp[rows, prev, batch.tokens] * batch.weights["nll"]).sum()
    np.testing.assert_allclose(nll_loss(model, batch)[0]["nll"], expected, rtol=1e-5)
    mesh = make_mesh(fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        graphdef, state = nnx.split(model)
        state = jax.device_put(state, shardings(state, mesh))
        rows = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
        loss = jax.jit(lambda state: nll_loss(nnx.merge(graphdef, state), rows)[0]["nll"])
        np.testing.assert_allclose(loss(state), 2 * expected, rtol=1e-5)

    grown = dataclasses.replace(config, vocab_size=config.vocab_size + 3, grown=3)
    entry = loading.stored_entries(grown)["lm_head.bias"]
    read = entry.op.read(lambda name, index: bias[index], (slice(0, grown.vocab_size),))
    np.testing.assert_allclose(read, [*bias, *[bias.mean()] * 3], rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["qwen3_yarn", "llama", pytest.param("mixtral", marks=pytest.mark.slow)]
)  # as transformers 4 spells them
def test_export_loads_in_transformers(name, tmp_path):
    config = families.config_from_hf(FAMILIES[name])
    model = build.init(config, seed=3)
    saving.save(model, config, tmp_path)
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert families.read_config(tmp_path) == config
    tokens = np.stack(documents(4, 30, 30))
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens).long()).logits.numpy()
    logits = compute_logits(model, pack([[row] for row in tokens], 30))
    assert relative_error(logits, expected) < 1e-4  # float32 sums in another order
    assert reference.config.to_dict().get("rope_parameters", {}) == dict(config.rope)


@pytest.mark.parametrize("dense", [0, 2])
def test_patterns_of_windows_are_those_of_transformers(dense):
    pattern = {"sliding_window_pattern": 2, "first_k_dense_replace": dense}
    raw = {**FAMILIES["cohere2_moe_sum"], **pattern, "num_hidden_layers": 6}
    listed = transformers.Cohere2MoeConfig(**raw).layer_types
    raw["architectures"] = ["Cohere2MoeForCausalLM"]
    assert families.config_from_hf(raw).layer_types == tuple(listed)
    with pytest.raises(UserError, match="sliding_window_pattern is a number, 0"):
        families.config_from_hf({**raw, "sliding_window_pattern": 0})
