"""The PyTorch side of train_step.py for Qwen3.5: linear attention by flash-linear-attention.

Its Triton kernels do the convolution with silu, the rule with unit length, gates and decay inside,
and the gated norm; torch.compile what stands around them (without it, norms, gates and the
cross-entropy are its kernels, too); full layers are decoder.py's, with
gates and partial rotation. flash-linear-attention knows documents (cu_seqlens), no trees, so trees
are measured as branches. On a CPU, where Triton does not run, plain loops stand in for it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from peers import decoder
from peers.decoder import Linear, rotate


class Norm(nn.Module):
    """RMSNorm times 1 + weight, rounded at the end."""

    fused = False

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x):
        if self.fused:
            from fla.modules.norm.layernorm import rms_norm

            return rms_norm(x, 1 + self.weight, None, eps=self.eps)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.weight)).to(x.dtype)


class MLP(nn.Module):
    """x + mlp(norm(x))."""

    fused = False

    def __init__(self, raw: dict):
        super().__init__()
        width, ffn, std = raw["hidden_size"], raw["intermediate_size"], raw["initializer_range"]
        self.norm = Norm(width, raw["rms_norm_eps"])
        self.gate_up, self.down = Linear(width, 2 * ffn, std), Linear(ffn, width, std)

    def forward(self, x):
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        if self.fused:
            from fla.modules.activations import swiglu

            return x + self.down(swiglu(gate, up))
        return x + self.down(F.silu(gate) * up)


class FullBlock(nn.Module):
    """Gated full attention and an MLP."""

    reads = "mask"

    def __init__(self, raw: dict):
        super().__init__()
        self.heads, self.kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
        self.size = raw["head_dim"]
        self.rotated = int(self.size * raw["rope_parameters"]["partial_rotary_factor"])
        width, std, eps = raw["hidden_size"], raw["initializer_range"], raw["rms_norm_eps"]
        self.attention_norm = Norm(width, eps)
        self.q_norm, self.k_norm = Norm(self.size, eps), Norm(self.size, eps)
        self.q = Linear(width, 2 * self.heads * self.size, std)
        self.kv = Linear(width, 2 * self.kv_heads * self.size, std)
        self.out = Linear(self.heads * self.size, width, std)
        self.mlp = MLP(raw)

    def forward(self, x, cos, sin, mask):
        rows, length, _ = x.shape
        h = self.attention_norm(x)
        q, gate = self.q(h).view(rows, length, self.heads, -1).chunk(2, -1)
        k, v = self.kv(h).view(rows, length, -1, self.size).chunk(2, 2)
        q, k = (self.turn(norm(y), cos, sin) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = decoder.attend(q, k, v, mask).transpose(1, 2) * gate.sigmoid()
        return self.mlp(x + self.out(y.reshape(rows, length, -1)))

    def turn(self, x, cos, sin):
        """The first dims of a head rotated, the others as they are."""
        turned = rotate(x[..., : self.rotated], cos, sin)
        return torch.cat([turned, x[..., self.rotated :]], -1)


class LinearBlock(nn.Module):
    """Linear attention and an MLP; what is no Triton kernel is compiled in two parts."""

    reads = "ends"

    def __init__(self, raw: dict):
        super().__init__()
        self.H, self.N = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
        self.K, self.V = raw["linear_key_head_dim"], raw["linear_value_head_dim"]
        width, std = raw["hidden_size"], raw["initializer_range"]
        self.sizes = (2 * self.H * self.K + self.N * self.V, self.N * self.V, self.N, self.N)
        self.attention_norm = Norm(width, raw["rms_norm_eps"])
        self.into = Linear(width, sum(self.sizes), std)  # q | k | v, z, b, a
        self.conv = nn.Parameter(torch.randn(self.sizes[0], raw["linear_conv_kernel_dim"]) * std)
        self.A_log = nn.Parameter(torch.empty(self.N).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(self.N))
        self.scale, self.eps = nn.Parameter(torch.ones(self.V)), raw["rms_norm_eps"]
        self.out = Linear(self.N * self.V, width, std)
        self.mlp = MLP(raw)

    def compile(self, **options):
        self.before = torch.compile(self.before, **options)
        self.after = torch.compile(self.after, **options)

    def before(self, x):
        parts = self.into(self.attention_norm(x)).split(self.sizes, -1)
        return *(part.contiguous() for part in parts), self.conv.to(x.dtype)

    def after(self, x, y):
        return self.mlp(x + self.out(y.reshape(*x.shape[:2], -1)))

    def forward(self, x, cos, sin, ends):
        qkv, z, b, a, conv = self.before(x)
        mix = fla_mix if x.is_cuda else plain_mix
        return self.after(x, mix(self, qkv, z, b, a, conv, ends))

    def split(self, qkv):
        """q, k [B, T, H, K] and v [B, T, N, V]."""
        inner = self.H * self.K
        q, k, v = qkv.split((inner, inner, self.N * self.V), -1)
        q, k = (y.view(*y.shape[:2], self.H, self.K) for y in (q, k))
        return q, k, v.view(*v.shape[:2], self.N, self.V)


def fla_mix(block: LinearBlock, qkv, z, b, a, conv, ends):
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    qkv, _ = causal_conv1d(x=qkv, weight=conv, activation="silu", cu_seqlens=ends)
    q, k, v = block.split(qkv)
    y, _ = chunk_gated_delta_rule(
        q,
        k,
        v,
        g=a,
        beta=b,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=block.A_log,
        dt_bias=block.dt_bias,
        cu_seqlens=ends,
    )
    return rms_norm_gated(y, z.view_as(y), block.scale, None, eps=block.eps)


def plain_mix(block: LinearBlock, qkv, z, b, a, conv, ends):
    """The formulas, token by token."""
    actual = []
    for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        taps = conv.shape[1]
        x = F.pad(qkv[:, first:last], (0, 0, taps - 1, 0))
        mixed = sum(x[:, j : j + last - first] * conv[:, j] for j in range(taps))
        q, k, v = block.split(F.silu(mixed))
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        q, k = (y.repeat_interleave(block.N // block.H, 2) for y in (q * block.K**-0.5, k))
        beta = b[:, first:last].sigmoid()
        g = -block.A_log.exp() * F.softplus(a[:, first:last] + block.dt_bias)
        S, out = x.new_zeros(len(x), block.N, block.K, block.V), []
        for t in range(last - first):
            S = g[:, t, :, None, None].exp() * S
            seen = torch.einsum("bnkv,bnk->bnv", S, k[:, t])
            delta = beta[:, t, :, None] * (v[:, t] - seen)
            S = S + k[:, t, ..., None] * delta[:, :, None]
            out.append(torch.einsum("bnkv,bnk->bnv", S, q[:, t]))
        actual.append(torch.stack(out, 1))
    y = torch.cat(actual, 1)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + block.eps) * block.scale
    return y * F.silu(z.view_as(y))


class Decoder(decoder.Decoder):
    """Three layers of linear attention, one of full attention, and so on."""

    norm_kind = Norm

    def __init__(self, raw: dict, frequency: tuple[float, ...], options: decoder.Options):
        super().__init__(raw, frequency, options)
        for module in self.modules():
            if isinstance(module, (Norm, MLP)):
                module.fused = options.fused

    def make_block(self, raw: dict, layer: int):
        every = raw.get("full_attention_interval", 4)
        return LinearBlock(raw) if (layer + 1) % every else FullBlock(raw)
