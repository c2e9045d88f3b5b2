"""Preference optimization."""

KINDS = {"preference": {"section": "config:PreferenceTask", "method": "method"}}
