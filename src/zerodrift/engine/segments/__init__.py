"""Flat segments: their storage, their gathered form, their gradients, and the buffers that gradients fill."""
