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


class StructuredOutputs(Section):
    """Form of an answer, by one of three keys: only tokens are drawn that may still lead to a
    match, and the end-of-turn token where the answer is one."""

    regex: str = ""
    """A regular expression for the whole answer, in Rust's syntax: "(yes|no): .{1,80}"."""
    json_schema: dict[str, Any] = {}
    """A JSON schema of the answer; { type = "object" } is any object."""
    choice: list[str] = []
    """Texts of which the answer is one."""

    def __bool__(self) -> bool:
        """Return whether anything is required."""
        return bool(self.regex or self.json_schema or self.choice)

    def find_conflict(self, key: str) -> Iterator[str]:
        """Yield a sentence where several keys are set, or a choice is empty."""
        set_keys = [name for name in type(self).model_fields if getattr(self, name)]
        if len(set_keys) > 1:
            yield f"{key}.{set_keys[0]} and {key}.{set_keys[1]} are both set; keep one"
        if "" in self.choice:
            yield f"{key}.choice holds an empty text; remove it"


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
    structured_outputs: StructuredOutputs = StructuredOutputs()
    """What every answer must match (docs/sampling.md)."""
