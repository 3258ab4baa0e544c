"""Metrics, live display, curves, page and provenance of a run."""
