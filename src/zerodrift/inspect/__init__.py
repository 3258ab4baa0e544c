"""Look at anybody's run: check, trace, audit, drift, simulate."""
