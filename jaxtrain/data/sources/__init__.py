"""Rows of files, tables, the Hub and generators, and the order in which they are drawn."""
