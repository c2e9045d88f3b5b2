"""The Hopper backend of grouped_matmul and moe_ffn: what it takes, and its vjps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain_kernels.grouped_matmul import gpu
from jaxtrain_kernels.grouped_matmul.ffn import Adapters, Clamped, bias_gradient, compose, unpacked
from jaxtrain_kernels.grouped_matmul.routing import combine, gather_gates, gather_in
from jaxtrain_kernels.mosaic import require_hopper

FUSED = ("silu", "swish", "gelu_pytorch_tanh", "relu")
"""The activations that the kernels know beside `Clamped`; any other is computed between them."""


def check(dtype, block: int, D: int, F: int) -> None:
    """Raise NotImplementedError with the reason unless the kernels take this."""
    require_hopper()
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 rows, got {dtype}")
    if block != gpu.BLOCK:
        raise NotImplementedError(f"takes blocks of {gpu.BLOCK} rows, got {block}")
    if gpu.fitting(D) is None or gpu.fitting(F) is None:
        raise NotImplementedError(f"{D} and {F} columns must be multiples of 64, at least 128")


def grouped_matmul(x, w, segments, *, freeze_w=False):
    """Implement `jaxtrain_kernels.grouped_matmul`; bfloat16 rows, blocks of 128, D and F alike."""
    check(x.dtype, x.shape[0] // segments.group.shape[0], *w.shape[1:])
    return run(freeze_w, x, w, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(freeze_w, x, w, segments):
    """`grouped_matmul` behind its checks."""
    return _clear(_product([(x, w.astype(x.dtype))], segments), segments)


def _run_fwd(freeze_w, x, w, segments):
    # In a loop XLA would run the kernel twice: for its result, and into the stack of all layers'.
    return lax.optimization_barrier(run(freeze_w, x, w, segments)), (x, w, segments)


def _run_bwd(freeze_w, residuals, dy):
    x, w, segments = residuals
    dx = _clear(_product([(dy, w.astype(x.dtype))], segments, transpose=True), segments)
    dw = None if freeze_w else _weights(x, [dy], segments)[0].astype(w.dtype)
    return dx, dw, None


run.defvjp(_run_fwd, _run_bwd)


def moe_ffn(
    x, gates, w_gate, w_up, w_down, routing, *, adapters, biases, activation, freeze_experts
):
    """Implement `jaxtrain_kernels.moe_ffn`, with the routing of its choices."""
    block = routing.row_token.shape[0] // routing.segments.group.shape[0]
    check(x.dtype, block, *w_up.shape[1:])
    input_biases = [bias for bias in (biases.gate, biases.up) if bias is not None]
    supported = isinstance(activation, Clamped) or activation in FUSED
    if not supported or w_gate is None or len(input_biases) == 1:
        arrays = (x, gates, w_gate, w_up, w_down, routing)
        options = {"activation": activation, "freeze_experts": freeze_experts}
        options |= {"adapters": adapters, "biases": biases, "take": take_rows}
        return compose(grouped_matmul, *arrays, **options)
    rows_PD = gather_in(x, routing, take_rows)
    gates_P = gather_gates(gates, routing)
    weights, input_biases = (
        (w_gate, w_up, w_down),
        tuple(b.astype(jnp.float32) for b in input_biases),
    )
    arguments = (rows_PD, gates_P, weights, input_biases, adapters, routing.segments)
    out_PD = ffn(activation, freeze_experts, *arguments)
    return combine(out_PD, routing, take_rows)


def take_rows(x, index, active):
    """x[index] in the first `active` blocks."""
    return lax.optimization_barrier(gpu.gather(x, index, active))  # see `_run_fwd`


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def ffn(activation, freeze, x, gates, weights, biases, adapters, segments):
    """(gates * act(x W_gate) * (x W_up)) W_down of rows [P, D], undefined in unused blocks; biases
    float32 [E, F] behind W_gate and W_up, or ()."""
    return _forward(activation, x, gates, weights, biases, adapters, segments, save=False)[0]


def _ffn_fwd(activation, freeze, x, gates, weights, biases, adapters, segments):
    outputs = _forward(activation, x, gates, weights, biases, adapters, segments, save=True)
    # See `_run_fwd`; one by one, so that what nothing reads is not kept.
    out, saved = jax.tree.map(lax.optimization_barrier, outputs)
    return out, (x, gates, weights, biases, adapters, segments, saved)


def _forward(activation, x, gates, weights, biases, adapters, segments, *, save):
    w_gate, w_up, w_down = (unpacked(w, x.dtype) for w in weights)
    inner, outer = pad_adapters(adapters, x.dtype)
    triples, low_in, low_down = [(x, w_gate, w_up)], None, None
    if inner is not None:
        a, b_gate, b_up = inner
        low_in = _product([(x, a)], segments)
        triples.append((low_in, b_gate, b_up))
    hidden, *gate_up = gpu.gated_product(
        triples, biases, gates, segments, activation=activation, save=save, config=gpu.Config()
    )
    pairs = [(hidden, w_down)]
    if outer is not None:
        a, b = outer
        low_down = _product([(hidden, a)], segments)
        pairs.append((low_down, b))
    return _product(pairs, segments), (hidden, gate_up, low_in, low_down)


def _ffn_bwd(activation, freeze, residuals, dout):
    x, gates, weights, biases, adapters, segments, saved = residuals
    hidden, gate_up, low_in, low_down = saved
    w_gate, w_up, w_down = (unpacked(w, x.dtype) for w in weights)
    (inner, outer), pull = jax.vjp(lambda a: pad_adapters(a, x.dtype), adapters)
    d_inner = d_outer = None
    pairs = [(dout, w_down)]
    if outer is not None:
        a, b = outer
        d_low = _product([(dout, b)], segments, transpose=True)
        pairs.append((d_low, a))
        d_outer = (_weights(hidden, [d_low], segments)[0], _weights(low_down, [dout], segments)[0])
    config = dataclasses.replace(gpu.fitting(w_down.shape[1]), stages=3)
    if w_down.shape[1] % config.columns:  # no registers are left to tell what is new
        config = dataclasses.replace(config, columns=min(config.columns, 192))
    d_gate, d_up, d_gates = gpu.gated_gradient(
        pairs, *gate_up, gates, segments, activation=activation, config=config
    )
    pairs = [(d_gate, w_gate), (d_up, w_up)]
    if inner is not None:
        a, b_gate, b_up = inner
        d_low = _product([(d_gate, b_gate), (d_up, b_up)], segments, transpose=True)
        pairs.append((d_low, a))
        d_inner = (_weights(x, [d_low], segments)[0], *_weights(low_in, [d_gate, d_up], segments))
    dx = _product(pairs, segments, transpose=True)
    (d_adapters,) = pull((d_inner, d_outer))
    d_weights = (None, None, None)
    if not freeze:
        weight_gradients = (
            *_weights(x, [d_gate, d_up], segments),
            *_weights(hidden, [dout], segments),
        )
        d_weights = tuple(d.astype(w.dtype) for d, w in zip(weight_gradients, weights, strict=True))
    d_biases = ()
    if biases:
        d_biases = tuple(bias_gradient(_clear(d, segments), segments) for d in (d_gate, d_up))
    return dx, d_gates.sum(0), d_weights, d_biases, d_adapters, None


ffn.defvjp(_ffn_fwd, _ffn_bwd)


def pad_adapters(adapters: Adapters, dtype):
    """The adapters as extra steps of the kernels' loops: ((a, b_gate, b_up) or None, (a, b) or
    None), ranks filled with zeros to what the kernels take.

    gate and up share one product: a [E, D, 2R] holds both side by side, and each b [E, 2R, F] is
    zero where the other's half is.
    """

    def fill(x, axis, size):
        """Zeros behind x up to `size` along `axis`."""
        widths = [(0, 0)] * 3
        widths[axis] = (0, size - x.shape[axis])
        return jnp.pad(x.astype(dtype), widths)

    def up_to(rank, multiple):
        return -(-rank // multiple) * multiple

    inner = outer = None
    pair = [factors for factors in (adapters.gate, adapters.up) if factors is not None]
    if pair:
        half = up_to(max(a.shape[2] for a, _ in pair), gpu.BLOCK // 2)
        (E, D, _), F = pair[0][0].shape, pair[0][1].shape[2]
        none = (jnp.zeros((E, D, 0), dtype), jnp.zeros((E, 0, F), dtype))
        gate, up = (none if f is None else f for f in (adapters.gate, adapters.up))
        a = jnp.concatenate([fill(gate[0], 2, half), fill(up[0], 2, half)], 2)
        empty = jnp.zeros((E, half, F), dtype)
        b_gate = jnp.concatenate([fill(gate[1], 1, half), empty], 1)
        b_up = jnp.concatenate([empty, fill(up[1], 1, half)], 1)
        inner = (a, b_gate, b_up)
    if adapters.down is not None:
        a, b = adapters.down
        rank = up_to(a.shape[2], gpu.BLOCK)
        outer = (fill(a, 2, rank), fill(b, 1, rank))
    return inner, outer


def _clear(rows, segments):
    """0 in the blocks that no expert uses, which the kernels leave undefined."""
    used = jnp.arange(rows.shape[0], dtype=jnp.int32) < segments.active * gpu.BLOCK
    return jnp.where(used[:, None], rows, 0)


def _product(pairs, segments, transpose: bool = False):
    config = gpu.fitting(pairs[0][1].shape[1 if transpose else 2])
    return gpu.product(pairs, segments, transpose=transpose, config=config)


def _weights(x, dys, segments):
    sizes = {gpu.fitting(dy.shape[1]).columns for dy in dys}
    config = gpu.Config(columns=min(sizes))
    return gpu.weight_gradient(x, dys, segments, config=config)
