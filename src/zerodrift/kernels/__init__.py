"""Kernels: the compiled CPU fast path, and sums of squares that no slicing can change."""
