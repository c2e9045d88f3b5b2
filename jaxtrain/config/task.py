"""Sections task and sampling: the method, and how its model draws tokens."""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from jaxtrain.config.base import Section
from jaxtrain.config.limits import ITEMS, SEED, TOKENS


class TaskSection(Section):
    """Base of the sections of all methods; `kind` names the method."""

    reads: ClassVar[frozenset[str]] = frozenset()
    """Sections besides the common ones that the method reads: rollout, env, rewards."""
    trees: ClassVar[bool] = False
    """Whether rows of data become trees."""
    rewards_itself: ClassVar[bool] = False
    """Whether what it reads rewards for is judged without any of them."""

    kind: str
    """The training method."""

    def find_conflicts(self, config: Any) -> Iterator[str]:
        """Yield one sentence for each impossible combination with the rest of the config."""
        return iter(())

    def started_from(self, config: Any) -> str:
        """Return the origin of the trained weights, for the model card."""
        pretrained = config.model.init == "pretrained" and config.model.path
        return config.model.path if pretrained else "random weights"


class SamplingConfig(Section):
    """Sampling of tokens from the model."""

    max_new_tokens: int = Field(256, ge=1, le=TOKENS)
    """Longest answer."""
    temperature: float = Field(0.0, ge=0, le=1000)
    """0 takes the most probable token."""
    top_k: int = Field(0, ge=0, le=ITEMS)
    """Only the k most probable tokens; 0: all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only the most probable tokens that together reach this probability."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Only tokens with at least this share of the most probable one's probability."""
    stop: list[str] = []
    """Texts that end an answer, besides the end-of-turn token."""
    seed: int = Field(0, ge=0, le=SEED)
    """Seed of the draws."""
