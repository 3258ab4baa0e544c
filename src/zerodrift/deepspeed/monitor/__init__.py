"""`deepspeed.monitor`: curves of a run in CSV files, TensorBoard and Weights & Biases."""
