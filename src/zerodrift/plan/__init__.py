"""Plan: what will happen. `build` makes it, `check` proves it, `cost` prices it."""
