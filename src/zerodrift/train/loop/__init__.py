"""The run of a job: model, session, steps, resume, evaluation and ranks."""
