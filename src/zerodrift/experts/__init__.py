"""Experts on several ranks: tokens travel to them and back, and another computes meanwhile."""
