"""Reinforcement learning."""

KINDS = {"rl": {"section": "config:RLTask", "method": "method"}}
