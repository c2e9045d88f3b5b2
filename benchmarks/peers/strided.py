"""The PyTorch side of ebft_strided.py: a step of strided EBFT, as well as it can be written.

Axolotl's layout with the right indices: N copies of each document, then all blocks' first tokens,
all second ones, ... ; FlexAttention under block masks that are made once; torch.compile of blocks,
head and draws; fused AdamW with float32 masters. The draws are made by whole forward passes, one a
token ("torch", as Axolotl does), or by keys and values kept of the documents ("torch kept", which
it does not). Rewards, advantages and loss are this project's on the same tokens
(tests/methods/test_methods_strided_benchmark.py).
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from peers.decoder import Block, Norm, rotate
from peers.drafts import Angles, Masters, Options, attend
from peers.timing import time_steps, warm_up

torch._dynamo.config.recompile_limit = 64


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Blocks of documents of S tokens."""

    length: int
    stride: int
    context: int
    block: int
    samples: int

    @property
    def blocks(self) -> int:
        return (self.length - self.block - self.context) // self.stride + 1

    def anchors(self, device):
        return self.context + self.stride * torch.arange(self.blocks, device=device)


class KeptBlock(Block):
    """A block that may keep keys and values in a buffer."""

    def forward(self, x, cos, sin, mask, retained=None, slots=None):
        """retained: (k, v) [R, slots, heads, H], into whose `slots` the new ones go."""
        if retained is None:
            return super().forward(x, cos, sin, mask)
        rows, length, _ = x.shape
        heads = (self.heads, self.kv_heads, self.kv_heads)
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, -1, self.size)
        q, k, v = qkv.split(heads, 2)
        q, k = (rotate(norm(y), cos, sin) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        for buffer, new in zip(retained, (k, v), strict=True):
            buffer.index_copy_(1, slots, new)
        y = attend(q, *retained, mask)
        x = x + self.out(y.reshape(rows, length, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Policy(nn.Module):
    """A decoder; its head is the embedding where that is tied."""

    def __init__(self, raw: dict, options: Options):
        super().__init__()
        width, std = raw["hidden_size"], raw["initializer_range"]
        self.embed = nn.Parameter(torch.randn(raw["vocab_size"], width) * std)
        tied = raw["tie_word_embeddings"]
        self.head = (
            self.embed if tied else nn.Parameter(torch.randn(raw["vocab_size"], width) * std)
        )
        self.blocks = nn.ModuleList(KeptBlock(raw) for _ in range(raw["num_hidden_layers"]))
        self.norm = Norm(width, raw["rms_norm_eps"])
        self.angles = Angles(raw, options.device)
        if options.device == "cuda":
            for block in self.blocks:
                block.compile(dynamic=False)

    def run(self, tokens, positions, mask, layers=(), retained=None, slots=None):
        """(what comes out of the last layer that is needed [R, T, D], those of `layers`)."""
        x, actual = F.embedding(tokens, self.embed), []
        cos, sin = self.angles(positions)
        for index, block in enumerate(self.blocks):
            local_value = (None,) if retained is None else (retained[index], slots)
            x = block(x, cos, sin, mask, *local_value)
            if index in layers:
                actual.append(x)
                if len(actual) == len(layers):
                    break
        return x, actual


class Step:
    """Draws, rewards, loss and update on documents [R, S] without padding."""

    def __init__(self, raw, geometry: Geometry, layers, temperature: float, options: Options):
        self.geometry, self.layers, self.options = geometry, layers, options
        self.temperature = temperature
        torch.manual_seed(0)
        with torch.device(options.device):
            self.policy = Policy(raw, options)
            self.frozen = Policy(raw, options)
        self.frozen.load_state_dict(self.policy.state_dict())
        self.frozen.to(options.dtype).requires_grad_(False)
        self.masters = Masters(self.policy, options)
        self.draw = options.compiled(self._draw)
        self.end = options.compiled(self._end)
        self.place()

    def place(self) -> None:
        """Positions, predictors and masks, which are the same in every step."""
        g, device = self.geometry, self.options.device
        S, NB, G = g.length, g.blocks, g.block
        self.total = S + NB * G
        anchors = g.anchors(device)
        steps = torch.arange(G, device=device)
        self.positions = torch.cat(
            [torch.arange(S, device=device), (anchors + steps[:, None]).flatten()]
        )[None]
        local_value = S + torch.arange(NB * G, device=device)
        # The token itself predicts nothing here: each is predicted by its own predecessor.
        self.predictor = torch.cat([anchors - 1, local_value[: (G - 1) * NB]])
        self.truth = anchors[:, None] + steps

        def visible(b, h, q, k):
            q_block, k_block = (q - S) % NB, (k - S) % NB
            drawn = (k >= S) & (q >= S) & (q_block == k_block) & (k <= q)
            before = (k < S) & torch.where(q < S, k <= q, k < anchors[q_block])
            return before | drawn

        self.mask = self._mask(visible, self.total, self.total)
        self.document_mask = self._mask(lambda b, h, q, k: k <= q, S, S + NB * (G - 1))
        self.now = torch.zeros((), dtype=torch.long, device=device)

        def later(b, h, q, k):
            drawn = (k >= S) & ((k - S) % NB == q) & ((k - S) // NB < self.now)
            return ((k < S) & (k < anchors[q])) | drawn

        self.step_masks = []
        for step in range(1, G):
            self.now.fill_(step)
            self.step_masks.append(self._mask(later, NB, S + NB * (G - 1)))

    def _mask(self, visible, queries: int, keys: int):
        device = self.options.device
        if device == "cuda":
            return create_block_mask(visible, None, None, queries, keys, device, _compile=True)
        return visible(0, 0, torch.arange(queries)[:, None], torch.arange(keys))[None, None]

    def _draw(self, hidden, head, times: int):
        """Tokens [R * times, Q] of what hidden states [R, Q, D] predict."""
        hidden = self.policy.norm(hidden).repeat_interleave(times, 0)
        logits = (hidden @ head.T).float()
        if not self.temperature:
            return logits.argmax(-1)
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp_min(1e-20)))
        return (logits / self.temperature + noise).argmax(-1)

    @torch.no_grad()
    def draw_again(self, documents):
        """[R * N, S + NB * G], one whole pass a token."""
        g = self.geometry
        full = documents.repeat_interleave(g.samples, 0)
        full = F.pad(full, (0, self.total - g.length))
        for step in range(g.block):
            hidden, _ = self.policy.run(full, self.positions, self.mask)
            index = self.predictor[step * g.blocks : (step + 1) * g.blocks]
            tokens = self.draw(hidden[:, index], self.policy.head, 1)
            first = g.length + step * g.blocks
            full[:, first : first + g.blocks] = tokens
        return full

    @torch.no_grad()
    def draw_kept(self, documents):
        """Draw with keys and values kept of the documents."""
        g, rows = self.geometry, len(documents)
        S, NB, N = g.length, g.blocks, g.samples
        first = self.policy.blocks[0]
        shape = (rows, S + NB * (g.block - 1), first.kv_heads, first.size)
        kind = {"dtype": self.options.dtype, "device": documents.device}
        retained = [
            (torch.zeros(shape, **kind), torch.zeros(shape, **kind)) for _ in self.policy.blocks
        ]
        positions = self.positions[:, :S]
        slots = torch.arange(self.total, device=documents.device)
        hidden, _ = self.policy.run(
            documents, positions, self.document_mask, (), retained, slots[:S]
        )
        index = g.anchors(documents.device) - 1
        token = self.draw(hidden[:, index], self.policy.head, N)
        retained = [tuple(x.repeat_interleave(N, 0) for x in pair) for pair in retained]
        drawn = [token]
        for step in range(1, g.block):
            new = slots[S + (step - 1) * NB :][:NB]
            self.now.fill_(step)
            mask = self.step_masks[step - 1]
            hidden, _ = self.policy.run(token, self.positions[:, new], mask, (), retained, new)
            token = self.draw(hidden, self.policy.head, 1)
            drawn.append(token)
        return torch.cat([documents.repeat_interleave(N, 0), *drawn], 1)

    @torch.no_grad()
    def judge(self, full):
        """(advantages, rewards) [R, N, NB]; features of the blocks' last tokens."""
        g = self.geometry
        _, states = self.frozen.run(full, self.positions, self.mask, self.layers)
        drawn = self.total - g.blocks + torch.arange(g.blocks, device=full.device)

        def feature(index):
            actual = [F.normalize(x[:, index].float(), dim=-1) for x in states]
            return F.normalize(torch.cat(actual, -1), dim=-1).view(-1, g.samples, g.blocks, width)

        width = sum(x.shape[-1] for x in states)
        created, truth = feature(drawn), feature(self.truth[:, -1])
        aligned = 2 * (created * truth).sum(-1)
        gram = torch.einsum("rnbd,rmbd->rbnm", created, created)
        alike = 2 * (gram.sum(-1) - gram.diagonal(dim1=-2, dim2=-1)) / max(g.samples - 1, 1)
        rewards = aligned - alike.transpose(1, 2)
        peers = rewards.sum(1, keepdim=True) - rewards
        return rewards - peers / (g.samples - 1), rewards

    def _end(self, hidden, head, tokens, advantage):
        """Sum of -log p * advantage of [R, Q] tokens."""
        logits = (self.policy.norm(hidden) @ head.T).float()
        nll = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
        return (nll * advantage.flatten()).sum()

    def loss(self, full, advantage):
        """The mean over drawn tokens; row by row, so that one row's logits are held at once."""
        g = self.geometry
        hidden, _ = self.policy.run(full, self.positions, self.mask)
        tokens = full[:, g.length :]
        # Tokens lie step by step: every step has the blocks' advantages in their order.
        weights = advantage.flatten(0, 1).repeat(1, g.block)
        before = hidden[:, self.predictor]
        total = 0.0
        for row in range(len(full)):
            entry = slice(row, row + 1)
            total = total + self.end(before[entry], self.policy.head, tokens[entry], weights[entry])
        return total / tokens.numel()

    def run(self, documents, retained: bool):
        """Run a step and return the loss, still on the device."""
        full = (self.draw_kept if retained else self.draw_again)(documents)
        advantage, _ = self.judge(full)
        loss = self.loss(full, advantage)
        loss.backward()
        self.masters.step()
        return loss.detach()


def measure(step: Step, documents, retained: bool, warm: int, steps: int) -> dict:
    """Return seconds of each step, of the first one (which compiles), and the allocator's peak."""
    cuda = documents.is_cuda
    row = warm_up(lambda: step.run(documents, retained), warm)
    row |= time_steps(lambda: step.run(documents, retained), steps, cuda, wait=True)
    hardware = torch.cuda.get_device_name() if cuda else "cpu"
    return row | {"hardware": hardware, "version": f"torch {torch.__version__}"}
