"""What dtypes change in a model's numbers: estimated, replayed, and which pins pay for themselves."""
