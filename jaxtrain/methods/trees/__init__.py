"""Tree training on agent trajectories."""

KINDS = {"tree": {"section": "config:TreeTask", "method": "method"}}
