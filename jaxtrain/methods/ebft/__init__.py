"""Feature-matching (energy-based) fine-tuning."""
