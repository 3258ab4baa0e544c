"""Other executors of a plan than zerodrift's own engine."""
