"""Ops of kernels.py that multiply matrices: attention, log-probs, experts, the gated delta rule."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtrain_kernels import Adapters, Context, attention, gated_delta, logp_gather, moe_ffn
from jaxtrain_kernels import weighted_logp as weighted_logp_op
from jaxtrain_kernels.gated_delta import cases as delta_cases
from jaxtrain_kernels.gated_delta import find_chunks
from jaxtrain_kernels.grouped_matmul import cases as moe_cases
from jaxtrain_kernels.grouped_matmul.ffn import Biases
from jaxtrain_kernels.logp_gather import cases as logp_cases
from jaxtrain_kernels.tree_attention import cases as attention_cases
from jaxtrain_kernels.tree_attention import cudnn


class Program(NamedTuple):
    """A step's function, and how its time is counted."""

    work: float
    """Operations or bytes of one call."""
    function: Callable
    arguments: tuple
    labels: dict = {}
    """Further cells of the row."""
    repeats: int = 1
    """Calls in the function: several for kernels that are shorter than a launch may take."""


class Op:
    """An op on a case: its programs, its outputs for error measures, its PyTorch peers."""

    label = ""
    cases: list = []
    unit = "tflops"
    names: tuple[str, ...] = ()
    """Names of `outputs`."""
    exact = "xla"
    """Backend of the float32 maths."""

    def __init__(self, case):
        self.case = case

    def variants(self, impls: list[str]):
        """Return (labels, backend or config) of everything to time with jax."""
        return [({"impl": impl}, impl) for impl in impls if impl not in ("torch", "sweep")]

    def programs(self, impl) -> dict[str, Program]:
        """Return what is timed of a backend, by step."""
        raise NotImplementedError

    def outputs(self, impl, dtype) -> list:
        """Return outputs and gradients in float32, computed in `dtype`."""
        raise NotImplementedError

    @functools.cached_property
    def baselines(self) -> tuple:
        """Outputs of float32 maths and of plain bf16 maths."""
        with jax.default_matmul_precision("highest"):
            exact = self.outputs(self.exact, jnp.float32)
        return exact, self.outputs("xla", jnp.bfloat16)

    def exact_and_plain(self, impl) -> tuple:
        """Return the outputs that those of `impl` are compared with."""
        return self.baselines

    def reduce(self) -> None:
        """Cut the case to what float32 maths can hold."""

    def peers(self) -> dict[str, tuple]:
        """Return {name: (builder of {step: callable}, {step: work}, calls in each)} in PyTorch."""
        return {}

    def peer_errors(self, report) -> None:
        """Add the errors of the PyTorch peer, if it has comparable outputs."""

    def free(self) -> None:
        """Drop the arrays on the device before PyTorch runs."""


def low(inputs: dict, *names: str) -> list:
    """Return arrays of a case in bfloat16."""
    return [jnp.asarray(inputs[name], jnp.bfloat16) for name in names]


def apply_pull(pull, cotangent):
    """Return the gradients of a saved forward pass."""
    return pull(cotangent)


class Attention(Op):
    label, cases = "attention", attention_cases.CASES
    names = ("out", "dq", "dk", "dv")

    def __init__(self, case):
        super().__init__(case)
        self.inputs = case.inputs()
        self.arrays = {n: jnp.asarray(x) for n, x in self.inputs.items()}
        self.q, self.k, self.v, self.d_out = low(self.inputs, "q", "k", "v", "d_out")

    def function(self, impl):
        """Return (q, k, v) -> out."""
        case, arrays = self.case, self.arrays
        options = {"softcap": case.softcap, "window": case.window}
        names = ("until", "since", "positions", "key_positions")
        context = Context(*map(arrays.get, names))
        if impl == "cudnn":  # wants the number of documents instead of finding them
            options |= {"documents": len(case.forest()) * case.rows, "scale": case.head_dim**-0.5}
            return lambda q, k, v: cudnn.attention(q, k, v, context, **options)
        options |= {"sinks": arrays.get("sinks"), "impl": impl}
        return lambda q, k, v: attention(q, k, v, context, **options)

    def programs(self, impl):
        function, flops = self.function(impl), self.case.flops()
        arguments = (self.q, self.k, self.v)
        return {
            "forward": Program(flops, function, arguments),
            "backward": Program(2.5 * flops, *backward_program(function, arguments, self.d_out)),
        }

    def reduce(self):
        """Keep two query heads and one key head."""
        if self.case.sinks:
            self.arrays["sinks"] = self.arrays["sinks"][:2]
        self.q, self.d_out = self.q[:, :, :2], self.d_out[:, :, :2]
        self.k, self.v = self.k[:, :, :1], self.v[:, :, :1]

    def outputs(self, impl, dtype):
        inputs = (x.astype(dtype) for x in (self.q, self.k, self.v))
        out, pull = jax.vjp(jax.jit(self.function(impl)), *inputs)
        return [x.astype(jnp.float32) for x in (out, *pull(self.d_out.astype(dtype)))]

    def peers(self):
        from peers import kernel_ops

        if self.case.sinks or self.case.window is not None:
            return {}
        flops = self.case.flops()
        work = {"forward": flops, "backward": 2.5 * flops}
        builds = {"torch_flex": kernel_ops.flex, "torch_sdpa": kernel_ops.sdpa}
        return {
            n: (functools.partial(f, self.case, self.inputs), work, 1) for n, f in builds.items()
        }


