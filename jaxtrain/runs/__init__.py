"""A run's folder and those who write to it: checkpoints, sinks, plots, the watchdog."""
