"""The plan, executed: segments, units, compute, gradients, scale, and the step as a recipe."""
