"""Device mesh, logical axes, feeding of batches, and the coordination of processes."""
