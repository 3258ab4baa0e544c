"""`deepspeed.pipe`: importable, for scripts that ask `isinstance(model, PipelineModule)`; not usable."""

from __future__ import annotations

from zerodrift.deepspeed import absent

__getattr__ = absent.lookup(__name__)
