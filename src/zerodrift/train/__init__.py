"""The reference trainer: a job file, data, a model, one loop over the engine, and what a person sees."""
