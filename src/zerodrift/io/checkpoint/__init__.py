"""Checkpoints of an engine: saved, resumed, and looked into."""
