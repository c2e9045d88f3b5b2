"""Rollouts in 8 bits: against float64 that quantizes the same way, their bytes, and what is
refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.adapters.storage import STORAGES
from jaxtrain.config.load import validate_config
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.weights import abstract_params, open_params
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.local.factory import check_cache
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.local.weights import Copier, make_sampler_mesh
from jaxtrain.layers.attention import store_cache
from jaxtrain.layers.kv_cache import store
from jaxtrain.models import build, families
from jaxtrain.models.parameters import split_model
from tests.models.families_mla import FAMILIES
from tests.models.tiny_models import HYBRID, RAW, SIZES

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
PROMPTS = [[5, 9, 2], [5, 9, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
OPTIONS = {"param_dtype": "float32", "dtype": "float32"}


def open_parts(raw, mesh=None):
    mesh = mesh or make_mesh(jax.devices()[:1])
    return ModelBundle(None, families.config_from_hf(raw), mesh, None, OPTIONS)


@pytest.fixture(scope="module")
def dense():
    """(parts, parameters)."""
    return open_parts(DENSE), split_model(build.init(families.config_from_hf(DENSE), 0))[0]


def round_weights(kernel):
    """float64 [in, out] in 255 steps, a scale for each output."""
    scale = np.abs(kernel).max(-2, keepdims=True) / 127
    return np.round(kernel / scale) * scale


def round_heads(x, cache):
    """float64 [..., H] in int8 or e4m3, a scale for each vector."""
    most = np.abs(x).max(-1, keepdims=True)
    if cache == "int8":
        return np.round(x / (most / 127)) * (most / 127)
    scale = 2.0 ** np.ceil(np.log2(most / 448))
    unit = x / scale
    # e4m3 has 4 binary digits from 2^-6 on, and steps of 2^-9 below.
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(unit), 1e-30))), -6) - 3)
    return np.round(unit / step) * step * scale


def reference(params, tokens, weights, cache):
    """float64 [T, V]: Qwen3's log-probs behind each token, from its paper's formulas."""
    p = {path: np.asarray(value, np.float64) for path, value in params.items()}

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def turn(x):
        T, _, H = x.shape
        angle = np.arange(T)[:, None] * 10000.0 ** (-np.arange(0, H, 2) / H)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        first, right = x[..., : H // 2], x[..., H // 2 :]
        return np.concatenate([first * cos - right * sin, right * cos + first * sin], -1)

    x = p["embed.embedding"][tokens]
    T = len(tokens)
    for layer in range(2):

        def own(name, layer=layer):
            value = p[f"stack.block.{name}"][layer]
            return round_weights(value) if weights == "int8" and "kernel" in name else value

        h = norm(x, own("attention_norm.scale"))
        q, k, v = ((h @ own(f"attention.{n}.kernel")).reshape(T, -1, 8) for n in "qkv")
        q = turn(norm(q, own("attention.q_norm.scale")))
        k = turn(norm(k, own("attention.k_norm.scale")))
        if cache != "default":
            k, v = round_heads(k, cache), round_heads(v, cache)
        k, v = np.repeat(k, 2, 1), np.repeat(v, 2, 1)
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(8)
        scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        actual = np.einsum("nts,snh->tnh", share / share.sum(-1, keepdims=True), v)
        x = x + actual.reshape(T, -1) @ own("attention.out.kernel")
        h = norm(x, own("mlp_norm.scale"))
        gate = h @ own("mlp.gate.kernel")
        up = gate / (1 + np.exp(-gate)) * (h @ own("mlp.up.kernel"))
        x = x + up @ own("mlp.down.kernel")
    logits = norm(x, p["norm.scale"]) @ p["embed.embedding"].T
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def draw(dense, weights, cache):
    """Requests drawn by a sampler in that storage: two share a prompt."""
    parts, params = dense
    copier = Copier(parts, parts.mesh, weights, cache)
    sampler = LocalSampler(None, [60], max_len=64, max_batch=4, mesh=parts.mesh)
    with sampler.on_mesh():
        sampler.use(copier.build(copier(params), abstract_params(parts)[1]), 1)
    sampling = Sampling(max_new_tokens=12, temperature=1.0)
    requests = [sampler.request(request, sampling, (), i) for i, request in enumerate(PROMPTS)]
    for request in requests:
        sampler.add(request)
    while sampler.busy:
        sampler.step()
    return requests


@pytest.mark.parametrize(
    ("weights", "cache"),
    [
        pytest.param("int8", "int8", marks=pytest.mark.slow),
        pytest.param("default", "fp8", marks=pytest.mark.thorough),
    ],
)
def test_log_probs_are_those_of_float64_that_quantizes_alike(dense, weights, cache):
    actual, exact, plain = [], [], []
    for entry in draw(dense, weights, cache):
        tokens = np.array([*entry.prompt, *entry.tokens])
        index = np.arange(len(entry.prompt) - 1, len(tokens) - 1)
        actual += entry.logprobs
        for into, how in ((exact, (weights, cache)), (plain, ("default", "default"))):
            into += reference(dense[1], tokens, *how)[index, tokens[index + 1]].tolist()
    actual, exact, plain = map(np.array, (actual, exact, plain))
    # float32 may round what lies between two levels to the other one: rarely, and by little
    # of what quantizing itself changes.
    assert np.median(np.abs(actual - exact)) < 1e-5
    changed = np.abs(exact - plain).mean()
    assert 1e-4 < changed < 0.1 and np.abs(actual - exact).mean() < 0.1 * changed


def test_weights_in_8_bits_follow_every_update_and_take_a_quarter(dense):
    parts, params = dense
    copier = Copier(parts, parts.mesh, "int8")
    copies = copier(params)
    kernels = [path for path in params if path.endswith(".kernel")]
    assert len(kernels) == 7 and not set(kernels) & copies.keys()
    for path in kernels:
        codes, scales = (np.asarray(copies[f"{path}.{part}"]) for part in ("codes", "scales"))
        assert codes.dtype == np.int8 and codes.nbytes * 4 == params[path].nbytes
        assert scales.nbytes * params[path].shape[-2] == params[path].nbytes
        exact = round_weights(np.asarray(params[path], np.float64))
        np.testing.assert_allclose(codes * scales[..., None, :], exact, atol=1e-6)
    trained = {path: 2 * value for path, value in params.items()}
    after = copier(trained)
    for path in kernels:
        np.testing.assert_array_equal(after[f"{path}.codes"], copies[f"{path}.codes"])
        np.testing.assert_allclose(after[f"{path}.scales"], 2 * copies[f"{path}.scales"])
    for value in trained.values():
        value.delete()  # as the optimizer step does
    assert all(np.isfinite(np.asarray(value)).all() for value in after.values())


@pytest.mark.slow
def test_another_mesh_gets_the_same_codes():
    devices = jax.devices()
    trainer = make_mesh(devices[:2], fsdp=2)
    parts = open_parts(DENSE, trainer)
    params = open_params(parts, 0)
    alone = Copier(open_parts(DENSE), make_mesh(devices[:1]), "int8")(
        jax.device_put(params, devices[0])
    )
    for remote_result in (devices[:2], devices[2:4]):
        mesh = make_sampler_mesh(remote_result, make_mesh(devices[:2], tensor=2))
        actual = Copier(parts, mesh, "int8")(params)
        assert actual.keys() == alone.keys()
        for path, value in actual.items():
            np.testing.assert_array_equal(np.asarray(value), np.asarray(alone[path]), path)
            assert value.sharding.mesh == mesh
        codes = actual["stack.block.mlp.up.kernel.codes"]
        assert codes.sharding.shard_shape(codes.shape)[-1] * 2 == codes.shape[-1]


@pytest.mark.parametrize(("cache", "dtype"), [("int8", jnp.int8), ("fp8", jnp.float8_e4m3fn)])
def test_a_cache_in_8_bits_takes_its_bytes_and_a_scale(dense, cache, dtype):
    parts, params = dense
    model = Copier(parts, parts.mesh, cache=cache).build(params, abstract_params(parts)[1])
    rows, slots, heads, width = 3, 40, 2, 8
    state = jax.eval_shape(lambda: model.init_cache(rows, slots)).states[0]
    assert state.k.dtype == state.v.dtype == dtype
    size = sum(x.size * x.dtype.itemsize for x in state)
    assert size == 2 * rows * slots * heads * (width + 4)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 8)), jnp.float32)
    codes, scale = store(x.at[0, 0].set(0), dtype)
    exact = round_heads(np.asarray(x, np.float64)[0, 1:], cache)
    actual = np.asarray(codes, np.float64) * np.asarray(scale)[..., None]
    np.testing.assert_allclose(actual[0, 1:], exact, atol=1e-6)
    np.testing.assert_array_equal(actual[0, 0], 0)


WINDOW = {**SIZES, **RAW["mistral"]}
"""A window of 5: slots are used again."""


@pytest.mark.slow
def test_a_prompt_read_at_once_leaves_what_token_by_token_does():
    """Also where a window's slots are used again: who looks sees every key as it is stored."""
    model = build.init(families.config_from_hf(WINDOW), 0)
    assert store_cache(model, "int8") == 1
    tokens = np.random.default_rng(0).integers(0, 97, (2, 11)).astype(np.int32)
    decode = jax.jit(type(model).decode)
    full = decode(model, tokens, model.init_cache(2, 16))
    hidden, state = [], model.init_cache(2, 16)
    for index in range(tokens.shape[1]):
        read = decode(model, tokens[:, index : index + 1], state)
        state, hidden = read.cache, [*hidden, read.hidden]
    np.testing.assert_allclose(full.hidden, jnp.concatenate(hidden, 1), atol=2e-4)


