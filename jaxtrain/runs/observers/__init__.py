"""Observers of a run: they hear of everything and change nothing but its course."""
