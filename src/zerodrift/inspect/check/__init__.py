"""Findings about a run of any library: its table, its page, and what to do about what costs precision."""
