"""The PyTorch side of the kernel benchmarks, written as well as PyTorch allows.

Attention: FlexAttention compiled with a block mask of the same intervals (its mask is built outside
the timing); for plain documents of one length, scaled_dot_product_attention on a batch of them.
decode_attention: both, on one layer's cache.
logp_gather: torch.compile of matmul, log-softmax and gather, whole and in chunks of tokens.
moe_ffn: torch.compile of sort, grouped_mm, activation, grouped_mm and combine.
"""

import functools

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
    """(forward, backward) callables of FlexAttention for an attention case."""
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

    return forward, backward


def sdpa(case, inputs, backend="cudnn"):
    """(forward, backward) of scaled_dot_product_attention; None unless documents of one size."""
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

    return forward, backward


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
    """What goes into an expert's second matrix, of the products with its first."""
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
    """(forward, forward + backward) of a compiled mixture-of-experts layer on grouped_mm."""
    names = ["gate", "up"] if case.gated else ["up"]
    inputs = inputs | {"w_in": np.concatenate([inputs["w_" + n] for n in names], -1)}
    if case.biased:
        inputs["b_in"] = np.concatenate([inputs["b_" + n] for n in names], -1)
    trained = [n for n in ("x", "gates", "w_in", "w_down", "b_in", "b_down") if n in inputs]
    given = [on_gpu(inputs[n]).requires_grad_() for n in trained]
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
            return layer(*given)

    def both():
        return torch.autograd.grad(layer(*given), given, g)

    return forward, both
