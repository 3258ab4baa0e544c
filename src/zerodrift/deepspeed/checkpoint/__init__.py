"""`deepspeed.checkpoint`: what accelerate takes of it is in `utils`; checkpoints themselves need no tools."""

from __future__ import annotations

from zerodrift.deepspeed import unsupported

__getattr__ = unsupported.lookup(__name__)
