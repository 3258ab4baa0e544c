"""Weights of a model: loaded from safetensors in slices, exported, and converted between checkpoints."""
