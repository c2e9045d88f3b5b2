"""Observers of a run: they receive its events, and may only save, evaluate or stop it."""
