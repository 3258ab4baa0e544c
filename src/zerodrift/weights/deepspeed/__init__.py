"""Checkpoints that DeepSpeed saved, read by parameter name."""
