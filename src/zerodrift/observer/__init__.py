"""What a run did, seen from its tensors and its collectives, beside what its plan says."""
