"""`deepspeed.moe`: a mixture of experts in plain modules needs nothing of it."""

from __future__ import annotations

from zerodrift.deepspeed import unsupported

__getattr__ = unsupported.lookup(__name__, "utils")
