"""Commands beside training: sample, merge, export, replay, doctor and others."""
