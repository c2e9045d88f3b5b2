"""Supervised fine-tuning."""

KINDS = {"sft": {"section": "config:SFTTask", "method": "method"}}
