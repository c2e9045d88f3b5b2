"""Masked diffusion."""

KINDS = {"diffusion": {"section": "config:DiffusionTask", "method": "method"}}
