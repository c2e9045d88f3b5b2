"""The gated delta rule on forests against a float64 recurrence that runs each branch alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import causal_conv, gated_delta, testing
from jaxtrain_kernels.gated_delta import gpu_decode, gpu_windows, reference, xla
from jaxtrain_kernels.gated_delta.cases import CASES
from jaxtrain_kernels.recurrence.chunks import NEIGHBOR, ROOT, count_slots, cut_rows

CI = {case.name: case for case in CASES if "ci" in case.tags}
NAMES = ("q", "k", "v", "g", "beta")
T = 64
FORESTS = {
    "random": testing.random_forest(np.random.default_rng(0), 60, 5),
    "short nodes": testing.random_forest(np.random.default_rng(1), 64, 2),  # full to the brim
    "caterpillar": testing.agent_tree(5, 6, 3),
    "star": [(9, -1), *[(n, 0) for n in (1, 2, 3, 1, 20, 4)]],
    "documents": testing.documents([5, 1, 17, 2, 30]),
    "single children": [(3, -1), (4, 0), (20, 1), (2, 2)],
    "nothing but padding": [],
}


def pack(nodes):
    """until (0 in padding) and prev of a row, and its branches."""
    count = sum(size for size, _ in nodes)
    row = testing.pack(nodes, T) if nodes else {"until": np.zeros(T, int), "prev": np.full(T, -1)}
    until = np.where(np.arange(T) < count, row["until"], 0).astype(np.int32)
    prev = row["prev"].astype(np.int32)
    branches = []
    for leaf in sorted(set(range(count)) - set(prev[:count].tolist())):
        path = [leaf]
        while prev[path[-1]] >= 0:
            path.append(int(prev[path[-1]]))
        branches.append(path[::-1])
    return until, prev, branches


@functools.cache
def draw(seed=0):
    """Arguments of two rows in float64 numpy: H 2, N 4, K 6, V 5; the state; d_out."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in normal((2, 2, T, 2, 6)))
    g, beta = -np.exp(normal((2, T, 4))), rng.random((2, T, 4))
    return q, k, normal((2, T, 4, 5)), g, beta, normal((2, 4, 6, 5)), normal((2, T, 4, 5))


def run_alone(path, q, k, v, g, beta, state):
    """Run one branch of one row token by token in numpy: {token: o [N, V]}, and the last state."""
    repeats, S, actual = v.shape[1] // q.shape[1], state.copy(), {}
    for t in path:
        for n in range(v.shape[1]):
            key, query = k[t, n // repeats], q[t, n // repeats]
            S[n] = np.exp(g[t, n]) * S[n]
            S[n] += np.outer(key, beta[t, n] * (v[t, n] - S[n].T @ key))
            actual.setdefault(t, np.zeros(v.shape[1:]))[n] = S[n].T @ query
    return actual, S


def with_gradients(function):
    """(arguments, d_out, until, prev) -> out and the gradients to q, k, v, g, beta, state."""

    def run(arguments, d_out, until, prev):
        *inputs, state = arguments

        def loss(inputs, state):
            out, _ = function(*inputs, until, prev, state=state)
            return (out * d_out).sum(), out

        (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(inputs, state)
        return out, *grads[0], grads[1]

    return jax.jit(run)


RUN = with_gradients(functools.partial(xla.gated_delta, chunk=4, lanes=3))
RUN_LONG = with_gradients(functools.partial(xla.gated_delta, lanes=1))
RUN_REFERENCE = with_gradients(reference.gated_delta)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        *[(name, RUN) for name in FORESTS],
        *[pytest.param(name, RUN_LONG, marks=pytest.mark.slow) for name in FORESTS],
    ],
)
def test_a_forest_is_its_branches(name, run):
    """Outputs against numpy; gradients, of the first states too, against autodiff of the reference
    in float64. Each row starts from a state, so roots are not all alike."""
    *arguments, d_out = draw()
    rows = [pack(FORESTS[name]), pack(FORESTS["caterpillar"])]
    until, prev = (jnp.asarray(np.stack([row[i] for row in rows])) for i in (0, 1))
    with jax.enable_x64(True):
        provided = ([jnp.asarray(x) for x in arguments], jnp.asarray(d_out), until, prev)
        actual, expected = run(*provided), RUN_REFERENCE(*provided)
    for row, (_, _, branches) in enumerate(rows):
        unused = set(range(T))
        for path in branches:
            alone, _ = run_alone(path, *(x[row] for x in arguments))
            for t in path:
                np.testing.assert_allclose(actual[0][row, t], alone[t], atol=1e-13)
            unused -= set(path)
        assert not np.asarray(actual[0])[row, sorted(unused)].any(), "padding gives 0"
    for label, a, b in zip(("out", *NAMES, "state"), actual, expected, strict=True):
        # The order of sums alone: a few 1e-16 here.
        np.testing.assert_allclose(a, b, atol=1e-12 * np.abs(b).max(), err_msg=label)


