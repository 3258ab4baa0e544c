"""Record the operations, gradients, collectives and optimizer steps of a run, real or dry."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.inspect.trace import records
    from zerodrift.inspect.trace.dry_run import trace
    from zerodrift.inspect.trace.engine import observe, observe_calls
    from zerodrift.inspect.trace.model import is_compiled
    from zerodrift.inspect.trace.operations import (
        CASTS, ModulePaths, anything_compiled, forward_flops, paths_in, place_of_code, tensors_of,
    )  # fmt: skip
    from zerodrift.inspect.trace.records import (
        COLUMNS, Column, EngineRecord, ModelRecord, ParameterRecord, ProcessRecord, Sighting, VERSION,
        column_word, dtype_name, merged, narrowest,
    )  # fmt: skip
    from zerodrift.inspect.trace.watch import Watcher

__getattr__, __dir__, __all__ = face(__name__)