def backward_program(function, arguments, cotangent) -> tuple:
    """Return (function, arguments) of the backward pass alone, on what the forward pass saved."""
    _, pull = jax.vjp(jax.jit(function), *arguments)
    return apply_pull, (pull, cotangent)


class LogpGather(Op):
    label, cases = "logp_gather", logp_cases.CASES
    names = ("logp", "entropy", "lse", "top", "d_hidden", "d_head")

    def __init__(self, case):
        super().__init__(case)
        self.inputs = case.inputs()
        self.hidden, self.head = low(self.inputs, "hidden", "head")
        self.targets, self.g = (jnp.asarray(self.inputs[n]) for n in ("targets", "g"))
        self.flops = 2 * case.tokens * case.width * case.vocabulary

    def programs(self, impl):
        def loss(hidden, head):
            return logp_gather(hidden, head, self.targets, impl=impl).logp.sum()

        arrays = (self.hidden, self.head)
        return {
            "forward": Program(self.flops, loss, arrays),
            "both": Program(3 * self.flops, jax.grad(loss, (0, 1)), arrays),
        }

    def outputs(self, impl, dtype):
        """Return values and gradients, with random cotangents for all three."""

        @jax.jit
        def both(hidden, head, g):
            call = lambda x, w: logp_gather(x, w, self.targets, impl=impl)  # noqa: E731
            out, pull = jax.vjp(call, hidden, head)
            return (*out, *pull(type(out)(*g, jnp.zeros_like(out.top))))

        arrays = both(self.hidden.astype(dtype), self.head.astype(dtype), self.g)
        return [x.astype(jnp.float32) for x in arrays]

    def peers(self):
        from peers import kernel_ops

        return {
            f"torch_compile_{chunks}": self.loss_peer(kernel_ops.compiled_logp, chunks=chunks)
            for chunks in (1, 8)
        }

    def loss_peer(self, build, **options) -> tuple:
        """Return the entry of a peer that computes a loss and its gradients."""
        inputs = self.inputs
        return lambda: {"both": build(inputs, **options)}, {"both": 3 * self.flops}, 1


class WeightedLogp(LogpGather):
    """A loss and its gradients, so its peers are whole losses."""

    label = "weighted_logp"
    names = ("logp", "entropy", "lse", "top", "sum", "d_hidden", "d_head")

    def call(self, impl, hidden, head):
        weights = jnp.abs(self.g[0])
        return weighted_logp_op(hidden, head, self.targets, weights, impl=impl)

    def programs(self, impl):
        def loss(hidden, head):
            return self.call(impl, hidden, head)[0]

        arrays = (self.hidden, self.head)
        return {
            "forward": Program(self.flops, loss, arrays),
            "both": Program(3 * self.flops, jax.value_and_grad(loss, (0, 1)), arrays),
        }

    def outputs(self, impl, dtype):
        call = jax.value_and_grad(functools.partial(self.call, impl), (0, 1), has_aux=True)
        arrays = self.hidden.astype(dtype), self.head.astype(dtype)
        (total, scores), gradients = jax.jit(call)(*arrays)
        return [x.astype(jnp.float32) for x in (*scores, total, *gradients)]

    def peers(self):
        from peers import kernel_ops

        cut = kernel_ops.cut_cross_entropy
        return super().peers() | {
            "liger": self.loss_peer(kernel_ops.liger),
            "cut_cross_entropy": self.loss_peer(cut),
            "cut_cross_entropy_exact": self.loss_peer(cut, exact=True),
        }

    def free(self):
        del self.hidden, self.head, self.targets, self.g


