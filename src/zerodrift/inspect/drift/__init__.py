"""Compare a trainer with a sampler, and show which difference their drift comes from."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.inspect.drift.attribution import SamplerSide, compare_sides
    from zerodrift.inspect.drift.sampler import read_sampler_dtypes
    from zerodrift.inspect.drift.text import comparison_json, comparison_text
    from zerodrift.inspect.drift.trainer import load_trainer

__getattr__, __dir__, __all__ = face(__name__)
