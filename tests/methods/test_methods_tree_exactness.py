"""A packed tree is its branches: logits, loss and gradients in float64, against branches run alone.

The reference never sees a tree: each root-to-leaf path is its own row with a plain causal mask,
dense scores, shifted targets and a full softmax. In float64 the two differ by the order of sums
alone, a few 1e-15 here; the bounds (1e-12 on logits and losses, 1e-10 relative on gradients) leave
room for that and for nothing else: a mask that is wrong in one pair shows at 1e-3.
"""

import contextlib
import functools
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxtrain_kernels.tree_attention import xla

from jaxtrain.batch import Batch, check_batch
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.data.packing.pack import Fields, build_batch, lay_out
from jaxtrain.data.packing.prefixes import FlatSequence, merge_prefixes
from jaxtrain.data.packing.tree import Node, Tree, build_tree
from jaxtrain.models import build, families
from jaxtrain.models.parameters import split_model

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large enough that attention is far from uniform
}
MODELS = {
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    # Shorter than most branches, and than many forks are deep.
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "qwen2": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
ROWS, ROW_TOKENS = 2, 48
MAX_NODES, MAX_NODE_TOKENS = 6, 4
BRANCHES, BRANCH_TOKENS = 20, MAX_NODES * MAX_NODE_TOKENS
"""Static shapes: two trees a row, of at most six nodes and so five leaves each."""


class Alone(NamedTuple):
    """Branch by itself: int32 [n] and float64 [n], and where its tokens lie in the packing."""

    tokens: np.ndarray
    weights: np.ndarray
    row: int
    slots: np.ndarray


@contextlib.contextmanager
def float64():
    """Numbers of this file; the xla backend cuts rows into blocks of 24 queries and stripes, as it
    does with rows of thousands."""
    with jax.enable_x64(True), mock.patch.object(xla, "ONE_BLOCK", 24):
        yield


@functools.cache
def start(name: str):
    """(architecture, parameters) of a model of MODELS."""
    raw = {**SIZES, **MODELS[name]}
    architecture = families.config_from_hf(raw)
    model = build.init(architecture, 0, param_dtype="float64", dtype="float64")
    params, _ = split_model(model)
    assert all(value.dtype == jnp.float64 for value in params.values())
    return architecture, params


@functools.cache
def functions(name: str, impl: str, gradients: bool = True):
    """(params, packed, alone): jitted (params, ...) -> (loss, logits), and gradients if wanted."""
    architecture, params = start(name)
    options = {"param_dtype": "float64", "dtype": "float64", "attention_impl": impl}
    _, rebuild = split_model(build.abstract(architecture, **options))

    def packed(params, batch: Batch):
        model = rebuild(params)
        sums, _ = nll_loss(model, batch, impl)
        return sums["nll"], model.logits(model.hidden(batch).hidden)

    def alone(params, tokens_RL, weights_RL):
        model = rebuild(params)
        rows, length = tokens_RL.shape
        index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens_RL.shape)
        batch = Batch(tokens_RL, index, index - 1, jnp.full_like(index, length), {})
        logits_RLV = model.logits(model.hidden(batch).hidden)
        logp_RLV = jax.nn.log_softmax(logits_RLV[:, :-1])
        chosen_RL = jnp.take_along_axis(logp_RLV, tokens_RL[:, 1:, None], -1)[..., 0]
        return -jnp.sum(weights_RL[:, 1:] * chosen_RL), logits_RLV

    if not gradients:
        return params, jax.jit(packed), jax.jit(alone)
    grad = functools.partial(jax.value_and_grad, has_aux=True)
    return params, jax.jit(grad(packed)), jax.jit(grad(alone))


def pack_rows(rows: list[list[Tree]], row_tokens: int = ROW_TOKENS) -> Batch:
    batch = build_batch(
        [[lay_out(tree) for tree in row] for row in rows], row_tokens, Fields(dtype=np.float64)
    )
    check_batch(batch)
    return batch


