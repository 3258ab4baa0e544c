"""Policy: what is meant. `resolve` makes it from a `Config`; `parameters` applies it to a model."""
