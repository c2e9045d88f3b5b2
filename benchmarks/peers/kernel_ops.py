"""The PyTorch side of the kernel benchmarks, written as well as PyTorch allows.

Attention: FlexAttention compiled with a block mask of the same intervals (its mask is built outside
the timing); for plain documents of one length, scaled_dot_product_attention on a batch of them.
decode_attention: both, on one layer's cache.
logp_gather: torch.compile of matmul, log-softmax and gather, whole and in chunks of tokens.
moe_ffn: torch.compile of sort, grouped_mm, activation, grouped_mm and combine.
"""

import functools
import importlib.util

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

torch._dynamo.config.recompile_limit = 64
torch._functorch.config.donated_buffer = False  # a timed backward runs again on what it saved


def on_gpu(array: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array)).cuda()
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def flex(case, inputs):
    """Build forward and backward pass of FlexAttention for an attention case."""
    q, k, v, d_out = (
        on_gpu(inputs[n]).transpose(1, 2).contiguous().requires_grad_(n != "d_out")
        for n in ("q", "k", "v", "d_out")
    )
    until = on_gpu(inputs["until"])
    since = on_gpu(inputs.get("since", np.tile(np.arange(case.tokens), (case.rows, 1))))

    def mask(b, h, q_index, k_index):
        return (since[b, k_index] <= q_index) & (q_index < until[b, k_index])

    blocks = create_block_mask(mask, case.rows, None, q.shape[2], k.shape[2], _compile=True)
    attend = torch.compile(
        functools.partial(
            flex_attention, block_mask=blocks, enable_gqa=case.heads != case.kv_heads
        ),
        dynamic=False,
    )

    def forward():
        with torch.no_grad():
            return attend(q, k, v)

    out = attend(q, k, v)

    def backward():
        return torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)

    return {"forward": forward, "backward": backward}


def sdpa(case, inputs, backend="cudnn"):
    """Build scaled_dot_product_attention's; None unless the case is documents of one size."""
    sizes = {size for size, _ in case.forest()}
    if case.layout or len(sizes) != 1 or any(parent >= 0 for _, parent in case.forest()):
        return None
    (size,) = sizes
    q, k, v, d_out = (
        on_gpu(inputs[n].reshape(-1, size, *inputs[n].shape[2:])).transpose(1, 2)
        for n in ("q", "k", "v", "d_out")
    )
    q, k, v = (x.contiguous().requires_grad_() for x in (q, k, v))
    kind = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]

    def attend():
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward():
        with torch.no_grad():
            return attend()

    out = attend()

    def backward():
        return torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)

    return {"forward": forward, "backward": backward}


def decode_arrays(case):
    """q [B, N, 1, H], k and v [B, K, S, H] of one layer, until [B]."""
    B, S, H = case.rows, case.slots, case.head_dim
    q, k, v = (
        torch.randn(B, heads, length, H, device="cuda", dtype=torch.bfloat16)
        for heads, length in ((case.heads, 1), (case.kv_heads, S), (case.kv_heads, S))
    )
    return q, k, v, torch.from_numpy(case.interval()[0]).cuda()


def decode_sdpa(case):
    """scaled_dot_product_attention of one query a row, with a mask over all slots."""
    q, k, v, until = decode_arrays(case)
    mask = (torch.arange(case.slots, device="cuda") < until[:, None])[:, None, None]

    @torch.no_grad()
    def forward():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return forward


def decode_flex(case):
    """FlexAttention of one query a row, with a block mask over the slots that are seen."""
    q, k, v, until = decode_arrays(case)

    def mask(b, h, q_index, k_index):
        return k_index < until[b]

    blocks = create_block_mask(mask, case.rows, None, 1, case.slots, _compile=True)
    attend = torch.compile(
        functools.partial(flex_attention, block_mask=blocks, enable_gqa=True), dynamic=False
    )

    @torch.no_grad()
    def forward():
        return attend(q, k, v)

    return forward


def compiled_logp(inputs, chunks: int = 1):
    """Forward and backward of -mean log p(target) by torch.compile; chunked over tokens."""
    hidden = on_gpu(inputs["hidden"]).requires_grad_()
    head = on_gpu(inputs["head"]).requires_grad_()
    targets = on_gpu(inputs["targets"]).long()

    @torch.compile(dynamic=False)
    def loss(hidden, head, targets):
        return F.cross_entropy((hidden @ head.T).float(), targets, reduction="sum")

    def step():
        hidden.grad = head.grad = None
        parts = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
        for rows, part in parts:
            loss(rows, head, part).backward()

    return step


def hidden_of(case, up, gate):
    """Return the input of an expert's second matrix, given the products with its first."""
    activation = case.activation
    if not isinstance(activation, str):
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return (up + 1) * gate * torch.sigmoid(activation.alpha * gate)
    act = {
        "silu": F.silu,
        "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
        "relu2": lambda x: F.relu(x).square(),
    }[activation]
    return act(up) if gate is None else act(gate) * up


