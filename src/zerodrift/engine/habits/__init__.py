"""Rare habits of training scripts: each is right or refused by name, and hooks in only where it is needed."""
