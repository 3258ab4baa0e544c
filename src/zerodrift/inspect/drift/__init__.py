"""Compare a trainer with a sampler, and show which difference their drift comes from."""
