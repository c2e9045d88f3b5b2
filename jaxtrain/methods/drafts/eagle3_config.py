"""Section task of Eagle3: drafts of one layer that feed on their own states."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from jaxtrain.config.limits import ITEMS
from jaxtrain.methods.drafts.config import DraftTask


class Eagle3Task(DraftTask):
    """Eagle3: a draft of one layer that guesses token by token, trained on its own states."""

    kind: Literal["eagle3"] = "eagle3"
    """The training method."""
    length: int | None = Field(None, ge=1, le=64)
    """Steps of the unroll in training, and tokens that the draft guesses. Unset: 7, or as many as
    the draft folder has that training goes on from."""
    decay: float = Field(0.8, gt=0, le=1)
    """Factor of the loss of each further step."""
    draft_vocab_size: int | None = Field(None, ge=1, le=2**24)
    """Tokens that the draft can say, the most frequent ones among the trained tokens of the data.
    Unset: 32000, or all of a smaller vocabulary."""
    vocab_rows: int = Field(200_000, ge=1, le=ITEMS)
    """Rows of each dataset that are counted for it, drawn by run.seed; of a stream the first."""
    loss: Literal["soft", "alpha", "lambda"] = "soft"
    """What a guess is held to, p being the target's distribution over what the draft can say and q
    the draft's. soft: the cross-entropy -sum p log q. The others (LK losses) go by a = sum min(p,
    q), the chance that a sampled guess is accepted: alpha: -log a; lambda: k KL(p | q) + (1 - k)
    (1 - a) with k = kl_scale x exp(-kl_decay x a)."""
    kl_scale: float = Field(1.0, ge=0, le=1)
    """loss lambda: share of the KL divergence where nothing is accepted yet."""
    kl_decay: float = Field(3.0, ge=0, le=1e3)
    """loss lambda: how fast that share falls as more is accepted."""

    def find_own_conflicts(self) -> Iterator[str]:
        """See DraftTask."""
        draft = self.draft
        if draft.num_layers not in (None, 1):
            yield f"task.draft.num_layers {draft.num_layers}: an Eagle3 draft has one; remove it"
        for key in ("attention_bias", "mask_token_id", "layer_types", "sliding_window"):
            if getattr(draft, key):
                yield f"task.draft.{key} has no meaning for an Eagle3 draft; remove it"
        given = self.model_dump(exclude_defaults=True)
        if draft.path is not None and "draft_vocab_size" in given:
            yield (f"task.draft_vocab_size is fixed by task.draft.path {draft.path!r}; remove it")
        if self.loss != "lambda":
            for key in ("kl_scale", "kl_decay"):
                if key in given:
                    yield f'task.{key} is for task.loss "lambda", not {self.loss!r}; remove it'
