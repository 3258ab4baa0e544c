"""Weights in and out: safetensors, checkpoints, exports, and other systems' files."""