def rows_of(branches: list[Alone]) -> tuple[np.ndarray, np.ndarray]:
    """Branches padded at their ends to [BRANCHES, BRANCH_TOKENS]; nobody sees what lies behind."""
    tokens = np.zeros((BRANCHES, BRANCH_TOKENS), np.int32)
    weights = np.zeros((BRANCHES, BRANCH_TOKENS))
    for index, branch in enumerate(branches):
        tokens[index, : len(branch.tokens)] = branch.tokens
        weights[index, : len(branch.tokens)] = branch.weights
    return tokens, weights


def assert_packed_is_alone(name: str, impl: str, batch: Batch, branches: list[Alone]) -> None:
    """Every logits row of every branch, the loss, its denominator, each parameter's gradient."""
    with float64():
        params, packed, _ = functions(name, impl)
        _, _, alone = functions(name, "reference")
        (loss, logits), grads = jax.device_get(packed(params, batch))
        (expected, wanted_logits), wanted_grads = jax.device_get(alone(params, *rows_of(branches)))
    assert_same_logits(branches, logits, wanted_logits)
    np.testing.assert_allclose(loss, expected, rtol=0, atol=1e-12)
    total = sum(branch.weights[1:].sum() for branch in branches)
    np.testing.assert_allclose(batch.weights["nll"].sum(), total, rtol=0, atol=1e-12)
    # Gradients that cancel (a query that sees one key has none) are rounding of the largest one.
    largest = max(np.abs(grad).max() for grad in wanted_grads.values())
    for path, grad in wanted_grads.items():
        difference = np.abs(grads[path] - grad).max()
        assert difference <= 1e-10 * np.abs(grad).max() + 1e-15 * largest, path


def assert_same_logits(branches: list[Alone], logits, expected) -> None:
    for index, branch in enumerate(branches):
        np.testing.assert_allclose(
            logits[branch.row, branch.slots],
            expected[index, : len(branch.tokens)],
            rtol=0,
            atol=1e-12,
            err_msg=f"logits of branch {index}",
        )


NODES = st.lists(
    st.tuples(
        st.integers(0, MAX_NODES - 1),
        st.lists(
            st.tuples(st.integers(0, VOCABULARY - 1), st.booleans()),
            min_size=1,
            max_size=MAX_NODE_TOKENS,
        ),
    ),
    min_size=1,
    max_size=MAX_NODES,
)
"""(parent modulo the node's index, [(token, trained)]) of each node."""
FORESTS = st.lists(st.lists(NODES, min_size=1, max_size=2), min_size=1, max_size=ROWS)


def build_forest(forest) -> tuple[Batch, list[Alone]]:
    """The packed rows, and all branches by walking up from each leaf; weights mask / K."""
    rows, branches = [], []
    for row, drawn in enumerate(forest):
        trees, start = [], 0
        for nodes in drawn:
            parents = [-1, *(nodes[i][0] % i for i in range(1, len(nodes)))]
            tokens = [np.array([t for t, _ in node[1]], np.int32) for node in nodes]
            masks = [np.array([m for _, m in node[1]], np.float64) for node in nodes]
            roles = [""] * len(nodes)
            tree = build_tree(zip(parents, tokens, masks, roles, strict=True))
            slots = start + depth_first_slots(parents, [len(t) for t in tokens])
            firsts = np.cumsum([0, *(len(t) for t in tokens)])
            leaves = [i for i in range(len(nodes)) if i not in parents]
            for leaf in leaves:
                path = [leaf]
                while parents[path[0]] >= 0:
                    path.insert(0, parents[path[0]])
                branches.append(
                    Alone(
                        np.concatenate([tokens[i] for i in path]),
                        np.concatenate([masks[i] for i in path]) / len(leaves),
                        row,
                        np.concatenate([slots[firsts[i] : firsts[i + 1]] for i in path]),
                    )
                )
            trees.append(tree)
            start += tree.num_tokens
        rows.append(trees)
    rows += [[]] * (ROWS - len(rows))
    return pack_rows(rows), branches


