"""What goes into a sampler and what comes out; no jax here."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from jaxtrain.config import SamplingConfig

Sampling = SamplingConfig
"""How tokens are drawn: temperature, then top_k, then top_p on what top_k left, then min_p."""


class Completion(NamedTuple):
    """One answer: Completion(tokens=[52, 7, 2], logprobs=[-0.1, -1.2, -0.01], finish_reason="stop")
    for a prompt that the model continued by tokens 52 and 7 and the end-of-turn token 2."""

    tokens: list[int]
    """Without the prompt, with the token that ended it."""
    logprobs: list[float]
    """Of each token under softmax(logits / temperature) over the whole vocabulary: the policy's own
    distribution, before top_k, top_p and min_p cut it. At temperature 0, of softmax(logits)."""
    finish_reason: Literal["stop", "length"]
    """stop: an end token or a stop text; length: max_new_tokens or the model's longest row."""


class Sampler(Protocol):
    """Anything that continues prompts: in process (`local.py`) or a server."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """One completion per prompt, in order."""
        ...
