"""UnmaskingSampler: answers that begin as masks, which are filled in by confidence.

    canvas   p p p _ _ _ _ _ _      a prompt and as many masks as the answer may have tokens
    pass 1   p p p _ A _ _ E _      every mask is predicted; the most confident stay for good
    pass 2   p p p B A _ D E _      in blocks from left to right, or all at once

Every step unmasks one block of every row: prompts of any length share it, and free rows are
refilled afterwards. `diffusion_device.py` has the device's side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.local.diffusion_device import BlockCanvas, Unmasking, unmask_block
from jaxtrain.generation.local.requests import Request, Requests
from jaxtrain.generation.local.sampler import bucket
from jaxtrain.generation.local.slots import CHUNK, unstack

__all__ = ["Unmasking", "UnmaskingSampler"]


@dataclass(eq=False)
class AnswerCanvas:
    """An answer in progress."""

    request: Request
    tokens: list[int]
    """Prompt and answer, masks included."""
    done: int = 0
    """Tokens of the answer whose blocks are complete."""
    logprobs: list[float] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Return the start of the next block."""
        return len(self.request.prompt) + self.done


class UnmaskingSampler(Requests):
    """Samples answers of at most `sampling.max_new_tokens` tokens, cut behind their first end
    token.

    sampling.temperature scales Gumbel noise on the logits, 0 for none. An answer depends on its
    seed and number, its prompt and the weights, not on the other rows of its batch. Its log-probs
    are those with which the tokens were unmasked.
    """

    predicts_next = False

    def __init__(
        self, model: Any, eos_ids: Any, *, how: Unmasking, most_rows: int = 64,
        max_batch: int = 64, **options: Any,
    ):  # fmt: skip
        """how: passes, blocks and selection. most_rows: limit for answers at once."""
        super().__init__(model, eos_ids, max_batch=min(max_batch, most_rows), **options)
        self.how = how
        self._running: list[AnswerCanvas] = []
        self._unstacked: tuple[Any, Any] = (None, None)

    @property
    @override
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @override
    def drop_all(self) -> None:
        self._waiting.clear()
        self._running = []

    def request(
        self, prompt: Sequence[int], sampling: Sampling, *args: Any, **options: Any
    ) -> Request:
        """Return a checked request; UserError for sampling options that need next-token
        distributions."""
        if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
            raise UserError(
                "sampling.top_k, top_p and min_p are about next tokens, which this model does not"
                " draw; use sampling.temperature"
            )
        if sampling.structured_outputs:
            raise UserError(
                "sampling.structured_outputs is about next tokens, which this model does not draw;"
                " remove it"
            )
        return super().request(prompt, sampling, *args, **options)

    def step(self) -> list[Request]:
        """Unmask a block of every answer in progress; return the requests that have ended."""
        self._running = [running for running in self._running if not running.request.aborted]
        model, version, _ = self._weights
        while self._waiting and len(self._running) < self.max_batch:
            request = self._waiting.popleft()
            if not request.aborted:
                request.versions = [version]
                tokens = [*request.prompt, *[self.how.mask_id] * request.limit]
                self._running.append(AnswerCanvas(request, tokens))
        if self._running:
            with self.on_mesh():
                self._fill(self._unstack(model))
        ended = [running for running in self._running if self._has_ended(running)]
        self._running = [running for running in self._running if running not in ended]
        return [running.request for running in ended]

    def _unstack(self, model: Any) -> Any:
        if self._unstacked[0] is not model:
            self._unstacked = (model, unstack(model))
        return self._unstacked[1]

    def _fill(self, model: Any) -> None:
        """Unmask a block of every canvas."""
        running, how = self._running, self.how
        lengths = [
            min(how.block_length or canvas.request.limit, canvas.request.limit - canvas.done)
            for canvas in running
        ]
        B, W = bucket(len(running), 1), bucket(max(lengths), 8)
        C = roomy(max(len(canvas.tokens) + W for canvas in running))
        tokens_BC = np.zeros((B, C), np.int32)
        columns = np.zeros((6, B), np.int64)
        temperature_B = np.zeros(B, np.float32)
        for row, (canvas, length) in enumerate(zip(running, lengths, strict=True)):
            sampling = canvas.request.sampling
            tokens_BC[row, : len(canvas.tokens)] = canvas.tokens
            columns[:, row] = (
                *(canvas.start, canvas.start + length, len(canvas.tokens)),
                how.passes(length, canvas.request.limit),
                *(sampling.seed, canvas.request.number),
            )
            temperature_B[row] = sampling.temperature
        columns[0, len(running) :] = columns[1, len(running) :] = 1  # nothing to fill
        columns[2, len(running) :] = 1
        block = BlockCanvas(tokens_BC, *columns.astype(np.int32), temperature_B)
        found_BW, logprob_BW = map(np.asarray, unmask_block(model, block, W, how))
        for row, (canvas, length) in enumerate(zip(running, lengths, strict=True)):
            canvas.tokens[canvas.start : canvas.start + length] = found_BW[row, :length].tolist()
            canvas.logprobs += logprob_BW[row, :length].tolist()
            canvas.done += length

    def _has_ended(self, canvas: AnswerCanvas) -> bool:
        """Return True if an answer is complete, and store it in its request."""
        request = canvas.request
        first = len(request.prompt)
        answer = canvas.tokens[first : first + canvas.done]
        ends = [index for index, token in enumerate(answer) if token in request.ends]
        if ends:
            answer, request.finish_reason = answer[: ends[0] + 1], "stop"
        cut = self._find_stop(answer, 0, request.sampling.stop)
        if cut is not None:
            answer, request.finish_reason = answer[:cut], "stop"
        if canvas.done < request.limit and request.finish_reason != "stop":
            return False
        request.tokens, request.logprobs = answer, canvas.logprobs[: len(answer)]
        request.versions = request.versions * len(answer)
        return True


def roomy(size: int) -> int:
    """Round `size` up to eighths of a power of two and to whole chunks: at most an eighth is
    unused."""
    step = max(CHUNK, bucket(size, 1) // 8)
    return -(-size // step) * step
