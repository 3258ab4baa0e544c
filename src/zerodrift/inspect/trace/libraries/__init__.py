"""One adapter per library, which knows the tensors that the library packs in the versions that were tried."""