CUT = jax.jit(lambda prev, until: tuple(cut_rows(prev, until, 4, 2, 8))[1:-1])


@pytest.mark.parametrize("name", FORESTS)
def test_chunks_are_chains_and_states_are_where_they_are_looked_for(name):
    until, prev, branches = pack(FORESTS[name])
    lists = [np.asarray(x) for x in CUT(jnp.asarray(prev)[None], jnp.asarray(until)[None])]
    seen = []
    for start, length, source, keep, count in zip(*lists, strict=True):
        assert (length[:count] > 0).all() and not length[count:].any()
        slots: dict[int, int] = {}
        last = None
        for s, n, come_from, leave_at in zip(start, length, source, keep, strict=True):
            if n == 0:
                continue
            seen += range(s, s + n)
            assert (prev[s + 1 : s + n] == np.arange(s, s + n - 1)).all(), "a chain"
            before = -1 if come_from == ROOT else last if come_from == NEIGHBOR else None
            assert (slots[come_from] if before is None else before) == prev[s]
            last = s + n - 1
            if leave_at < count_slots(T):
                slots[leave_at] = last
    assert sorted(seen) == sorted({t for path in branches for t in path})


@jax.jit
def find_links(until, prev):
    return gpu_windows.find_links(until, 2, gpu_windows.cut(prev, until))[0]


