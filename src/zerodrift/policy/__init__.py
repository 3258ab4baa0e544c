"""The meaning of a config: `resolve` makes a policy, and `parameters` applies it to a model."""
