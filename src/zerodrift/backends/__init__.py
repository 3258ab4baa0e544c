"""Other executors of a plan than zerodrift's own engine."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.backends.fsdp2 import FullyShardExecutor, fully_sharded

__getattr__, __dir__, __all__ = face(__name__)
