"""Config: what was written. `load` turns a file or dict into a checked `Config`."""
