"""Losses: pure functions of (model, batch) that return sums; the step alone divides them."""
