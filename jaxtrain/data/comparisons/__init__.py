"""Rows that compare answers: pairs, rankings, labels, steps."""
