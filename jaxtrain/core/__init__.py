"""Shared parts of every run: models from a config, the optimizer, the step, scores, exports."""
