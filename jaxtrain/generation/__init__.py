"""Tokens out of a policy: what a sampler promises, and samplers."""
