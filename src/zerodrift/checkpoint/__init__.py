"""Checkpoints of a run: saved atomically, verified, inspected, and loaded onto any number of ranks."""
