"""Masked diffusion."""
