"""One step on segments: gather, compute, reduce, norm, update."""
