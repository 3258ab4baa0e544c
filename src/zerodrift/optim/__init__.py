"""Updates on flat shards: the optimizers, the master schemes, the moments' dtypes, the schedules."""