def depth_first_slots(parents: list[int], sizes: list[int]) -> np.ndarray:
    """Packed index of every token, tokens in the order of the nodes."""
    starts, position = {}, 0

    def visit(node):
        nonlocal position
        starts[node] = position
        position += sizes[node]
        for child in range(node + 1, len(parents)):
            if parents[child] == node:
                visit(child)

    visit(0)
    return np.concatenate([starts[i] + np.arange(n) for i, n in enumerate(sizes)])


def check_forest(name, impl, forest):
    assert_packed_is_alone(name, impl, *build_forest(forest))


RANDOM = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize(
    "name, impl",
    [
        ("qwen3", "xla"),
        pytest.param("mistral", "xla", marks=pytest.mark.thorough),
        pytest.param("mistral", "reference", marks=pytest.mark.slow),
        pytest.param("qwen3", "reference", marks=pytest.mark.thorough),
    ],
)
@settings(RANDOM, max_examples=10)
@given(forest=FORESTS)
def test_random_forests_equal_their_branches(name, impl, forest):
    check_forest(name, impl, forest)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, impl",
    [
        ("qwen3", "xla"),
        *(
            pytest.param(n, "xla", marks=pytest.mark.thorough)
            for n in ("qwen2", "mistral", "qwen3_moe")
        ),
        pytest.param("mistral", "reference", marks=pytest.mark.thorough),
    ],
)
@settings(RANDOM, max_examples=100)
@given(forest=FORESTS)
def test_many_random_forests_equal_their_branches(name, impl, forest):
    check_forest(name, impl, forest)


def node(parent, *tokens):
    return parent, [(token, True) for token in tokens]


CATERPILLAR = [
    node(0, 1, 2, 3, 4),
    node(0, 5, 6, 7),
    node(0, 8, 9),
    node(2, 10, 11),
    node(3, 12, 13),
    node(3, 14, 15, 16),
]
FIXED = {
    "caterpillar": [[CATERPILLAR]],
    "one_chain": [[[node(0, 1, 2, 3, 4), node(0, 5, 6)]]],
    "one_token": [[[node(0, 7)]]],
    "star_of_equal_leaves": [[[node(0, 1, 2)] + [node(0, 3, 4)] * 5]],
    "k_of_4_beside_k_of_1": [[CATERPILLAR, [node(0, 1, 2, 3)]], [[node(0, 9, 9)], CATERPILLAR]],
    "full_row": [[[node(i, 1, 2, 3, 4) for i in range(6)], [node(0, 5, 6, 7, 8)] * 6]],
}


@pytest.mark.parametrize("forest", FIXED.values(), ids=FIXED)
def test_forests_that_random_ones_may_miss(forest):
    check_forest("qwen3", "xla", forest)


