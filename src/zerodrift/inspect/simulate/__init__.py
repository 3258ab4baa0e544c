"""Simulate a step on machines that a file describes, without running anything there."""
