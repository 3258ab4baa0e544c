"""Comm: ranks and what they say to one another. `mesh` seats the ranks, `collectives` moves and sums."""
