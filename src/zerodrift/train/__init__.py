"""The reference trainer: job files, data, training loop, report and tools."""
