"""What a model is, for a plan: names, shapes, dtypes and owners. No tensors."""
