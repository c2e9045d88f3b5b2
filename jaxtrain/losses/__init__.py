"""Losses: pure functions of (model, batch); normalised by nobody but the step."""
