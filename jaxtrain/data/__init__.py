"""From rows of a dataset to packed batches of prefix trees; nothing here imports jax."""
