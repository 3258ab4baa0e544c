"""`deepspeed.constants`: the numbers that launchers share."""

from zerodrift.deepspeed.launch import PORT, TIMEOUT

__all__ = ["TORCH_DISTRIBUTED_DEFAULT_PORT", "default_pg_timeout"]

TORCH_DISTRIBUTED_DEFAULT_PORT = PORT
default_pg_timeout = TIMEOUT
