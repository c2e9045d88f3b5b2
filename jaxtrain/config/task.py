"""Sections task, eval and sampling: the method, and how its result is looked at."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from jaxtrain.config.base import Section
from jaxtrain.config.evals import EvalSetConfig
from jaxtrain.config.limits import ITEMS, SEED, TOKENS
from jaxtrain.text_safety import show


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


class EvalConfig(Section):
    """Held-out loss and generated answers during training."""

    every: Annotated[int, Field(ge=1)] | Literal["never"] | None = None
    """Steps between evaluations; unset: only at the end; never: not even there."""
    per_epoch: float | None = Field(None, gt=0, le=1e6)
    """Also evaluate so many times in each of run.num_epochs, evenly; 0.5: every second epoch."""
    at_start: bool = False
    """Also evaluate before the first step."""
    patience: int | None = Field(None, ge=1)
    """End the run after so many evaluations in a row in which checkpoint.best_metric was not better
    than its best value before; unset: train to the end."""
    min_delta: float = Field(0.0, ge=0)
    """patience: by how much it must be better to count."""
    max_batches: int | None = Field(None, ge=1)
    """Evaluate at most this many batches of each held-out dataset."""
    sets: list[EvalSetConfig] = []
    """Sets of problems that the model answers k times each, through an environment, judged by the
    rewards: avg@k, pass@k. With rollout.engine vllm its servers answer, else the process itself.
    Every answer goes to samples.jsonl."""
    show: int = Field(3, ge=0, le=1000)
    """How many of the best and how many of the worst answers to each set to print."""

    @field_validator("every", mode="wrap")
    @classmethod
    def check_every(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Replace pydantic's two errors, one for each type, with one sentence."""
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(
                f'must be a whole number of steps, at least 1, or "never"; found {show(value)}'
            ) from None
