"""Tree training on agent trajectories."""