def grouped_layer(case, inputs):
    """Build a compiled mixture-of-experts layer on grouped_mm."""
    names = ["gate", "up"] if case.gated else ["up"]
    inputs = inputs | {"w_in": np.concatenate([inputs["w_" + n] for n in names], -1)}
    if case.biased:
        inputs["b_in"] = np.concatenate([inputs["b_" + n] for n in names], -1)
    trained = [n for n in ("x", "gates", "w_in", "w_down", "b_in", "b_down") if n in inputs]
    provided = [on_gpu(inputs[n]).requires_grad_() for n in trained]
    experts, g = on_gpu(inputs["experts"]), on_gpu(inputs["g"])
    T, top = experts.shape

    @torch.compile(dynamic=False)
    def layer(x, gates, w_in, w_out, b_in=None, b_out=None):
        flat = experts.view(-1)
        order = flat.argsort(stable=True)
        counts = torch.zeros(len(w_in), dtype=torch.int32, device=x.device)
        counts = counts.scatter_add(0, flat.long(), torch.ones_like(flat))
        ends = counts.cumsum(0).to(torch.int32)
        token, expert = order // top, flat[order]
        first = torch._grouped_mm(x[token], w_in, offs=ends)
        first = first if b_in is None else first + b_in[expert]
        gate, up = first.chunk(2, -1) if case.gated else (None, first)
        rows = torch._grouped_mm(hidden_of(case, up, gate), w_out, offs=ends)
        rows = rows if b_out is None else rows + b_out[expert]
        weighted = rows * gates.view(-1)[order, None]
        # every token has `top` rows: put them back in order and sum, faster than index_add
        return torch.empty_like(weighted).index_copy(0, order, weighted).view(T, top, -1).sum(1)

    def forward():
        with torch.no_grad():
            return layer(*provided)

    def both():
        return torch.autograd.grad(layer(*provided), provided, g)

    return {"forward": forward, "both": both}


def compiled_rotation(case, layers: int):
    """Build torch.compile of norm and rotation of as many layers."""
    H, R = case.head_dim, 2 * case.half
    inputs = case.inputs()
    cos, sin = (torch.from_numpy(inputs[n]).cuda()[:, :, None] for n in ("cos", "sin"))
    parts = [*case.counts, *([case.passed] if case.passed else [])]
    x = on_gpu(inputs["x"])
    xs = [torch.randn_like(x).requires_grad_() for _ in range(layers)]
    shapes = [(*x.shape[:2], count, H) for count in parts]
    d_outs = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for _ in xs for s in shapes]
    scales = (
        [[on_gpu(scale).requires_grad_() for scale in inputs["scales"]] for _ in xs]
        if case.normed
        else [None] * layers
    )

    def turn(z):
        first, second, passed = z.float().split([R // 2, R // 2, H - R], dim=-1)
        turned = [first * cos - second * sin, second * cos + first * sin, passed]
        return torch.cat(turned, dim=-1).bfloat16()

    @torch.compile(dynamic=False)
    def run(xs, scales):
        actual = []
        for x, scale in zip(xs, scales, strict=True):
            pieces = x.split([count * H for count in parts], dim=-1)
            for position, piece in enumerate(pieces):
                z = piece.unflatten(-1, (-1, H))
                if position == len(case.counts):
                    actual.append(z.contiguous())
                    continue
                if scale is not None:
                    z = F.rms_norm(z, (H,), scale[position], 1e-6)
                actual.append(turn(z))
        return actual

    def forward():
        with torch.no_grad():
            return run(xs, scales)

    outs = run(xs, scales)
    trained = [
        *xs,
        *(scale for local_value in scales if local_value is not None for scale in local_value),
    ]

    def backward():
        return torch.autograd.grad(outs, trained, d_outs, retain_graph=True)

    return {"forward": forward, "backward": backward}


def require(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise NotImplementedError(f"{module} is not installed")


def loss_arrays(inputs):
    hidden, head = (on_gpu(inputs[n]).requires_grad_() for n in ("hidden", "head"))
    return hidden, head, on_gpu(inputs["targets"]).long()


def liger(inputs):
    """Loss and gradients by Liger Kernel's fused linear cross-entropy."""
    require("liger_kernel")
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    hidden, head, targets = loss_arrays(inputs)

    def step():
        hidden.grad = head.grad = None
        arguments = (hidden, head, targets, None, None, -100, 0.0, 0.0, "sum")
        actual = LigerFusedLinearCrossEntropyFunction.apply(*arguments)
        (actual[0] if isinstance(actual, tuple) else actual).backward()

    return step


def cut_cross_entropy(inputs, exact: bool = False):
    """Loss and gradients by cut-cross-entropy; `exact`: without its filter on small gradients."""
    require("cut_cross_entropy")
    from cut_cross_entropy import linear_cross_entropy

    hidden, head, targets = loss_arrays(inputs)
    options = {"filter_eps": None} if exact else {}

    def step():
        hidden.grad = head.grad = None
        linear_cross_entropy(hidden, head, targets, reduction="sum", **options).backward()

    return step


def gated_delta_rule(arrays, index, ends):
    """Build flash-linear-attention's chunked rule on these tokens of the first row."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def put(name):
        tensor = from_jax(arrays[name][:1, index])
        return tensor.requires_grad_(name != "d_out")

    inputs, d_out = [put(name) for name in ("q", "k", "v", "g", "beta")], put("d_out")
    bounds = torch.from_numpy(ends).cuda() if len(ends) > 2 else None
    attend = functools.partial(chunk_gated_delta_rule, scale=1.0, cu_seqlens=bounds)

    def forward():
        with torch.no_grad():
            return attend(*inputs)[0]

    out = attend(*inputs)[0]

    def backward():
        return torch.autograd.grad(out, inputs, d_out, retain_graph=True)

    return {"forward": forward, "backward": backward}


def gated_delta_step(arrays, state):
    """Return one step of flash-linear-attention's recurrent kernel; arrays: q, k, v, g, beta."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    inputs, first = [from_jax(x) for x in arrays], from_jax(state)
    options = {"scale": 1.0, "initial_state": first, "output_final_state": True}

    @torch.no_grad()
    def run():
        return fused_recurrent_gated_delta_rule(*inputs, **options)

    return run


def from_jax(x) -> torch.Tensor:
    """Return a jax array on the GPU; its dtype is bfloat16 or float32."""
    dtype = torch.bfloat16 if x.dtype == "bfloat16" else torch.float32
    return torch.from_numpy(np.array(x.astype("float32"))).cuda().to(dtype)
