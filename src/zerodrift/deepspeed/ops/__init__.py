"""`deepspeed.ops`: the optimizers that scripts build by hand. Everything else of it is absent."""

from __future__ import annotations

from zerodrift.deepspeed import absent
from zerodrift.deepspeed.ops import adam, lion

__all__ = ["adam", "lion"]


__getattr__ = absent.lookup(__name__)
