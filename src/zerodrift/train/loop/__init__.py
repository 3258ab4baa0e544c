"""Job, model, training loop, resume, launch and evaluation."""
