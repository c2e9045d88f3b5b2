"""QLoRA of a mixture of experts in PyTorch, beside experts_peers.py: all matrices of the blocks in
NF4 with double quantization, LoRA on them, nothing but torch and transformers.

A tensor is quantized as bitsandbytes does it, flat, so gate and up of all experts of a layer have
one offset (adapter.quantize "nf4_fused" of jaxtrain). It is unpacked where it multiplies, by one
fused kernel of torch.compile on a GPU, in the forward pass and again where a checkpointed block is
computed anew; then grouped_mm. LoRA's own products are grouped, too, instead of added to unpacked
matrices as PEFT does it; gate and up read their inputs by one product.
"""

import torch
import torch.nn.functional as F
import transformers
from torch import nn

BLOCK, OUTER = 64, 256
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
CHUNK = 2**24  # weights that are quantized at once
STD = 0.02


def make_tables(device) -> tuple[torch.Tensor, torch.Tensor]:
    """The 16 levels of weights and the 256 of their blocks' magnitudes, float32, ascending."""
    actual = [0.0, 1.0]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2**i + 1)
        middles = 10.0 ** (i - 6) * (bounds[1:] + bounds[:-1]) / 2
        actual += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(LEVELS, device=device), torch.tensor(sorted(actual), device=device)


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize a tensor, flat: codes, two a byte; largest magnitudes of blocks in 8 bits, their
    scales and mean; the tables of both."""
    levels, dynamic = make_tables(weight.device)
    middles, nibbles, absmax = (levels[1:] + levels[:-1]) / 2, [], []
    for part in weight.reshape(-1, BLOCK).split(CHUNK // BLOCK):
        part = part.float()
        top = part.abs().amax(1)
        codes = torch.bucketize(part / top.clamp(min=1e-38)[:, None], middles, out_int32=True)
        codes = codes.to(torch.uint8)
        nibbles.append(codes[:, ::2] << 4 | codes[:, 1::2])
        absmax.append(top)
    actual = torch.cat(absmax)
    offset = actual.mean()
    groups = F.pad(actual - offset, (0, -len(actual) % OUTER)).view(-1, OUTER)
    scales = groups.abs().amax(1)
    unit = groups / scales.clamp(min=1e-38)[:, None]
    codes = torch.bucketize(unit, (dynamic[1:] + dynamic[:-1]) / 2, out_int32=True)
    codes = codes.to(torch.uint8).view(-1)[: len(actual)]
    return {
        "nibbles": torch.cat(nibbles),
        "absmax": codes,
        "scales": scales,
        "offset": offset,
        "levels": levels,
        "dynamic": dynamic,
    }


def unpack(nibbles, absmax, scales, offset, levels, dynamic, dtype):
    """[blocks, BLOCK] of what `quantize` made."""
    group = torch.arange(len(absmax), device=absmax.device) // OUTER
    size = dynamic[absmax.int()] * scales[group] + offset
    codes = torch.stack([nibbles >> 4, nibbles & 15], -1).view(-1, BLOCK)
    return (levels[codes.int()] * size[:, None]).to(dtype)


compiled_unpack = torch.compile(unpack, dynamic=False)


class Packed(nn.Module):
    """A frozen tensor in NF4; called with a dtype it gives the tensor."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.shape = weight.shape
        for name, value in quantize(weight.detach()).items():
            self.register_buffer(name, value)

    def forward(self, dtype: torch.dtype) -> torch.Tensor:
        parts = (self.nibbles, self.absmax, self.scales, self.offset, self.levels, self.dynamic)
        run = compiled_unpack if self.nibbles.is_cuda else unpack
        return run(*parts, dtype).view(self.shape)


