"""Section task of masked diffusion: a model that fills in masked tokens, seeing both sides."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from jaxtrain.config.limits import ITEMS, TOKENS
from jaxtrain.config.task import TaskSection


class DiffusionTask(TaskSection):
    """Masked diffusion (LLaDA): tokens are masked at random and guessed from what is left, with
    attention in both directions; answers are written by unmasking."""

    renamed: ClassVar[Mapping[str, str]] = {"normalise": "normalize"}

    kind: Literal["diffusion"] = "diffusion"
    """The training method."""
    noise_schedule: Literal["linear", "cosine", "quadratic"] = "linear"
    """How the probability p that a token is masked follows from a document's t, uniform in [0, 1]:
    linear: t; cosine: cos(pi (1 - t) / 2), which masks more; quadratic: t^2, which masks less. The
    result is spread over [min_mask_ratio, max_mask_ratio]."""
    min_mask_ratio: float = Field(0.0, ge=0, lt=1)
    """p at t = 0, unless eps is larger."""
    max_mask_ratio: float = Field(1.0, gt=0, le=1)
    """p at t = 1."""
    eps: float = Field(1e-3, gt=0, lt=1)
    """Smallest p, and so the largest weight 1 / p is 1 / eps."""
    stratified: bool = True
    """Spread the documents of a step evenly over t, rather than draw each t by itself: each is as
    uniform as before, and the step's loss varies less."""
    importance_weighting: bool = True
    """Divide each guess by p: with a linear schedule over [0, 1] the loss is then the bound of the
    negative log-likelihood. false: all guesses count alike."""
    normalize: Literal["document", "token"] = "document"
    """document: sum over a document divided by its trained tokens, then the mean over documents
    (fine-tuning). token: sum over the step divided by its trained tokens (pre-training); without
    importance_weighting, by the masked ones."""
    shift: bool = True
    """Guess a token from what the model puts out at the token before it, as causal models do, so
    that their head is kept. false: from the token's own place."""
    split_turns: bool = True
    """Make each trained stretch of a sample a document of its own, which ends with it: no answer of
    a conversation sees what was said after it. false: documents as they are, such as those whose
    middle is to be filled in."""
    padding: int = Field(0, ge=0, le=TOKENS)
    """Behind an answer that ends with an end token, at most so many more of it are put and trained;
    how many is drawn for each document. So the model learns that an answer may be shorter than the
    room that `sampling.max_new_tokens` gives it; set about that."""
    mask_token_id: int | None = Field(None, ge=0, le=2**24)
    """Token in the place of what is masked: an unused row of the embedding, or a special token that
    no text holds. Unset: mask_token."""
    mask_token: str | None = Field(None, min_length=1, max_length=200)
    """The same by name: a special token of the tokenizer, or a new one. Unset: the tokenizer's own
    mask token, else a new one, "<|diffusion_mask|>". For a new one the first unused row of the
    embedding is taken; where there is none, the embedding gets a row more."""
    held_out_draws: int = Field(4, ge=1, le=1024)
    """Evaluations mask each held-out document so many times, with numbers of masked tokens spread
    evenly from one to all, the same ones every time: their loss is the bound, whatever the
    schedule."""
    steps: int | None = Field(None, ge=1, le=TOKENS)
    """Writing: passes over an answer of sampling.max_new_tokens tokens, split over its blocks.
    Unset: one a token."""
    block_length: int | None = Field(None, ge=1, le=TOKENS)
    """Writing: an answer is unmasked in blocks of so many tokens from left to right, and ends with
    the first that holds an end token. Unset: all at once."""
    confidence: Literal["probability", "margin", "entropy", "random"] = "probability"
    """Writing: which guesses are kept first. probability: of the guess; margin: that less the
    second best; entropy: the lowest of the place; random: any."""
    threshold: float | None = Field(None, gt=0, le=1)
    """Writing: keep all guesses of at least this probability, even if steps would allow fewer."""
    cache: bool = False
    """Writing: read the whole text once a block; further passes read the block alone, beside keys
    and values of the first one. Faster, and no longer exact, for the rest of the text would change
    a little as the block fills."""
    most_rows: int = Field(64, ge=1, le=ITEMS)
    """Writing: answers that are unmasked together."""

    def find_conflicts(self, config: Any) -> Iterator[str]:
        """Yield one sentence for each impossible combination."""
        low = max(self.min_mask_ratio, self.eps)
        if low >= self.max_mask_ratio:
            yield (
                f"task.max_mask_ratio {self.max_mask_ratio} is not above {low}, the larger of"
                " task.min_mask_ratio and task.eps; raise it"
            )
        if self.mask_token_id is not None and self.mask_token is not None:
            yield "task.mask_token_id and task.mask_token both name the mask; keep one"
        if self.padding >= config.data.sequence_len:
            yield (
                f"task.padding {self.padding} is not below data.sequence_len"
                f" {config.data.sequence_len}; lower it"
            )
        for key in ("top_k", "top_p", "min_p"):
            if key in config.sampling.model_dump(exclude_defaults=True):
                yield (
                    f"sampling.{key} has no effect on answers that are unmasked; remove it and use"
                    " sampling.temperature"
                )


WRITING = ("steps", "block_length", "confidence", "threshold", "cache", "most_rows")
"""Keys about how answers are written, which an exported folder says as well."""
