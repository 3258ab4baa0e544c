"""Save and load in DeepSpeed's calls, and `zero_to_fp32`."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.deepspeed.checkpoints.checkpointed_engine import (
        CheckpointedEngine,
        attach_loading,
        tag_validation,
    )

__getattr__, __dir__, __all__ = face(__name__)
