"""Environments that a model acts in: what a tool answers, and whether an answer is right."""
