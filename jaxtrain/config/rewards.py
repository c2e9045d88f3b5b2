"""Section rewards: functions that judge episodes, each with a weight."""

from jaxtrain.config.base import Section


class RewardConfig(Section):
    """One reward: an entry of the list rewards; only task.kind rl reads it."""

    function: str
    """A built-in's name, or an import path "package.module:function"."""
    weight: float = 1.0
    """Its factor in the sum."""
