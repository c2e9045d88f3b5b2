"""Problem sets answered by the model."""
