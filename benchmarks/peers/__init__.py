"""PyTorch sides of the benchmarks: models, steps and kernels as fast as PyTorch allows."""
