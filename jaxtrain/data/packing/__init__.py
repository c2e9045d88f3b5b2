"""Prefix trees, and rows of tokens packed from them."""
