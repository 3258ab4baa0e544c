"""`deepspeed.launcher`: the command `deepspeed`."""
