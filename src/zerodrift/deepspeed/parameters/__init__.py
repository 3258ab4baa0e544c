"""One parameter by itself: its attributes, its values, its shards, and the contexts that gather it."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.deepspeed.parameters.shards import forget_shards, keep_shards
    from zerodrift.deepspeed.parameters.values import (
        engine_gone, engine_parameter, mark_parameters, plain_wire, unmark_parameters,
    )  # fmt: skip

__getattr__, __dir__, __all__ = face(__name__)
