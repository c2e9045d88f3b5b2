"""Kernels of jaxtrain: each op has one definition, several backends and one dispatcher."""