@pytest.mark.slow
def test_experts_and_recurrent_layers_compute_with_what_is_stored():
    """A sampler in 8 bits is the model whose kernels are rounded so."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    parts = open_parts({**SIZES, **HYBRID["qwen3_next"], **layers, "mlp_only_layers": []})
    params, rebuild = open_params(parts, 0), abstract_params(parts)[1]
    copier = Copier(parts, parts.mesh, "int8")
    copies = copier(params)
    stored = [p.removesuffix(".codes") for p in copies if p.endswith(".kernel.codes")]
    experts = [path for path in stored if ".experts." in path]
    assert experts and not any("router" in path for path in stored)
    rounded = dict(params)
    for path in stored:
        parts_of = {part: copies[f"{path}.{part}"] for part in ("codes", "scales")}
        rounded[path] = STORAGES["int8"].dequantize(parts_of, jnp.float32)
    tokens = np.random.default_rng(0).integers(0, 97, (2, 9)).astype(np.int32)

    def run(model):
        with jax.set_mesh(parts.mesh):
            read = jax.jit(type(model).decode)(model, tokens, model.init_cache(2, 12))
            return np.asarray(model.logits(read.hidden))

    models = copier.build(copies, rebuild), rebuild(rounded), rebuild(params)
    actual, exact, plain = map(run, models)
    assert np.abs(actual - exact).max() < 0.05 * np.abs(exact - plain).max() + 1e-4


def test_a_cache_without_keys_is_refused():
    parts = open_parts({**SIZES, **FAMILIES["deepseek_v3"]})
    with pytest.raises(UserError, match=r'rollout.local.cache "int8".*Deepseek'):
        check_cache("int8", parts)
    check_cache("default", parts)
    check_cache("int8", dataclasses.replace(parts, architecture=families.config_from_hf(DENSE)))


RL = {
    "model": {"architecture": DENSE, "tokenizer": "builtin"},
    "task": {"kind": "rl"},
    "run": {"max_steps": 1},
    "data": {"datasets": [{"path": "builtin:calculator"}], "sequence_len": 256},
    "env": {"kind": "calculator"},
    "sampling": {"max_new_tokens": 8, "temperature": 1.0},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout": {"engine": "vllm"}}, "--kv-cache-dtype"),
        ({"adapter": {"kind": "lora", "quantize": "nf4"}}, "remove one"),
        ({"adapter": {"kind": "dora"}}, "dora reads the norms"),
        ({"optim": {"name": "adafactor", "moments": "int8"}}, "optim.moments 'int8' is for adamw"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_opens(changes, words):
    local = {"local": {"weights": "int8"}}
    table = {**RL, **changes, "rollout": {**local, **changes.get("rollout", {})}}
    with pytest.raises(UserError, match=words):
        validate_config(table, "test")
    validate_config({**RL, "rollout": local}, "test")
