"""Sections rewards: the functions that judge what the policy wrote."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from jaxtrain.config.base import Place, Section


class RewardConfig(Section):
    """One reward function; a completion's reward is the weighted sum of all of them."""

    function: Place
    """A built-in (math, exact_match, format, regex, length, json_schema, python_tests), an entry
    point's name, "package.module:function" or "file.py:function". It is called as TRL calls one,
    with `prompts`, `completions` and the columns of the row, and returns a number or None each."""
    name: str | None = None
    """What metrics call it. Unset: the function's own name."""
    weight: float = 1.0
    """Factor in the sum; 0 only reports it."""
    timeout: float = Field(30.0, gt=0)
    """Seconds for one group of completions; then its process is killed and the group's rewards of
    this function are missing (counted, and left out of the sum)."""
    options: dict[str, Any] = {}
    """Further keyword arguments of the function."""

    @property
    def label(self) -> str:
        """Name in metrics."""
        return self.name or self.function.rsplit(":", 1)[-1].rsplit(".", 1)[-1]


def find_reward_conflicts(rewards: list[RewardConfig]) -> Iterator[str]:
    """One sentence for each impossible combination within the sections."""
    labels = [reward.label for reward in rewards]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            yield f"rewards.{index}: two rewards are called {label!r}; set rewards.{index}.name"
