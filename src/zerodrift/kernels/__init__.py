"""Kernels: compiled CPU code, Triton programs, and sums of squares that do not depend on the slicing."""
