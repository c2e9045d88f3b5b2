"""Exact models: the sampler's log-probs are those of the program that trains, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families_added import FAMILIES as ADDED
from families_attn import FAMILIES as ATTENTION
from families_dense import FAMILIES as DENSE
from families_gemma import FAMILIES as GEMMA
from families_gptoss import FAMILIES as GPT_OSS
from flax import nnx
from tiny_models import RAW as TINY
from tiny_models import SIZES
from toy_draft import ToyDraft

from jaxtrain.batch import Batch
from jaxtrain.core.losses.logp import token_logp
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.local.slots import unstack
from jaxtrain.generation.local.speculation import DraftedModel
from jaxtrain.layers.exact import CPU, ExactOps, TileSizes
from jaxtrain.models import build, families

RAW = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}
MOE = RAW | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
TOKENS = 320
TEMPERATURE = 0.7


KEYS = CPU.keys
GROUPED = TileSizes(rows=16, queries=4, keys=32, group=5)
"""A group of tiles, as on a GPU: of several rows, and the last one with none for some."""


def open_model(raw=RAW, exact=True, sizes=CPU, **options):
    ops = ExactOps(sizes) if exact else None
    return build.init(families.config_from_hf(raw), 0, exact=ops, **options)


def make_row(nodes):
    """A row [TOKENS] of (index of the parent or -1, tokens) in depth-first order; and its start."""
    tokens, positions = np.zeros(TOKENS, np.int32), np.zeros(TOKENS, np.int32)
    prev, until = np.full(TOKENS, -1, np.int32), np.arange(1, TOKENS + 1, dtype=np.int32)
    starts, ends = [], []
    for parent, text in nodes:
        start = ends[-1] if ends else 0
        end = start + len(text)
        depth = positions[ends[parent] - 1] + 1 if parent >= 0 else 0
        tokens[start:end], positions[start:end] = text, depth + np.arange(len(text))
        prev[start:end] = [ends[parent] - 1 if parent >= 0 else -1, *range(start, end - 1)]
        starts.append(start)
        ends.append(end)
    stops = list(ends)
    for node in reversed(range(len(nodes))):
        if (parent := nodes[node][0]) >= 0:
            stops[parent] = max(stops[parent], stops[node])
        until[starts[node] : ends[node]] = stops[node]
    return (tokens, positions, prev, until), starts


def make_batch(rows):
    tokens, positions, prev, until = (jnp.asarray(np.stack(x)) for x in zip(*rows, strict=True))
    return Batch(tokens, positions, prev, until, {}, owner=jnp.zeros_like(tokens))


@functools.cache
def make_step(graphdef):
    """(parameters, batch) -> (gradients, log-probs), as a training step computes them."""

    def loss(params, batch):
        logp_BT = token_logp(nnx.merge(graphdef, params), batch, temperature=TEMPERATURE).logp
        return jnp.sum(jnp.where(batch.prev >= 0, logp_BT, 0.0)), logp_BT

    return jax.jit(jax.grad(loss, has_aux=True))


def score(model, rows):
    graphdef, params = nnx.split(model)
    gradients, logp_BT = make_step(graphdef)(params, make_batch(rows))
    return gradients, np.asarray(logp_BT)


def draw(model, prompts, counts, temperature=TEMPERATURE, draft=None):
    """Requests of a sampler with fewer rows than there are requests."""
    sampled = unstack(jax.tree.map(jnp.copy, model))
    sampler = LocalSampler(
        sampled if draft is None else DraftedModel(sampled, draft), (), max_len=256, max_batch=3
    )
    requests = []
    for index, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        sampling = Sampling(max_new_tokens=count, temperature=temperature, seed=index)
        requests.append(sampler.request(list(prompt), sampling, number=index))
        sampler.add(requests[-1])
        if index == 3:  # the others come while these are drawn
            sampler.step()
    while sampler.busy:
        sampler.step()
    return requests


def compare(model):
    """(log-probs of the sampler, of trees, gradients of these)."""
    rng = np.random.default_rng(0)
    # Forks right before, at and behind the border of a block of keys, and a short prompt.
    groups = ((KEYS - 1, (20, 7, 33)), (KEYS, (5, 40)), (1, (3, 30)), (KEYS + 1, (9,)))
    prompts = [rng.integers(0, 96, count) for count, _ in groups]
    asked = [(p, n) for p, (_, counts) in zip(prompts, groups, strict=True) for n in counts]
    waiting = iter(draw(model, *zip(*asked, strict=True)))
    rows, sampled, places = [], [], []
    for prompt, (_, counts) in zip(prompts, groups, strict=True):
        requests = [next(waiting) for _ in counts]
        nodes = [(-1, prompt), *((0, request.tokens) for request in requests)]
        row, starts = make_row(nodes)
        for request, start in zip(requests, starts[1:], strict=True):
            sampled += request.logprobs
            places += [(len(rows), start + i) for i in range(len(request.tokens))]
        rows.append(row)
    gradients, logp_BT = score(model, rows)
    return np.array(sampled, np.float32), logp_BT[tuple(np.transpose(places))], gradients


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("raw", "options"),
    [
        pytest.param(MOE, {"dtype": "bfloat16", "remat": "full"}, id="experts in bfloat16"),
        pytest.param(
            RAW | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
            {"scan_layers": False},
            id="windows",
        ),
    ],
)
def test_the_sampler_draws_by_the_log_probs_of_training(raw, options):
    sampled, trained, _ = compare(open_model(raw, **options))
    np.testing.assert_array_equal(sampled.view(np.uint32), trained.view(np.uint32))


FAMILIES = {**TINY, **DENSE, **ATTENTION, **GEMMA, **GPT_OSS, **ADDED}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    ["llama", "qwen2", "mistral", "gemma2", "gemma3", "gpt_oss_plain", "cohere2", "glm4", "phi"]
    + ["gpt_neox", "apertus", "smollm3"],
)
def test_families_draw_by_the_log_probs_of_training(name):
    """Biases of matrices and the head, norms, gates, softcaps, sinks, windows, parallel blocks."""
    raw = {**SIZES, **FAMILIES[name], "max_position_embeddings": 256}
    sampled, trained, _ = compare(open_model(raw))
    np.testing.assert_array_equal(sampled.view(np.uint32), trained.view(np.uint32))


@pytest.fixture(scope="module")
def model():
    return open_model()


@pytest.mark.slow
def test_float32_is_exact_where_the_fast_path_is_not(model):
    """Compare both modes on one data set; their gradients differ by rounding alone."""
    sampled, trained, gradients = compare(model)
    np.testing.assert_array_equal(sampled.view(np.uint32), trained.view(np.uint32))
    fast = open_model(exact=False)
    fast_sampled, fast_trained, fast_gradients = compare(fast)
    assert (fast_sampled != fast_trained).mean() > 0.3
    # The answers are the same, as noise far outweighs rounding, and so are the gradients.
    for path, value in nnx.to_flat_state(gradients):
        usual = dict(nnx.to_flat_state(fast_gradients))[path][...]
        scale = float(jnp.abs(usual).max())
        np.testing.assert_allclose(value[...], usual, atol=2e-5 * scale, err_msg=str(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "windows",
    [
        {"use_sliding_window": True, "sliding_window": 24},
        pytest.param({}, marks=pytest.mark.thorough),
    ],
)
def test_tiles_of_attention_side_by_side_compute_what_each_does_alone(windows):
    raw = RAW | windows | {"max_window_layers": 1}
    sampled, trained, _ = compare(open_model(raw, sizes=GROUPED))
    np.testing.assert_array_equal(sampled.view(np.uint32), trained.view(np.uint32))
    # Sizes are part of the numbers, but only of their rounding.
    alone, _, _ = compare(open_model(raw, sizes=GROUPED._replace(group=1)))
    np.testing.assert_allclose(sampled, alone, atol=1e-5)


@pytest.mark.slow
def test_branches_of_random_forests_compute_what_their_paths_do_alone(model):
    rng = np.random.default_rng(1)
    for _ in range(3):
        lengths = [int(rng.integers(1, 70)), *rng.choice([1, 2, 5, 20, 31, 32, 33], 7)]
        parents = [-1, *(int(rng.integers(0, i)) for i in range(1, 8))]
        order = walk(parents, 0)
        numbers = {node: index for index, node in enumerate(order)}
        nodes = [
            (numbers.get(parents[node], -1), rng.integers(0, 96, lengths[node])) for node in order
        ]
        row, starts = make_row(nodes)
        paths, expected = [], []
        for index, (_, text) in enumerate(nodes):
            path, ancestor = [], index
            while ancestor >= 0:
                path, ancestor = [*nodes[ancestor][1], *path], nodes[ancestor][0]
            paths.append(make_row([(-1, path)])[0])
            expected.append((starts[index], len(path), len(text)))
        _, tree = score(model, [row])
        _, flat = score(model, paths)
        for index, (start, depth, count) in enumerate(expected):
            first = 1 if depth == count else 0  # nothing predicts a root
            actual = tree[0, start + first : start + count]
            alone = flat[index, depth - count + first : depth]
            np.testing.assert_array_equal(actual.view(np.uint32), alone.view(np.uint32))


def walk(parents, node):
    """Return a node and all below it, depth first."""
    children = [child for child, parent in enumerate(parents) if parent == node]
    return [node, *(below for child in children for below in walk(parents, child))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "temperature", [pytest.param(0.0, marks=pytest.mark.thorough), TEMPERATURE]
)
def test_a_draft_changes_no_bit_of_an_answer(temperature):
    """Compare in bfloat16, whose rounding would otherwise turn ties."""
    model = open_model(dtype="bfloat16", param_dtype="bfloat16")
    prompts = [[10 + i, *range(20, 25 + i)] for i in range(4)]
    counts = [40, 9, 23, 30]
    plain = draw(model, prompts, counts, temperature)
    texts = {p[0]: [*p, *r.tokens] for p, r in zip(prompts, plain, strict=True)}
    pattern = np.array([1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1], bool)
    drafted = draw(model, prompts, counts, temperature, ToyDraft(texts, pattern))
    for first, second in zip(plain, drafted, strict=True):
        assert first.tokens == second.tokens
        assert first.logprobs == second.logprobs
