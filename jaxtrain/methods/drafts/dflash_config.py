"""Section task of DFlash: drafts that guess a block of tokens in one pass."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from jaxtrain.config.limits import TOKENS
from jaxtrain.methods.drafts.config import DraftTask


class DFlashTask(DraftTask):
    """DFlash: a draft that guesses all tokens of a block at once, from states of the target."""

    kind: Literal["dflash"] = "dflash"
    """The training method."""
    block_size: int | None = Field(None, ge=2, le=256)
    """Tokens of a block: the one that is known and those that are guessed. Unset: 16, or as many as
    the draft folder has that training goes on from."""
    num_anchors: int = Field(512, ge=1, le=TOKENS)
    """Most blocks of a packed row; they begin at trained tokens, drawn anew in every step."""
    decay: float | None = Field(7.0, gt=0, le=1e6)
    """Weight of the j-th guess: exp(-(j - 1) / decay). Unset: all alike."""
    weighting: Literal[
        "decay", "dpace", "cumulative-confidence-only", "continuation-value-only"
    ] = "decay"
    """What else weighs a guess. decay: nothing. The others go by the draft's own probabilities of
    the right tokens, smoothed (alpha), and do without decay: cumulative-confidence-only: their
    product up to the guess, which is how likely it is to count; dpace: the sum of these products
    from the guess on; continuation-value-only: that sum divided by the product."""
    alpha: float = Field(0.5, ge=0, le=1)
    """Weightings by confidence: share of 1 in a smoothed probability."""
    min_loss_tokens: int = Field(32, ge=0, le=TOKENS)
    """Samples with fewer trained tokens are left out, and counted."""

    def find_own_conflicts(self) -> Iterator[str]:
        """See DraftTask."""
        given = self.model_dump(exclude_defaults=True)
        if self.weighting == "decay" and "alpha" in given:
            yield 'task.alpha has no effect with task.weighting "decay"; remove it'
        if self.weighting != "decay" and "decay" in given:
            yield f"task.decay has no effect with task.weighting {self.weighting!r}; remove it"
