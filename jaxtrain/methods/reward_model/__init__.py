"""Reward models."""

KINDS = {"reward_model": {"section": "config:RewardModelTask", "method": "method"}}
