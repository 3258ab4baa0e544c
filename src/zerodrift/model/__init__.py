"""Models as a plan sees them: names, shapes, dtypes and owning modules, without tensors."""
