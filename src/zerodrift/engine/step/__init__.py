"""What one step does to segments: gather, compute, reduce, norm, update."""