def test_a_chain_is_ordinary_sft():
    """K = 1: the weights are the mask, and the loss is the shifted cross-entropy's sum."""
    batch, (branch,) = build_forest([[[node(0, 1, 2), node(0, 3, 4, 5)]]])
    np.testing.assert_array_equal(batch.weights["nll"][0, :6], [0, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(branch.weights, 1)


@pytest.mark.slow
def test_branches_run_at_their_true_length():
    """The reference's own padding is no part of the claim: here it has none."""
    batch, branches = build_forest([[CATERPILLAR]])
    with float64():
        params, packed, _ = functions("mistral", "xla")
        _, _, alone = functions("mistral", "reference", gradients=False)
        (loss, logits), _ = jax.device_get(packed(params, batch))
        summed = 0.0
        for branch in branches:
            part, expected = jax.device_get(
                alone(params, branch.tokens[None], branch.weights[None])
            )
            summed += part
            np.testing.assert_allclose(logits[0, branch.slots], expected[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(loss, summed, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_window_counts_positions_of_the_branch_not_of_the_row():
    """A tree with distances in the packed row would see less: the check has teeth."""
    batch, branches = build_forest([[CATERPILLAR]])
    index = np.broadcast_to(np.arange(ROW_TOKENS, dtype=np.int32), batch.tokens.shape)
    with float64():
        params, packed, _ = functions("mistral", "xla")
        (_, right), _ = jax.device_get(packed(params, batch))
        (_, wrong), _ = jax.device_get(packed(params, batch._replace(positions=index)))
    last = branches[-1].slots
    trunk = last[: len(CATERPILLAR[0][1])]
    np.testing.assert_allclose(wrong[0, trunk], right[0, trunk], rtol=0, atol=1e-12)
    assert np.abs(wrong[0, last[-1]] - right[0, last[-1]]).max() > 1e-3


SEQUENCES = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=10),
    min_size=1,
    max_size=4,
)
"""[(token, weight)]: three tokens, so that prefixes, whole sequences inside others and repeats are
common."""


@settings(RANDOM, max_examples=20)
@given(sequences=SEQUENCES)
def test_merged_sequences_equal_the_sequences(sequences):
    """Prefix merging keeps any weights exact, also where branches disagree about a shared token."""
    group = [
        FlatSequence(
            np.array([t for t, _ in sequence], np.int32),
            {"nll": np.array([w for _, w in sequence], np.float64)},
        )
        for sequence in sequences
    ]
    trees = merge_prefixes(group)
    batch = pack_rows([trees, []])
    starts = dict.fromkeys(sequence[0][0] for sequence in sequences)
    sizes = {t: sum(sequence[0][0] == t for sequence in sequences) for t in starts}
    branches = [
        Alone(b.tokens, b.weights["nll"] / sizes[int(b.tokens[0])], 0, slots_of(b.tokens, batch))
        for b in group
    ]
    assert_packed_is_alone("qwen3", "xla", batch, branches)


def slots_of(tokens: np.ndarray, batch: Batch) -> np.ndarray:
    """Slots of a sequence in row 0, found by following `prev` from every token."""
    slots: list[int] = []
    for token in tokens:
        before = slots[-1] if slots else -1
        slots.append(
            next(
                t
                for t in range(ROW_TOKENS)
                if batch.prev[0, t] == before
                and batch.tokens[0, t] == token
                and batch.owner[0, t] >= 0
            )
        )
    return np.array(slots)


@pytest.mark.slow
def test_a_prompt_that_sees_itself_is_dense_attention_with_that_mask():
    """Two documents of a prefix language model, against scores [N, T, T] and a mask by hand."""
    rng = np.random.default_rng(0)
    allowed, trees = np.eye(ROW_TOKENS, dtype=bool), []
    for start, prompt, length in ((0, 5, 20), (20, 12, 25)):
        since = np.r_[np.zeros(prompt), np.arange(prompt, length)].astype(np.int32)
        tokens = rng.integers(0, VOCABULARY, length, dtype=np.int32)
        weights = {"nll": (np.arange(length) >= prompt).astype(float)}
        trees.append(Tree((Node(-1, tokens, weights, since=since),)))
        local_value, first = slice(start, start + length), slice(start, start + prompt)
        allowed[local_value, local_value] = np.tri(length, dtype=bool)
        allowed[first, first] = True
    fields = Fields(since=True, dtype=np.float64)
    batch = build_batch([[lay_out(tree) for tree in trees], []], ROW_TOKENS, fields)
    check_batch(batch)
    allowed = np.stack([allowed, np.eye(ROW_TOKENS, dtype=bool)])[:, None]

    def dense(q_BTNH, k_BSKH, v_BSKH, *_, **__):
        k_BSNH, v_BSNH = (jnp.repeat(x, 2, axis=2) for x in (k_BSKH, v_BSKH))
        scores = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH) * q_BTNH.shape[-1] ** -0.5
        shares = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf))
        return jnp.einsum("BNTS,BSNH->BTNH", shares, v_BSNH)

    with float64():
        params, packed, _ = functions("qwen3", "xla")
        actual_values = jax.device_get(packed(params, batch))
        with mock.patch("jaxtrain.layers.sharded_attention.attention_op", dense):
            _, packed, _ = functions.__wrapped__("qwen3", "xla")
            expected = jax.device_get(packed(params, batch))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12), actual_values, expected
    )
