"""Rewards: functions that score completions, run in processes that may hang or crash.

Nothing is imported here, so that a worker starts with little: `score` opens rewards.
"""
