"""Weights in safetensors files: read in slices, and written in slices."""
