"""Estimate of a training step on absent devices: time, memory, the best mesh."""
