"""Functions and classes of DeepSpeed without an engine: log, collectives, loaders, device, curves, ops."""