class MoE(Op):
    """The mixture-of-experts layer: forward, a full step, and steps with frozen experts."""

    label, cases = "moe_ffn", moe_cases.CASES
    trained = ("x", "gates", "w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")

    def __init__(self, case):
        super().__init__(case)
        self.load(case)

    def load(self, case):
        """Set the choices, the arrays with gradients by name, and the cotangent."""
        self.case, self.inputs = case, case.inputs()
        self.names = ("out", *(name for name in self.trained if name in self.inputs))
        self.experts = jnp.asarray(self.inputs["experts"])
        self.arrays = {n: jnp.asarray(self.inputs[n], jnp.bfloat16) for n in self.names[1:]}
        (self.g,) = low(self.inputs, "g")

    def layer(self, impl, arrays, **options):
        biases = Biases(*(arrays.get(n) for n in ("b_gate", "b_up", "b_down")))
        weights = (arrays.get("w_gate"), arrays["w_up"], arrays["w_down"])
        options |= {"activation": self.case.activation, "biases": biases, "impl": impl}
        return moe_ffn(arrays["x"], self.experts, arrays["gates"], *weights, **options)

    def full_step(self, impl, arrays, g):
        """Return the output and all gradients."""
        out, pull = jax.vjp(functools.partial(self.layer, impl), arrays)
        return {"out": out, **pull(g)[0]}

    def frozen_step(self, impl, x, gates, adapters, arrays, g):
        """Return the output and the gradients of x, gates and adapters, with frozen experts."""

        def run(x, gates, adapters):
            options = {"adapters": adapters, "freeze_experts": True}
            return self.layer(impl, arrays | {"x": x, "gates": gates}, **options)

        out, pull = jax.vjp(run, x, gates, adapters)
        return out, pull(g)

    def adapters(self, rank: int = 16):
        """Return factors in float32 for the matrices of every expert."""
        rng, D, F = np.random.default_rng(1), self.case.width, self.case.hidden

        def factors(i, o):
            shapes = (self.case.experts, i, rank), (self.case.experts, rank, o)
            return tuple(jnp.asarray(0.02 * rng.standard_normal(s), jnp.float32) for s in shapes)

        return Adapters(factors(D, F) if self.case.gated else None, factors(D, F), factors(F, D))

    def programs(self, impl):
        flops, arrays, g = self.case.flops(), self.arrays, self.g
        layer, full, frozen = (
            functools.partial(f, impl) for f in (self.layer, self.full_step, self.frozen_step)
        )
        programs = {
            "forward": Program(flops, layer, (arrays,)),
            "both": Program(3 * flops, full, (arrays, g)),
        }
        for name, adapters in (("frozen", Adapters()), ("lora", self.adapters())):
            arguments = (arrays["x"], arrays["gates"], adapters, arrays, g)
            programs[name] = Program(2 * flops, frozen, arguments)
        return programs

    def reduce(self):
        """Keep the first 2,048 tokens."""
        self.load(dataclasses.replace(self.case, tokens=min(self.case.tokens, 2048)))

    def outputs(self, impl, dtype):
        arrays, g = jax.tree.map(lambda x: x.astype(dtype), (self.arrays, self.g))
        outputs = jax.jit(functools.partial(self.full_step, impl))(arrays, g)
        return [outputs[name].astype(jnp.float32) for name in self.names]

    def peers(self):
        from peers import kernel_ops

        flops = self.case.flops()
        build = functools.partial(kernel_ops.grouped_layer, self.case, self.inputs)
        return {"torch_grouped_mm": (build, {"forward": flops, "both": 3 * flops}, 1)}


