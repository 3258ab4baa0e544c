"""The plan of a run: `build` makes it, `check` proves it, `cost` counts its bytes."""
