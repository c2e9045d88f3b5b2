"""Rewards: functions that score completions, run in processes that may hang or crash."""

from jaxtrain.environments.rewards.score import Rewards, open_rewards

__all__ = ["Rewards", "open_rewards"]
