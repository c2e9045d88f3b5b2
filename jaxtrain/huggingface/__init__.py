"""Hugging Face folders: config.json, safetensors, and the invertible map between names."""
