"""Draft models: DFlash and Eagle3."""
