"""Models as a plan sees them: names, shapes, dtypes and owning modules, without tensors."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.model import huggingface, recipe, safetensors
    from zerodrift.model.document import StoredTensor, listed, read
    from zerodrift.model.empty_model import empty
    from zerodrift.model.huggingface import CONFIG, is_installed, quiet, read_config, require_installed
    from zerodrift.model.inputs import Inputs, inputs_for
    from zerodrift.model.module import (
        LAYOUT, attempt, cause, has_forward, is_dtensor, non_persistent_buffers, ranks,
    )  # fmt: skip
    from zerodrift.model.safetensors import QuantisedTensor, find_quantised, holds, list_tensors, natural
    from zerodrift.model.sources import build_runnable, call, describe, importable, is_factory, make
    from zerodrift.model.spec import BufferSpec, ModelSpec, OwningModule, ParameterSpec

__getattr__, __dir__, __all__ = face(__name__)
