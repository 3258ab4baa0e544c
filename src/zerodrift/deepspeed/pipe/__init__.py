"""`deepspeed.pipe`: importable, for scripts that ask `isinstance(model, PipelineModule)`; not usable."""

from __future__ import annotations

from zerodrift.deepspeed import unsupported

__getattr__ = unsupported.lookup(__name__)
