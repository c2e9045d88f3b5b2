"""Ops of kernels.py that move heads and caches: convolution, rotation, decode attention.

The calls of several layers are timed in one program, as each is shorter than a launch from the
host may take.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtrain_kernels import conv_heads, decode_attention, rotate_heads
from jaxtrain_kernels.conv_heads import cases as conv_cases
from jaxtrain_kernels.conv_heads import gpu as conv_gpu
from jaxtrain_kernels.conv_heads import hops_of
from jaxtrain_kernels.decode_attention import cases as decode_cases
from jaxtrain_kernels.decode_attention import gpu as decode_gpu
from jaxtrain_kernels.rotate_heads import cases as rotate_cases
from jaxtrain_kernels.rotate_heads import gpu as rotate_gpu
from jaxtrain_kernels.rotate_heads import mosaic_gpu
from kernel_ops import Op, Program

from jaxtrain.layers.kv_cache import store


class ConvHeads(Op):
    """The rows of a batch are the same for all layers: their hops are found once.

    `tb_s` counts x, and q, k and v or their gradients; in the backward x twice, as itself and as
    its gradient.
    """

    label, cases, unit, repeats = "conv_heads", conv_cases.CASES, "tb_s", 4
    names, exact = ("q", "k", "v", "dx", "dw"), "reference"
    sweep = [conv_gpu.Config(*sizes) for sizes in ((16, 4, 4), (32, 4, 4), (64, 8, 8))]
    """(tokens, warps, gradient_warps)."""

    def __init__(self, case):
        super().__init__(case)
        inputs = case.inputs()
        self.prev, self.layers = jnp.asarray(inputs["prev"]), []
        for key in jax.random.split(jax.random.key(0), self.repeats):
            names = ("x", "d_q", "d_k", "d_v")
            keys = jax.random.split(key, len(names))
            x, *d_outs = (
                jax.random.normal(key, inputs[name].shape, jnp.bfloat16)
                for key, name in zip(keys, names, strict=True)
            )
            self.layers.append((x, jnp.asarray(inputs["w"]), tuple(d_outs)))

    def variants(self, impls):
        configs = self.sweep if "sweep" in impls else ()
        return super().variants(impls) + [
            ({"impl": f"gpu_{c.tokens}_{c.warps}_{c.gradient_warps}"}, c) for c in configs
        ]

    def call(self, impl, x, w, prev, hops):
        """Return q, k, v; impl: a backend or a Config."""
        case = self.case
        if isinstance(impl, conv_gpu.Config):
            parts = conv_gpu.ColumnParts(case.dim, case.width, case.taps, 1e-6, impl)
            return conv_gpu.run(parts, x, w, case.dim, hops)
        return conv_heads(x, w, case.dim, case.dim, prev, hops=hops, impl=impl)

    def programs(self, impl):
        def forward(prev, layers):
            hops = hops_of(prev, self.case.taps)
            return [self.call(impl, x, w, prev, hops) for x, w, _ in layers]

        def backward(prev, layers):
            hops, gradients = hops_of(prev, self.case.taps), []
            for x, w, d_outs in layers:
                call = lambda x, w: self.call(impl, x, w, prev, hops)  # noqa: E731
                # The outputs of the forward pass are not returned, so they are not computed.
                gradients.append(jax.vjp(call, x, w)[1](d_outs))
            return gradients

        arguments = self.prev, self.layers
        sizes = self.case.moved_bytes()
        steps = {"forward": forward, "backward": backward}
        return {
            step: Program(size, function, arguments, repeats=self.repeats)
            for (step, function), size in zip(steps.items(), sizes, strict=True)
        }

    def outputs(self, impl, dtype):
        x, w, d_outs = self.layers[0]

        @jax.jit
        def both(x, w, d_outs):
            outs, pull = jax.vjp(lambda x, w: self.call(impl, x, w, self.prev, None), x, w)
            return [y.astype(jnp.float32) for y in (*outs, *pull(d_outs))]

        return both(x.astype(dtype), w, tuple(d.astype(dtype) for d in d_outs))


class RotateHeads(Op):
    """`tb_s` counts heads and angles, and in the backward with a norm the recomputed heads."""

    label, cases, unit, repeats = "rotate_heads", rotate_cases.CASES, "tb_s", 8
    exact, eps = "reference", 1e-6
    sweep = [rotate_gpu.Config(*sizes) for sizes in ((4, 2), (2, 1), (8, 2), (1, 1), (2, 2))]
    """(heads, gradient_heads)."""

    def __init__(self, case):
        super().__init__(case)
        self.names = ("out", "dx", *(["d_scales"] if case.normed else []))
        inputs = dataclasses.replace(case, tokens=64).inputs()
        self.cos, self.sin = (
            jnp.tile(jnp.asarray(inputs[name]), (1, case.tokens // 64, 1))
            for name in ("cos", "sin")
        )
        B, T, H = case.rows, case.tokens, case.head_dim
        counts = (*case.counts, *([case.passed] if case.passed else []))
        self.xs, self.d_outs = [], []
        for key in jax.random.split(jax.random.key(0), self.repeats):
            first, *keys = jax.random.split(key, len(counts) + 1)
            self.xs.append(jax.random.normal(first, (B, T, sum(counts) * H), jnp.bfloat16))
            self.d_outs.append(
                tuple(
                    jax.random.normal(key, (B, T, count, H), jnp.bfloat16)
                    for key, count in zip(keys, counts, strict=True)
                )
            )
        scales = jnp.asarray(inputs["scales"]) if case.normed else None
        self.scales = [scales] * self.repeats

    def variants(self, impls):
        configs = self.sweep if "sweep" in impls else ()
        return super().variants(impls) + [
            ({"impl": f"mosaic_gpu_{c.heads}_{c.gradient_heads}"}, c) for c in configs
        ]

    def call(self, impl, x, cos, sin, scales):
        """Return the heads; impl: a backend or a Config."""
        case, scales = self.case, None if scales is None else list(scales)
        if isinstance(impl, rotate_gpu.Config):
            heads = rotate_gpu.Heads(case.counts, case.passed, case.head_dim, case.half)
            return mosaic_gpu.rotate_heads_with(impl, heads, x, cos, sin, scales, self.eps)
        options = {"eps": self.eps, "impl": impl}
        return rotate_heads(x, cos, sin, case.counts, case.head_dim, scales, **options)

    def programs(self, impl):
        def forward(xs, cos, sin, scales):
            return [self.call(impl, x, cos, sin, s) for x, s in zip(xs, scales, strict=True)]

        def backward(xs, cos, sin, scales, d_outs):
            gradients = []
            for x, scale, d_out in zip(xs, scales, d_outs, strict=True):
                call = lambda x, scale: self.call(impl, x, cos, sin, scale)  # noqa: E731
                # The outputs of the forward pass are not returned, so they are not computed.
                gradients.append(jax.vjp(call, x, scale)[1](d_out))
            return gradients

        read, write = self.case.moved_bytes()
        arrays = (self.xs, self.cos, self.sin, self.scales)
        return {
            "forward": Program(read, forward, arrays, repeats=self.repeats),
            "backward": Program(write, backward, (*arrays, self.d_outs), repeats=self.repeats),
        }

    def outputs(self, impl, dtype):
        @jax.jit
        def both(x, scales, d_out):
            call = lambda x, s: self.call(impl, x, self.cos, self.sin, s)  # noqa: E731
            outs, pull = jax.vjp(call, x, scales)
            dx, d_scales = pull(tuple(d.astype(dtype) for d in d_out))
            flat = [out.reshape(*x.shape[:2], -1) for out in outs]
            outputs = [jnp.concatenate(flat, axis=-1), dx, d_scales][: len(self.names)]
            return [y.astype(jnp.float32) for y in outputs]

        return both(self.xs[0].astype(dtype), self.scales[0], self.d_outs[0])

    def peers(self):
        from peers import kernel_ops

        work = dict(zip(("forward", "backward"), self.case.moved_bytes(), strict=True))
        build = functools.partial(kernel_ops.compiled_rotation, self.case, self.repeats)
        return {"torch_compile": (build, work, self.repeats)}

    def free(self):
        del self.xs, self.d_outs, self.scales, self.cos, self.sin


class DecodeAttention(Op):
    """A call is timed inside a scan over the layers of a cache, as the sampler makes it.

    `tb_s` counts one read of the visible keys and values; `read` is how fast XLA sums one layer's
    keys after another. For caches of 8 bits codes and scales are counted. The peers get one layer's
    cache in the order that suits them: PyTorch's attention with a mask, which reads all slots, and
    compiled FlexAttention, which skips blocks.
    """

    label, cases, unit = "decode_attention", decode_cases.CASES, "tb_s"
    names, exact = ("out",), "reference"
    stored = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
    sweep = [
        *((64, part, 4, stages) for part in (128, 256, 512) for stages in (3, 4)),
        *((64, 256, 4, 2), (64, 256, 8, 3), (32, 256, 4, 3)),
        *((128, 256, 4, 3), (128, 256, 8, 3), (128, 512, 8, 3)),
    ]
    """(keys, part, warps, stages)."""
    sweep_codes = [
        *((128, part, 4, stages) for part in (128, 256) for stages in (3, 4)),
        *((64, 256, 4, stages) for stages in (3, 4)),
    ]

    def __init__(self, case):
        super().__init__(case)
        self.sharing = {n: jnp.asarray(x) for n, x in case.sharing().items()}
        cache = (case.layers, case.rows, case.slots, case.kv_heads, case.head_dim)
        shapes = ((case.rows, case.heads, case.head_dim), cache, cache)
        keys = jax.random.split(jax.random.key(0), 3)
        arrays = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]
        if sharing := case.sharing():
            local_BS = np.arange(case.slots) >= sharing["shared"][:, None]
            arrays[1:] = (
                jnp.where(local_BS[:, :, None, None], x, x[:, sharing["leader"]])
                for x in arrays[1:]
            )
        until, since = (jnp.asarray(x) for x in case.interval())
        self.arrays = (*arrays, until, None if case.window is None else since)

    def cache(self, stored: str) -> tuple:
        """Return q, k, v, until, since; with k and v in 8 bits their scales follow."""
        if not stored:
            return self.arrays
        q, k, v, until, since = self.arrays
        quantize = jax.jit(store, static_argnums=1)
        (k, k_scale), (v, v_scale) = (quantize(x, self.stored[stored]) for x in (k, v))
        return q, k, v, until, since, k_scale, v_scale

    def variants(self, impls):
        variants = [({"impl": "read"}, ("read", "", None))]
        for impl in (impl for impl in impls if impl != "torch"):
            name, _, stored = impl.partition("_")
            if name != "sweep":
                variants.append(({"impl": impl}, (name, stored, None)))
                continue
            dtype = jnp.dtype(self.stored.get(stored, jnp.bfloat16))
            for keys, part, warps, stages in self.sweep_codes if stored else self.sweep:
                config = f"{dtype}_keys{keys}_part{part}_warps{warps}_stages{stages}"
                sizes = decode_gpu.Config(keys, part, warps, stages)
                variants.append(({"impl": "gpu", "config": config}, ("gpu", stored, sizes)))
        return variants

    def attend(self, name: str, config, q, k, v, layer, until, since, **scales):
        if config is None:
            options = self.sharing | {"softcap": self.case.softcap, "impl": name} | scales
            return decode_attention(q, k, v, layer, until, since, **options)
        options = {"scale": self.case.head_dim**-0.5, "softcap": self.case.softcap} | scales
        bounds = (None if x is None else x[:, None] for x in (until, since))
        return decode_gpu.run(config, q[:, None], k, v, layer, *bounds, **options)[:, 0]

    def programs(self, impl):
        name, stored, config = impl
        case = self.case
        if name == "read":
            k = self.arrays[1]
            size = k.nbytes / case.layers
            return {"": Program(size, self.sum_keys, (k,), repeats=case.layers)}
        passes = 4 * case.layers

        def layers(q, k, v, until, since, *scales):
            named = dict(zip(("k_scale", "v_scale"), scales, strict=bool(scales)))

            def step(q, layer):
                return self.attend(name, config, q, k, v, layer, until, since, **named), None

            return lax.scan(step, q, jnp.arange(passes, dtype=jnp.int32) % case.layers)[0]

        read = case.read_bytes(1) * (1 + 4 / case.head_dim) if stored else case.read_bytes()
        return {"": Program(read, layers, self.cache(stored), repeats=passes)}

    def sum_keys(self, k):
        """Return sums of all keys, layer after layer."""

        def step(sums, layer):
            keys = lax.dynamic_index_in_dim(k, layer, keepdims=False)
            return sums + keys.astype(jnp.float32).sum((1, 2, 3)), None

        layers = jnp.arange(self.case.layers, dtype=jnp.int32)
        return lax.scan(step, jnp.zeros(self.case.rows), layers)[0]

    def exact_and_plain(self, impl):
        """Return float32 and bf16 maths on the same cache: what codes stand for is exact."""
        stored = impl.partition("_")[2]
        with jax.default_matmul_precision("highest"):
            exact = self.outputs(f"reference_{stored}", jnp.float32, widen=True)
        return exact, self.outputs(f"xla_{stored}", jnp.bfloat16, widen=True)

    def outputs(self, impl, dtype, widen=False):
        if impl == "mosaic_gpu":  # as the other ops call the kernel of Hopper
            impl = "gpu"
        name, _, stored = impl.partition("_")

        @jax.jit
        def run(q, k, v, until, since, *scales, layer):
            k, v, *scales = (lax.dynamic_index_in_dim(x, layer) for x in (k, v, *scales))
            if widen and stored:
                pairs = zip((k, v), scales, strict=True)
                k, v = (codes.astype(jnp.float32) * scale[..., None] for codes, scale in pairs)
                scales = []
            if not scales:
                k, v = k.astype(dtype), v.astype(dtype)
            named = dict(zip(("k_scale", "v_scale"), scales, strict=bool(scales)))
            return self.attend(name, None, q.astype(dtype), k, v, 0, until, since, **named)

        arrays = self.cache(stored)
        layers = [run(*arrays, layer=i).astype(jnp.float32) for i in range(self.case.layers)]
        return [jnp.stack(layers)]

    def peers(self):
        from peers import kernel_ops

        if self.case.group != 1:
            return {}
        builds = {"torch_sdpa": kernel_ops.decode_sdpa, "torch_flex": kernel_ops.decode_flex}
        work = {"": self.case.read_bytes()}
        return {n: (lambda f=f: {"": f(self.case)}, work, 1) for n, f in builds.items()}

    def free(self):
        del self.arrays