class GatedDelta(Op):
    """The gated delta rule.

    flash-linear-attention supports packed documents (cu_seqlens) and no trees: its rows are every
    branch of the case's forest alone, which for documents is the forest itself. Queries and keys
    are normalized beforehand, so that neither side's own normalization is in the figures. `chunks`
    says whether a forward pass of the Hopper kernels finds the row's chunks ("found") or is given
    them ("given"), as by a model, which finds them once for all layers.
    """

    label, cases = "gated_delta", delta_cases.CASES
    names = ("out", "dq", "dk", "dv", "dg", "dbeta")
    inputs = ("q", "k", "v", "g", "beta")

    def __init__(self, case):
        super().__init__(case)
        arrays = {name: jnp.asarray(x) for name, x in case.inputs().items()}
        low_names = ("q", "k", "v", "d_out")
        self.arrays = arrays | {name: arrays[name].astype(jnp.bfloat16) for name in low_names}
        self.context = (arrays["until"], arrays["prev"])

    @property
    def tokens(self) -> int:
        return sum(size for size, _ in self.case.forest())

    @property
    def flops(self) -> float:
        """Operations of the forward pass in chunks of 64 without recomputation."""
        case = self.case
        K, V, C = case.key_dim, case.value_dim, 64
        shared = 4 * C * K * case.key_heads / case.value_heads
        return case.rows * self.tokens * case.value_heads * (6 * K * V + 4 * C * V + shared)

    def operands(self) -> list:
        return [self.arrays[name] for name in self.inputs]

    def programs(self, impl):
        def function(*inputs, chunks=None):
            return gated_delta(*inputs, *self.context, chunks=chunks, impl=impl)[0]

        inputs, hopper = self.operands(), impl == "mosaic_gpu"
        labels = {"chunks": "found"} if hopper else {}
        programs = {"forward": Program(self.flops, function, inputs, labels)}
        if hopper:
            chunks = find_chunks(*self.context)
            run = lambda chunks, *inputs: function(*inputs, chunks=chunks)  # noqa: E731
            labels = {"step": "forward", "chunks": "given"}
            programs["forward, given"] = Program(self.flops, run, (chunks, *inputs), labels)
        backward = backward_program(function, inputs, self.arrays["d_out"])
        return programs | {"backward": Program(2 * self.flops, *backward)}

    def reduce(self):
        """Keep two value heads on one key head."""
        heads = {"q": 1, "k": 1, "v": 2, "g": 2, "beta": 2, "d_out": 2}
        self.arrays |= {name: self.arrays[name][:, :, :count] for name, count in heads.items()}

    def outputs(self, impl, dtype):
        inputs = [x if x.dtype == jnp.float32 else x.astype(dtype) for x in self.operands()]
        function = jax.jit(lambda *x: gated_delta(*x, *self.context, impl=impl)[0])
        out, pull = jax.vjp(function, *inputs)
        outputs = (out, *pull(self.arrays["d_out"].astype(dtype)))
        return [x.astype(jnp.float32) for x in outputs]

    def peers(self):
        from peers import kernel_ops

        index, ends = branch_tokens(self.case.forest())
        build = functools.partial(kernel_ops.gated_delta_rule, self.arrays, index, ends)
        # Useful work: what the forest's tokens need once.
        return {"fla": (build, {"forward": self.flops, "backward": 2 * self.flops}, 1)}

    def peer_errors(self, report):
        from peers import kernel_ops

        index, ends = branch_tokens(self.case.forest())
        if len(index) != self.tokens:
            return
        calls = kernel_ops.gated_delta_rule(self.arrays, index, ends)
        outputs = (calls["forward"](), *calls["backward"]())
        actual = [np.asarray(x.float().cpu()) for x in outputs]
        exact, plain = ([x[:1, index] for x in arrays] for arrays in self.baselines)
        labels = {"op": self.label, "case": self.case.name, "impl": "fla"}
        report.errors(self.names, actual, exact, plain, **labels)


def branch_tokens(nodes: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (packed tokens of every branch in sequence, where each begins and the end)."""
    starts = np.cumsum([0] + [size for size, _ in nodes])
    parents = {parent for _, parent in nodes}
    taken, ends = [], [0]
    for leaf in (node for node in range(len(nodes)) if node not in parents):
        path, node = [], leaf
        while node >= 0:
            path.append(np.arange(starts[node], starts[node + 1]))
            node = nodes[node][1]
        taken += path[::-1]
        ends.append(ends[-1] + sum(map(len, path)))
    return np.concatenate(taken), np.array(ends)
