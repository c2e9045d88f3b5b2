"""jaxtrain: post-training in JAX, where every batch is a forest of packed prefix trees."""

from jaxtrain import moved

__version__ = "0.2.0"

moved.install()
