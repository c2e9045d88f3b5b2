"""The loop, and what it works with: the session, evaluation, numbers of a step."""
