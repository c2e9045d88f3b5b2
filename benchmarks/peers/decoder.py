"""The PyTorch side of train_step.py: the same decoder, loss and optimizer, as well as it can be.

Qwen3 and Llama decoders with q, k, v and gate, up as one matrix each; float32 weights, rounded to
the compute dtype where they multiply; FlexAttention with a block mask of the same intervals (built
once, outside the timing); torch.compile of each block, of the head's cross-entropy, and of the
norms; fused AdamW with clipping by the global norm. Inductor's partitioner recomputes cheap
operations in the backward pass by itself; `remat="full"` also checkpoints whole blocks. Without
torch.compile, which needs the Triton that PyTorch came with, documents are attended one by one.
"""

import dataclasses
import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True)
class Options:
    """Dtype, device, recomputation and compilation of the model."""

    dtype: torch.dtype = torch.bfloat16
    """Of activations and matmuls."""
    remat: str = "none"
    """none | full: checkpoint every block."""
    compile: bool = True
    device: str = "cuda"

    @property
    def fused(self) -> bool:
        """By flash-linear-attention's kernels where torch.compile would have fused."""
        return self.device == "cuda" and not self.compile


class Linear(nn.Module):
    """Weight [out, in] in float32, multiplied in x's dtype."""

    def __init__(self, num_in: int, num_out: int, std: float):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_out, num_in) * std)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm; the value is rounded before the scale, as in transformers."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    reads = "mask"

    def __init__(self, raw: dict):
        super().__init__()
        self.heads, self.kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
        self.size = raw.get("head_dim") or raw["hidden_size"] // self.heads
        width, ffn = raw["hidden_size"], raw["intermediate_size"]
        std, eps = raw["initializer_range"], raw["rms_norm_eps"]
        self.attention_norm, self.mlp_norm = Norm(width, eps), Norm(width, eps)
        qwen = raw["model_type"] == "qwen3"
        self.q_norm = Norm(self.size, eps) if qwen else nn.Identity()
        self.k_norm = Norm(self.size, eps) if qwen else nn.Identity()
        self.qkv = Linear(width, (self.heads + 2 * self.kv_heads) * self.size, std)
        self.out = Linear(self.heads * self.size, width, std)
        self.gate_up, self.down = Linear(width, 2 * ffn, std), Linear(ffn, width, std)

    def forward(self, x, cos, sin, mask):
        rows, length, _ = x.shape
        heads = (self.heads, self.kv_heads, self.kv_heads)
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, -1, self.size)
        q, k, v = qkv.split(heads, 2)
        q, k = (rotate(norm(y), cos, sin) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = attend(q, k, v, mask)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def attend(q, k, v, mask):
    """[B, heads, T, H] by what fits the mask."""
    if mask is None:  # rows of one document
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    if isinstance(mask, list):  # where each document begins, and the end
        documents = [
            F.scaled_dot_product_attention(
                *(x[:, :, first:end] for x in (q, k, v)), is_causal=True, enable_gqa=True
            )
            for first, end in itertools.pairwise(mask)
        ]
        return torch.cat(documents, 2)
    if isinstance(mask, torch.Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def rotate(x, cos, sin):
    """x [B, T, N, H] with dim i and i + H/2 rotated as a pair, in float32."""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)


class Decoder(nn.Module):
    """Embedding, blocks, final norm, head; `loss` is the weighted sum of -log p."""

    norm_kind: type[nn.Module] = Norm

    def __init__(self, raw: dict, frequency: tuple[float, ...], options: Options):
        super().__init__()
        self.options = options
        vocabulary, width = raw["vocab_size"], raw["hidden_size"]
        std = raw["initializer_range"]
        self.embed = nn.Parameter(torch.randn(vocabulary, width) * std)
        tied = raw["tie_word_embeddings"]
        self.head = self.embed if tied else nn.Parameter(torch.randn(vocabulary, width) * std)
        layers = range(raw["num_hidden_layers"])
        self.blocks = nn.ModuleList(self.make_block(raw, layer) for layer in layers)
        self.norm = self.norm_kind(width, raw["rms_norm_eps"])
        self.frequency = frequency
        if options.compile:
            for block in self.blocks:  # one compilation serves all
                block.compile(dynamic=False)
        self.end = torch.compile(self._end, dynamic=False) if options.compile else self._end

    def make_block(self, raw: dict, layer: int) -> nn.Module:
        return Block(raw)

    def loss(self, rows: "Rows"):
        """Sum over tokens of weight x -log p(token | its branch)."""
        x = F.embedding(rows.tokens, self.embed).to(self.options.dtype)
        frequency = torch.tensor(self.frequency, device=x.device)
        turn = rows.positions[..., None, None] * frequency
        cos, sin = turn.cos(), turn.sin()
        for block in self.blocks:
            sight = getattr(rows, block.reads)
            if self.options.remat == "full":
                x = checkpoint(block, x, cos, sin, sight, use_reentrant=False)
            else:
                x = block(x, cos, sin, sight)
        return self.end(x, rows.prev, rows.tokens, rows.weights)

    def _end(self, x, prev, tokens, weights):
        x = self.norm(x)
        index = prev.clamp(min=0)[..., None].expand(-1, -1, x.shape[-1])
        hidden = x.gather(1, index).flatten(0, 1)
        logits = hidden @ self.head.to(hidden.dtype).T
        if self.options.fused:
            from fla.modules.fused_cross_entropy import cross_entropy_loss

            nll, _ = cross_entropy_loss(logits, tokens.flatten(), inplace_backward=True)
        else:
            nll = F.cross_entropy(logits.float(), tokens.flatten(), reduction="none")
        return (nll * weights.flatten()).sum()


@dataclasses.dataclass(frozen=True)
class Rows:
    """A microstep on the device, with the block mask of its intervals."""

    tokens: torch.Tensor
    positions: torch.Tensor
    prev: torch.Tensor
    weights: torch.Tensor
    mask: object
    ends: torch.Tensor
    """Where each document of the first row begins, and the row's end; what pads it is one more."""
