"""Measure what the dtypes of a plan cost, and which pins pay for themselves."""
