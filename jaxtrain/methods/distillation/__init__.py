"""Distillation from a teacher."""

KINDS = {"distillation": {"section": "config:DistillationTask", "method": "method"}}
