"""The whole optimizer step in PyTorch: rows on the device, backward pass, clipping, fused AdamW."""

import numpy as np
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from peers.decoder import Decoder, Options, Rows
from peers.hybrid import Decoder as HybridDecoder
from peers.timing import measure_steps

WARM_UP, TIMED = 3, 10


def put_rows(batch, options: Options) -> list[Rows]:
    """The microsteps of a host Batch [A, B, T]. Raises RuntimeError for trees without
    torch.compile."""
    device = options.device

    def one(index: int) -> Rows:
        def tensor(array, dtype=np.int64):
            return torch.from_numpy(np.asarray(array[index], dtype)).to(device)

        until = tensor(batch.until)
        rows, length = until.shape

        def visible(b, h, q, k):
            return (k <= q) & (q < until[b, k])

        host = find_ends(batch.prev[index, 0], batch.until[index, 0])
        if options.fused:
            jumps = (batch.prev[index] >= 0) & (batch.prev[index] != np.arange(length) - 1)
            if rows > 1 or jumps.any():
                raise RuntimeError("without torch.compile: one row of documents, no trees")
            mask = host.tolist()
        elif device == "cuda":
            mask = create_block_mask(visible, rows, None, length, length, _compile=True)
        else:  # FlexAttention has no backward pass on a CPU
            row, slot = torch.arange(rows)[:, None, None, None], torch.arange(length)
            mask = visible(row, 0, slot[:, None], slot)
        weights = tensor(batch.weights["nll"], np.float32)
        by_token = (tensor(x) for x in (batch.tokens, batch.positions, batch.prev))
        return Rows(*by_token, weights, mask, torch.from_numpy(host).to(device))

    return [one(index) for index in range(len(batch.tokens))]


def find_ends(prev: np.ndarray, until: np.ndarray) -> np.ndarray:
    """int32 [documents + 1]: see Rows."""
    index = np.arange(len(prev))
    padding = (prev < 0) & (until == index + 1)
    fresh = (prev < 0) & ~(padding & np.roll(padding, 1) & (index > 0))
    return np.append(np.flatnonzero(fresh), len(prev)).astype(np.int32)


class Step:
    """A whole optimizer step: forward, backward, clipping at 1, AdamW, over all microsteps."""

    def __init__(self, model: Decoder, rows: list[Rows], learning_rate: float = 1e-5):
        self.model, self.rows = model, rows
        self.total = float(sum(micro.weights.sum() for micro in rows))
        fused = rows[0].tokens.is_cuda
        self.optimizer = torch.optim.AdamW(
            model.parameters(), learning_rate, (0.9, 0.999), 1e-8, weight_decay=0.0, fused=fused
        )

    def run(self):
        """Run a step and return the loss, still on the device."""
        loss = 0.0
        for micro in self.rows:
            part = self.model.loss(micro) / self.total
            part.backward()
            loss = loss + part.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def measure(self) -> dict:
        """Return losses, seconds of a step, compile seconds and the allocator's peak."""
        return measure_steps(self.run, WARM_UP, TIMED, self.rows[0].tokens.is_cuda)


def build_step(raw: dict, frequency: tuple[float, ...], batch, options: Options) -> Step:
    """The step of a config.json's keys on the rows of a host Batch [A, B, T]."""
    kind = HybridDecoder if raw["model_type"] == "qwen3_5_text" else Decoder
    torch.manual_seed(0)
    with torch.device(options.device):
        model = kind(raw, frequency, options)
    return Step(model, put_rows(batch, options))
