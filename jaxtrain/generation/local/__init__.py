"""The sampler in the training process."""
