"""What every run is made of: parts from a config, the optimizer, the step, scores, exports."""