class LoRA(nn.Module):
    """Factors a [..., in, R] and b [..., R, out] for each of `pieces` outputs."""

    def __init__(self, lead, num_in: int, num_out: int, rank: int, pieces: int, device):
        super().__init__()
        self.rank = rank
        self.a = nn.Parameter(torch.empty(*lead, num_in, pieces * rank, device=device))
        nn.init.uniform_(self.a, -(num_in**-0.5), num_in**-0.5)
        zeros = (torch.zeros(*lead, rank, num_out, device=device) for _ in range(pieces))
        self.b = nn.ParameterList(nn.Parameter(b) for b in zeros)

    def forward(self, x: torch.Tensor, multiply) -> torch.Tensor:
        low = multiply(x, self.a.to(x.dtype)).split(self.rank, -1)
        outs = [multiply(h, b.to(x.dtype)) for h, b in zip(low, self.b, strict=True)]
        return 2 * torch.cat(outs, -1)  # alpha is twice the rank


class PackedLinear(nn.Module):
    """A matrix in NF4, with an adapter where rank > 0."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        out, into = linear.weight.shape
        self.weight = Packed(linear.weight)
        self.lora = LoRA((), into, out, rank, 1, linear.weight.device) if rank else None

    def forward(self, x):
        y = F.linear(x, self.weight(x.dtype))
        return y if self.lora is None else y + self.lora(x, torch.matmul)


class PackedExperts(nn.Module):
    """Replacement of transformers' experts with matrices in NF4."""

    def __init__(self, experts: nn.Module, rank: int):
        super().__init__()
        self.gate_up, self.down = Packed(experts.gate_up_proj), Packed(experts.down_proj)
        self.num_experts, width, hidden = experts.down_proj.shape
        lead, device = (self.num_experts,), experts.down_proj.device
        self.gate_up_lora = LoRA(lead, width, hidden, rank, 2, device) if rank else None
        self.down_lora = LoRA(lead, hidden, width, rank, 1, device) if rank else None

    def forward(self, x, top_k_index, top_k_weights):
        num_tokens, top = top_k_index.shape
        expert, order = torch.sort(top_k_index.reshape(-1))
        numbers = torch.arange(self.num_experts, device=x.device)
        ends = torch.searchsorted(expert, numbers, right=True).int()

        def multiply(x, matrices):
            return grouped_mm(x, matrices, ends)

        def project(x, packed, lora):
            y = multiply(x, packed(x.dtype).transpose(1, 2))
            return y if lora is None else y + lora(x, multiply)

        gate, up = project(x[order // top], self.gate_up, self.gate_up_lora).chunk(2, -1)
        y = project(F.silu(gate) * up, self.down, self.down_lora)
        y = y * top_k_weights.reshape(-1)[order][:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        return y[back].view(num_tokens, top, -1).sum(1).to(x.dtype)


def grouped_mm(x, matrices, ends):
    """Rows of x, up to the ends of each matrix, times that matrix."""
    if x.is_cuda:
        run = getattr(F, "grouped_mm", None) or torch._grouped_mm
        return run(x, matrices, offs=ends)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ w for part, w in zip(x.split(sizes), matrices, strict=True)])


def pack_layer(layer: nn.Module, rank: int, target: str) -> None:
    """Put the matrices of a decoder layer into NF4, in place."""
    layer.requires_grad_(False)
    attention = layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, name, PackedLinear(getattr(attention, name), rank))
    everything = target == "all-linear"
    layer.mlp.experts = PackedExperts(layer.mlp.experts, rank if everything else 0)


def draw_packed(config, rank: int, target: str, device: str, dtype: torch.dtype) -> nn.Module:
    """transformers' model of a Qwen3-MoE config with random weights, packed a layer at a time."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    inner = model.model
    with torch.device(device):
        inner.rotary_emb = type(inner.rotary_emb)(config=config)
    for part in (inner.embed_tokens, inner.norm, model.lm_head):
        draw(part, device)
    for layer in inner.layers:
        draw(layer, device)
        pack_layer(layer, rank, target)
    return model


def draw(part: nn.Module, device: str) -> None:
    """Give a module of shapes frozen random weights."""
    part.to_empty(device=device).requires_grad_(False)
    for weight in part.parameters():
        nn.init.normal_(weight, std=STD) if weight.ndim > 1 else nn.init.ones_(weight)
