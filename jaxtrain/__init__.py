"""jaxtrain: post-training in JAX, where every batch is a forest of packed prefix trees."""

__version__ = "0.2.0"