@pytest.mark.parametrize(
    "forest",
    [
        pytest.param(
            testing.random_forest(np.random.default_rng(3), 250, 40), marks=pytest.mark.slow
        ),
        testing.documents([3, 130, 1, 64, 5, 40]),
        testing.agent_tree(4, 50, 9),
        [(64, -1), (64, -1), (100, 1), (13, 1), (9, -1)],
    ],
)
def test_windows_of_the_hopper_kernels(forest):
    """A chunk's tokens lie in its window, which TMA can move; every token is in one chunk; numbers
    go to windows and back; blank is what no whole chunk writes."""
    T, C, tile = 264, gpu_windows.C, gpu_windows.TILE  # not whole blocks of C
    row, count = testing.pack(forest, T), sum(size for size, _ in forest)
    until = np.where(np.arange(T) < count, row["until"], 0).astype(np.int32)[None]
    prev = row["prev"].astype(np.int32)[None]
    links = find_links(jnp.asarray(until), jnp.asarray(prev))
    window, offset, length = (np.asarray(x[0]) for x in (links.window, links.offset, links.length))
    total = int(links.total[0])
    assert 0 < total <= len(window) and (length[:total] > 0).all() and not length[total:].any()
    assert (window % tile == 0).all() and (window + C <= T).all() and (window >= 0).all()
    assert (offset >= 0)[:total].all() and (offset + length <= C)[:total].all()
    first = (window + offset)[:total]
    ranges = list(zip(first, length, strict=False))
    tokens = np.concatenate([np.arange(s, s + n) for s, n in ranges])
    assert sorted(tokens) == list(range(count))

    x = np.random.default_rng(0).standard_normal((1, T, 3), np.float32)
    by_chunk = jax.jit(gpu_windows.by_chunk, static_argnums=2)(links, jnp.asarray(x), False)
    assert by_chunk.shape == (1, len(window), 3, C)
    back = jax.jit(gpu_windows.from_chunks, static_argnums=(2, 3))(links, by_chunk, False, T)
    np.testing.assert_array_equal(back[0], np.where(np.arange(T)[:, None] < count, x[0], 0.0))

    full = {t for s, n in ranges if n == C for t in range(s // tile, (s + n) // tile)}
    bits = np.asarray(links.blank[0])
    actual = {t for t in range(T // tile) if bits[t * tile // C] >> (t % (C // tile)) & 1}
    assert actual == set(range(T // tile)) - full


@pytest.mark.slow
def test_a_row_in_pieces_ends_in_the_same_state():
    """Prompts in pieces of any length and single tokens; what stands behind a row's end leaves no
    trace, and a row without new tokens keeps its state bit for bit."""
    *arguments, state, _ = draw()
    step = jax.jit(gated_delta)
    with jax.enable_x64(True):
        S, seen = jnp.asarray(state), np.zeros(2, int)
        for width, counts in [(9, [9, 5]), (1, [1, 0]), (1, [1, 1]), (9, [0, 7]), (9, [2, 9])]:
            part = [np.ones((2, width, *x.shape[2:])) for x in arguments]
            for array, x in zip(part, arguments, strict=True):
                for row, count in enumerate(counts):
                    array[row, :count] = x[row, seen[row] : seen[row] + count]
            until = np.where(np.arange(width) < np.array(counts)[:, None], width, 0)
            before = S
            out, S = step(*map(jnp.asarray, part), jnp.asarray(until, jnp.int32), state=S)
            for row, count in enumerate(counts):
                index = range(seen[row] + count)
                alone, last = run_alone(index, *(x[row] for x in arguments), state[row])
                np.testing.assert_allclose(S[row], last, atol=1e-13)
                for t in range(count):
                    np.testing.assert_allclose(out[row, t], alone[seen[row] + t], atol=1e-13)
                if count == 0:
                    np.testing.assert_array_equal(S[row], before[row])
            seen += counts


def draw_step(dtype="float32", rows=3):
    """Inputs of a decoding layer for rows of one token, the second of which has none."""
    rng = np.random.default_rng(1)
    shapes = ((1, 2, 64), (1, 2, 64), (1, 4, 64), (1, 4), (1, 4))
    q, k, v, g, beta = (rng.standard_normal((rows, *shape), np.float32) for shape in shapes)
    low = [jnp.asarray(x, dtype) for x in (q / 8, k / 8, v)]
    until = np.array([[1], [0], [1]], np.int32)[:rows]
    state = rng.standard_normal((rows, 4, 64, 64), np.float32)
    return *low, -abs(jnp.asarray(g)), jax.nn.sigmoid(beta), jnp.asarray(until), jnp.asarray(state)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
def test_the_kernel_of_decoding(dtype):
    """Interpreted, in two programs a head: beside XLA; a row without a token keeps every bit."""
    *arguments, until, state = draw_step(dtype)
    config = gpu_decode.Config(columns=32)
    kernel = jax.jit(functools.partial(gpu_decode.run, config, interpret=True))
    out, S = kernel(*arguments, until, state)
    expected, wanted_S = jax.jit(xla.gated_delta)(*arguments, until, state=state)
    np.testing.assert_allclose(S, wanted_S, atol=2e-6)
    close = 2e-6 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out, expected)), atol=close)
    np.testing.assert_array_equal(S[1], state[1])
    assert not out[1].any() and out.dtype == dtype and abs(S[0] - state[0]).max() > 0.1


def test_decoding_lowers_for_any_nvidia_gpu_and_copies_no_state(monkeypatch):
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice("NVIDIA A100-SXM4-80GB", 108, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    *arguments, until, state = draw_step()
    with jax.sharding.use_abstract_mesh(mesh):
        run = lambda state, *a: gated_delta(*a, state=state, impl="gpu_decode")  # noqa: E731
        traced = jax.jit(run, donate_argnums=0).trace(state, *arguments, until)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    touching = [line for line in text.splitlines() if "3x4x64x64xf32" in line]
    kernels = [line for line in touching if "custom_call" in line]
    # main's head, the call that holds the kernel, the kernel, and two returns.
    assert len(kernels) == 1 and "gated_delta_decode" in text and len(touching) <= 6
    assert "output_operand_alias" in kernels[0]
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        gated_delta(*arguments, until, state=state, impl="gpu_decode")
    monkeypatch.setattr(gpu_decode, "require_nvidia", lambda: None)
    with pytest.raises(NotImplementedError, match="takes one token a row, and a state before it"):
        gated_delta(*arguments, until, impl="gpu_decode")
    with pytest.raises(NotImplementedError, match="heads of 8 and 64 dims are not among"):
        few = [x[..., :8] for x in arguments[:2]]
        narrow = state[:, :, :8]
        gated_delta(*few, *arguments[2:], until, state=narrow, impl="gpu_decode")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("tree_h1_3_init", "float32", marks=pytest.mark.thorough),
        ("tree_h2_4_slow", "bfloat16"),
        pytest.param("tree_h2_2_hard", "float32", marks=pytest.mark.thorough),
        *[
            pytest.param(name, "bfloat16", marks=pytest.mark.thorough)
            for name in CI
            if name != "tree_h2_4_slow"
        ],
    ],
)
def test_rounding(name, dtype):
    """Errors by norm beside float64. bfloat16: twice the largest that rounding all operands of the
    matmuls alone gives (6.5e-3, measured at K = V = 128); gates that forget all at once are among
    them, which overflow where exp comes before its mask."""
    inputs = CI[name].inputs()
    inputs["g"][0, 40:44] = -100.0
    until, prev = (jnp.asarray(inputs[n]) for n in ("until", "prev"))
    low = [jnp.asarray(inputs[n], dtype) for n in ("q", "k", "v")]
    low += [jnp.asarray(inputs[n]) for n in ("g", "beta")]
    state = np.zeros((len(until), low[2].shape[2], low[0].shape[3], low[2].shape[3]), np.float32)
    actual = with_gradients(xla.gated_delta)(
        [*low, jnp.asarray(state)], jnp.asarray(inputs["d_out"], dtype), until, prev
    )
    with jax.enable_x64(True):
        exact = RUN_REFERENCE(
            [*(jnp.asarray(x, "float64") for x in low), jnp.asarray(state, "float64")],
            jnp.asarray(jnp.asarray(inputs["d_out"], dtype), "float64"),
            until,
            prev,
        )
    for label, a, b in zip(("out", *NAMES), actual, exact, strict=False):
        a, b = np.asarray(a, np.float64), np.asarray(b)
        assert np.isfinite(a).all(), label
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < (1.3e-2 if dtype == "bfloat16" else 5e-5), f"{label}: {error:.1e}"


@pytest.mark.thorough
def test_two_runs_give_the_same_bits():
    *arguments, d_out = draw()
    until, prev, _ = (np.stack([x, x]) for x in (*pack(FORESTS["random"])[:2], np.zeros(1)))
    with jax.enable_x64(True):
        provided = ([jnp.asarray(x) for x in arguments], jnp.asarray(d_out), until, prev)
        for a, b in zip(RUN(*provided), RUN(*provided), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_convolution_follows_branches():
    until, prev, branches = pack(FORESTS["short nodes"])
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((1, T, 3)), rng.standard_normal((3, 4))
    with jax.enable_x64(True):
        actual = np.asarray(causal_conv(jnp.asarray(x), jnp.asarray(w), jnp.asarray(prev)[None]))
        tail = jnp.asarray(x[:, :3])
        behind = np.asarray(causal_conv(jnp.asarray(x[:, 3:]), jnp.asarray(w), None, tail))
        full = np.asarray(causal_conv(jnp.asarray(x), jnp.asarray(w)))
    for path in branches:
        longer = np.concatenate([np.zeros((3, 3)), x[0, path]])
        expected = sum(longer[j : j + len(path)] * w[:, j] for j in range(4))
        np.testing.assert_allclose(actual[0, path], expected, atol=1e-14)
    np.testing.assert_allclose(behind, full[:, 3:], atol=1e-14)


@pytest.mark.parametrize("impl", [pytest.param("xla", marks=pytest.mark.slow), "reference"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_strict_modes(impl, dtype):
    """Traced only: no dtype and no rank is promoted on the quiet."""
    q, v = jnp.ones((1, T, 2, 8), dtype), jnp.ones((1, T, 4, 8), dtype)
    g, until = jnp.ones((1, T, 4), jnp.float32), jnp.full((1, T), T, jnp.int32)

    def loss(q, v, prev):
        out, _ = gated_delta(q, q, v, g, g, until, prev, impl=impl)
        return out.astype(jnp.float32).sum()

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for prev in (None, until - 2):
            actual = jax.eval_shape(jax.grad(loss, (0, 1)), q, v, prev)
            assert {x.dtype for x in actual} == {jnp.dtype(dtype)}


def test_shapes_that_do_not_fit_are_refused():
    q, v = jnp.ones((1, 8, 2, 4)), jnp.ones((1, 8, 3, 4))
    g, until = jnp.ones((1, 8, 3)), jnp.ones((1, 8), jnp.int32)
    with pytest.raises(ValueError, match="3 value heads are no multiple of 2"):
        gated_delta(q, q, v, g, g, until)
    with pytest.raises(ValueError, match=r"beta is float32\[1, 8, 2\].*want float32\[1, 8, 3\]"):
        gated_delta(q, q, v, g, g[:, :, :2], until)
