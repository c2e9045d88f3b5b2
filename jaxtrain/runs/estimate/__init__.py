"""What a training step would take on devices that are not here: time, memory, the best mesh."""
