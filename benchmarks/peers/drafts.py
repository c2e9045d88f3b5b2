"""The PyTorch side of draft.py: training steps of DFlash and Eagle3, as well as they can be.

TorchSpec's layout: DFlash's queries are all blocks of a row, its keys [context | blocks], under a
FlexAttention block mask that is made anew each step, because anchors are; Eagle3 unrolls its layer
with one more term a query for each step, joined by log-sum-exps to attention over the first step's
keys. The target runs in bfloat16 without gradients, by SDPA, up to the last layer that is read; its
blocks, the draft's, and losses over whole logits are compiled by torch.compile. The draft
multiplies in bfloat16, with float32 masters under fused AdamW and clipping.

The same loss as this project's on the same weights and anchors (tests/methods/test_benchmarks.py).
"""

import dataclasses
import statistics

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from peers.decoder import Block, Linear, Norm, rotate
from peers.timing import time_calls, time_steps

torch._dynamo.config.recompile_limit = 64


@dataclasses.dataclass(frozen=True)
class Options:
    """Dtype, device and learning rate of the models."""

    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    learning_rate: float = 1e-5

    def compiled(self, function, **how):
        """The function through torch.compile, on a GPU."""
        return torch.compile(function, dynamic=False, **how) if self.device == "cuda" else function


class Target(nn.Module):
    """The frozen model of a config.json's keys, up to the last layer that is read."""

    def __init__(self, raw: dict, num_layers: int, options: Options):
        super().__init__()
        width, std = raw["hidden_size"], raw["initializer_range"]
        kind = {"dtype": options.dtype, "device": options.device}
        with torch.device(options.device):
            blocks = [Block(raw).to(options.dtype) for _ in range(num_layers)]
            self.norm = Norm(width, raw["rms_norm_eps"]).to(options.dtype)
        self.blocks = nn.ModuleList(blocks)
        self.embed = nn.Parameter(torch.randn(raw["vocab_size"], width, **kind) * std)
        tied = raw["tie_word_embeddings"]
        self.head = self.embed if tied else nn.Parameter(torch.randn_like(self.embed) * std)
        self.angles = Angles(raw, options.device)
        self.requires_grad_(False)
        if options.device == "cuda":
            for block in self.blocks:  # one compilation serves all
                block.compile(dynamic=False)

    @torch.no_grad()
    def read(self, tokens, layers: tuple[int, ...]):
        """(what the named layers return, one behind the other [B, T, C*D]; the last layer's)."""
        x, actual = F.embedding(tokens, self.embed), {}
        cos, sin = self.angles(torch.arange(tokens.shape[1], device=tokens.device)[None])
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin, None)
            if index in layers:
                actual[index] = x
        return torch.cat([actual[layer] for layer in layers], -1), x


class Angles:
    """(cos, sin) [B, T, 1, H/2] of positions."""

    def __init__(self, raw: dict, device: str):
        size = raw["head_dim"]
        exponents = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
        self.frequency = raw["rope_theta"] ** -exponents

    def __call__(self, positions):
        turn = positions[..., None, None] * self.frequency
        return turn.cos(), turn.sin()


