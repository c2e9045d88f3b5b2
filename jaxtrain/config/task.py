"""Sections task, eval and sampling: the method, and how its result is looked at."""

from typing import Literal

from pydantic import Field

from jaxtrain.config.base import Section


class SFTTask(Section):
    """Supervised fine-tuning: next-token negative log-likelihood of the trained tokens."""

    kind: Literal["sft"] = "sft"
    """The training method."""


class SamplingConfig(Section):
    """How tokens are drawn from the model."""

    max_new_tokens: int = Field(256, ge=1)
    """Longest answer."""
    temperature: float = Field(0.0, ge=0)
    """0 takes the most probable token."""
    top_k: int = Field(0, ge=0)
    """Only the k most probable tokens; 0: all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only the most probable tokens that together reach this probability."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Only tokens with at least this share of the most probable one's probability."""
    stop: list[str] = []
    """Texts that end an answer, besides the end-of-turn token."""
    seed: int = Field(0, ge=0)
    """Seed of the draws."""


class EvalConfig(Section):
    """Held-out loss and generated answers during training."""

    every: int | None = Field(None, ge=1)
    """Steps between evaluations; unset: only at the end."""
    at_start: bool = False
    """Also evaluate before the first step."""
    max_batches: int | None = Field(None, ge=1)
    """Evaluate at most this many batches of each held-out dataset."""
    problems: int = Field(0, ge=0)
    """Let the model solve this many held-out calculator problems, tools included, and report the
    share of right answers, before and after training."""
    show: int = Field(3, ge=0)
    """How many of those conversations to print."""
