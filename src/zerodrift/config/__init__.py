"""Config: reading, checking and documenting keys. `load` turns a file or dict into a checked `Config`."""