def attend(q, k, v, mask, lse: bool = False):
    """Attention [B, T, N, H] under a block mask, or on a CPU a mask [B, 1, T, S]; with `lse` the
    log-sum-exps [B, T, N], too."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if isinstance(mask, torch.Tensor):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        score = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        score = torch.where(mask, score, -torch.inf)
        y, total = score.softmax(-1) @ v, score.logsumexp(-1)
    elif lse:
        y, total = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
    else:
        y = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    y = y.transpose(1, 2)
    return (y, total.transpose(1, 2)) if lse else y


def make_mask(visible, rows: int, queries: int, keys: int, device: str):
    """Return the mask argument of `attend` for visible(b, h, q, k)."""
    if device == "cuda":
        return create_block_mask(visible, rows, None, queries, keys, device, _compile=True)
    row = torch.arange(rows)[:, None, None, None]
    return visible(row, 0, torch.arange(queries)[:, None], torch.arange(keys))


TILE = 128


def tile_blocks(anchors, length: int, size: int, visible) -> BlockMask:
    """The block mask of blocks behind their context, from the anchors [B, A] of each tile of
    queries alone: no pair of query and key is looked at. Tiles must hold whole blocks."""
    rows, count = anchors.shape
    keys = length + count * size
    assert length % TILE == 0 and TILE % size == 0 and count * size % TILE == 0
    of_tile = anchors.view(rows, 1, -1, TILE // size)
    tile = torch.arange(keys // TILE, device=anchors.device)
    first = tile * TILE
    context = first < length
    subset = context & (first < of_tile.amax(-1)[..., None])
    every = context & (first + TILE <= of_tile.amin(-1)[..., None])
    local_value = (
        tile - length // TILE == torch.arange(of_tile.shape[2], device=anchors.device)[:, None]
    )

    def ordered(chosen):
        order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return chosen.sum(-1, dtype=torch.int32), order.int()

    lists = (*ordered((subset & ~every) | local_value), *ordered(every))
    lengths = (count * size, keys)
    return BlockMask.from_kv_blocks(*lists, TILE, visible, seq_lengths=lengths)


class DraftBlock(Block):
    """A layer of DFlash: keys and values of the context and of the blocks by the same weights."""

    def forward(self, x, context, cos, sin, mask):
        """cos and sin are those of all keys; the blocks' come last."""
        rows, length, _ = x.shape
        N, K, H = self.heads, self.kv_heads, self.size
        q, k, v = self.qkv(self.attention_norm(x)).view(rows, length, -1, H).split((N, K, K), 2)
        of_context = F.linear(context, self.qkv.weight[N * H :].to(x.dtype))
        k_context, v_context = of_context.view(rows, -1, 2 * K, H).split((K, K), 2)
        k, v = torch.cat([k_context, k], 1), torch.cat([v_context, v], 1)
        q = rotate(self.q_norm(q), cos[:, -length:], sin[:, -length:])
        y = attend(q, rotate(self.k_norm(k), cos, sin), v, mask)
        x = x + self.out(y.reshape(rows, length, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class DFlash(nn.Module):
    """Five norms and projections a layer, and what makes the context of the target's states."""

    def __init__(self, raw: dict, num_captured: int):
        super().__init__()
        width, eps, std = raw["hidden_size"], raw["rms_norm_eps"], raw["initializer_range"]
        self.fc, self.hidden_norm = Linear(num_captured * width, width, std), Norm(width, eps)
        self.blocks = nn.ModuleList(DraftBlock(raw) for _ in range(raw["num_hidden_layers"]))
        self.norm = Norm(width, eps)


class DFlashStep:
    """A step of DFlash on rows of one document: anchors [B, A] drawn each time, or given."""

    def __init__(self, target: Target, draft: DFlash, work: dict, options: Options):
        self.target, self.draft, self.options = target, draft, options
        self.layers, self.size, self.mask_id = work["layers"], work["block_size"], work["mask_id"]
        self.decay, self.num_anchors = work["decay"], work["num_anchors"]
        self.masters = Masters(draft, options)
        self.prepare = options.compiled(lambda x: draft.hidden_norm(draft.fc(x)))
        self.end = options.compiled(sum_nll)
        if options.device == "cuda":
            for block in draft.blocks:
                block.compile(dynamic=False)

    def draw(self, rows: int, length: int):
        """Anchors of every row: distinct, ascending, with at least one token to predict."""
        keys = torch.rand(rows, length - 1, device=self.options.device)
        return keys.argsort(-1)[:, : self.num_anchors].sort(-1).values

    def loss(self, tokens, anchors, trained):
        """(sum of weight x -log p, sum of weights); trained [B, T]: 1 where a token trains."""
        rows, length = tokens.shape
        size, count = self.size, anchors.shape[1]
        device = self.options.device
        if getattr(self, "anchors", None) is None or self.anchors.shape != anchors.shape:
            self.anchors = anchors.clone()  # one tensor, so that the mask's compilation serves all
            held = self.anchors

            def visible(b, h, q, k):
                block = q // size
                before = (k < length) & (k < held[b, block])
                return before | ((k >= length) & ((k - length) // size == block))

            self.visible = visible
        self.anchors.copy_(anchors)
        if device == "cuda":
            mask = tile_blocks(self.anchors, length, size, self.visible)
        else:
            mask = make_mask(self.visible, rows, count * size, length + count * size, device)
        states, _ = self.target.read(tokens, self.layers)
        context = self.prepare(states)
        places = anchors[..., None] + torch.arange(size, device=device)
        inside, index = places < length, places.clamp(max=length - 1).flatten(1)
        ids = torch.full_like(places, self.mask_id)
        ids[..., 0] = tokens.gather(1, anchors)
        # All layers alike: one whose input has no gradient would be compiled for itself.
        x = F.embedding(ids.flatten(1), self.target.embed).requires_grad_()
        local_value = torch.arange(length, device=device).expand(rows, -1)
        cos, sin = self.target.angles(torch.cat([local_value, places.flatten(1)], 1))
        for block in self.draft.blocks:
            x = block(x, context, cos, sin, mask)
        x = self.draft.norm(x).view(rows, count, size, -1)[:, :, 1:]
        label = tokens.gather(1, index).view_as(places)[..., 1:]
        weight = (trained.gather(1, index).view_as(places) * inside)[..., 1:].float()
        fade = torch.arange(size - 1, device=device) / self.decay
        weight = weight * torch.exp(-fade)
        total = self.end(x.reshape(-1, x.shape[-1]), self.target.head, label.flatten(), weight)
        return total, weight.sum()

    def run(self, tokens, trained):
        """Run a step and return the loss, still on the device."""
        total, weight = self.loss(tokens, self.draw(*tokens.shape), trained)
        loss = total / weight
        loss.backward()
        self.masters.step()
        return loss.detach()


def sum_nll(x, head, labels, weight):
    """Sum of weight x -log p(label) over all logits."""
    logits = (x @ head.T).float()
    return (F.cross_entropy(logits, labels, reduction="none") * weight.flatten()).sum()


class Eagle3(nn.Module):
    """A layer over [embedding | hidden state] and a head over few tokens."""

    def __init__(self, raw: dict, num_captured: int, draft_vocabulary: int):
        super().__init__()
        width, eps, std = raw["hidden_size"], raw["rms_norm_eps"], raw["initializer_range"]
        self.heads, self.kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
        self.size, ffn = raw["head_dim"], raw["intermediate_size"]
        self.fc = Linear(num_captured * width, width, std)
        self.input_norm, self.hidden_norm = Norm(width, eps), Norm(width, eps)
        self.mlp_norm, self.norm = Norm(width, eps), Norm(width, eps)
        self.qkv = Linear(2 * width, (self.heads + 2 * self.kv_heads) * self.size, std)
        self.out = Linear(self.heads * self.size, width, std)
        self.gate_up, self.down = Linear(width, 2 * ffn, std), Linear(ffn, width, std)
        self.head = nn.Parameter(torch.randn(draft_vocabulary, width) * std)

    def project(self, x, h, cos, sin):
        """Queries, keys and values of one step."""
        pair = torch.cat([self.input_norm(x), self.hidden_norm(h)], -1)
        qkv = self.qkv(pair).view(*x.shape[:2], -1, self.size)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, h, y):
        """The layer's output, given attention's."""
        h = h + self.out(y.reshape(*h.shape[:2], -1))
        gate, up = self.gate_up(self.mlp_norm(h)).chunk(2, -1)
        return h + self.down(F.silu(gate) * up)


def join(y, lse, q, k, v):
    """Attention y over the first keys, and one key [B, T, K, H] more a query for each of k[i]."""
    rows, length, heads, size = q.shape
    grouped = q.view(rows, length, k.shape[3], -1, size).float()
    score = torch.einsum("btkgh,sbtkh->sbtkg", grouped, k.float()) * size**-0.5
    lse = lse.view(1, rows, length, k.shape[3], -1).float()
    weight = torch.cat([lse, score]).softmax(0)
    extra = torch.einsum("sbtkg,sbtkh->btkgh", weight[1:], v.float())
    y = y.reshape(grouped.shape).float() * weight[0, ..., None] + extra
    return y.view(rows, length, heads, size).to(q.dtype)


class Eagle3Step:
    """A step of Eagle3 on rows of one document, unrolled `steps` times."""

    def __init__(self, target: Target, draft: Eagle3, work: dict, options: Options):
        self.target, self.draft, self.options = target, draft, options
        self.layers, self.steps, self.factor = work["layers"], work["steps"], work["factor"]
        self.kept = torch.as_tensor(np.asarray(work["kept"]), device=options.device)
        self.masters = Masters(draft, options)
        self.attend = options.compiled(attend)
        self.project, self.finish = (options.compiled(f) for f in (draft.project, draft.finish))
        cuda = options.device == "cuda"
        self.join = torch.compile(join, dynamic=True) if cuda else join
        self.end, self.teach = options.compiled(self._end), options.compiled(self._teach)
        self.masks: dict = {}

    def _end(self, h, teacher, weight):
        """Sum of weight x cross-entropy with the teacher's distribution."""
        logp = (self.draft.norm(h) @ self.draft.head.to(h.dtype).T).float().log_softmax(-1)
        return (-(teacher.float().softmax(-1) * logp).sum(-1) * weight).sum()

    def _teach(self, x):
        """The teacher's logits of kept tokens, and whether the likeliest of all is one of them."""
        logits = self.target.norm(x) @ self.target.head.T
        retained = torch.zeros(logits.shape[-1], dtype=torch.bool, device=x.device)
        retained[self.kept] = True
        return logits[..., self.kept], retained[logits.argmax(-1)]

    def loss(self, tokens, trained):
        """(sum over steps of factor^i x weight x cross-entropy, sum of weights)
        trained [B, T]: 1 at tokens that train."""
        rows, length = tokens.shape
        if (rows, length) not in self.masks:  # the same for all steps: rows are whole documents
            shape = (rows, length, length, self.options.device)
            self.masks[rows, length] = make_mask(lambda b, h, q, k: k <= q, *shape)
        mask = self.masks[rows, length]
        states, last = self.target.read(tokens, self.layers)
        with torch.no_grad():
            teacher, usable = self.teach(last)

        def ahead(x, by: int):
            """x of `by` places later; zeros behind the end."""
            return F.pad(x[:, by:], (0, 0) * (x.dim() - 2) + (0, by))

        h, total = self.draft.fc(states), 0.0
        local_value = torch.arange(length, device=tokens.device)[None]
        keys, values = [], []
        for step in range(self.steps):
            x = F.embedding(ahead(tokens, step + 1), self.target.embed)
            q, k, v = self.project(x, h, *self.target.angles(local_value + step))
            if step == 0:
                first = k, v
            else:
                keys.append(k)
                values.append(v)
            y, lse = self.attend(q, *first, mask, lse=True)
            if keys:
                y = self.join(y, lse, q, torch.stack(keys), torch.stack(values))
            h = self.finish(h, y)
            weight = (ahead(trained, step + 2) * ahead(usable, step + 1)).float()
            part = self.end(h, ahead(teacher, step + 1), weight)
            total = total + self.factor**step * part
        return total, trained.sum()

    def run(self, tokens, trained):
        """Run a step and return the loss, still on the device."""
        total, weight = self.loss(tokens, trained)
        loss = total / weight
        loss.backward()
        self.masters.step()
        return loss.detach()


class Masters:
    """Float32 masters of a module's parameters, which are rounded from them after each step."""

    def __init__(self, module: nn.Module, options: Options):
        self.masters = [p.detach().float().clone() for p in module.parameters()]
        module.to(options.dtype)
        self.params = list(module.parameters())
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.optimizer = torch.optim.AdamW(
            self.masters,
            options.learning_rate,
            (0.9, 0.999),
            1e-8,
            weight_decay=0.0,
            fused=options.device == "cuda",
        )

    @torch.no_grad()
    def step(self) -> None:
        """Clip by the global norm, update, round."""
        torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.params])
        nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.optimizer.step()
        torch._foreach_copy_(self.params, self.masters)
        for param in self.params:
            param.grad = None


def measure(step, tokens, trained, steps: int) -> dict:
    """Return seconds of each step, the target's seconds alone, and the allocator's peak."""
    cuda = tokens.is_cuda
    row = time_steps(lambda: step.run(tokens, trained), steps, cuda)
    target = time_calls(lambda: step.target.read(tokens, step.layers), steps, cuda)
    return row | {"target_s": statistics.median(target)}
