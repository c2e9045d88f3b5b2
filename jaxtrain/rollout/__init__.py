"""Sampling: from prompts to completions; only local.py imports jax."""
