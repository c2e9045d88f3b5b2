"""Shared parts of linear recurrences on packed forests: chunks of rows, the walk through them with
a state in hand, both ways, and the convolution that stands before them."""
