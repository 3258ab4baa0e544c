"""Watch the models that train in this process, with any library, and record what they do.

The hooks are on functions of torch that every library calls: forwards of modules and the operations in them
(`compute`), gradients at leaves (`grad`, `accumulate`), collectives (`gather`, `reduce`), steps of torch's
optimizers (`master`, `state`), files that are written (`export`). An `Adapter` for each library finds the
parameters in the buffers that the library packs.

Invariant: watching changes no value, and leaves nothing behind when it ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from zerodrift.inspect.trace.libraries import DeepSpeed, Fsdp1, Fsdp2, Own
from zerodrift.inspect.trace.operations import COMPILED, anything_compiled
from zerodrift.inspect.trace.passes import CollectiveWatch, ForwardWatch, GradientWatch
from zerodrift.inspect.trace.records import ProcessRecord
from zerodrift.inspect.trace.script import ScriptWatch
from zerodrift.inspect.trace.state import WatchState
from zerodrift.inspect.trace.steps import ExportWatch, StepWatch

TRIED = ("2.13", "2.15")  # versions of torch

_LIBRARIES = (
    *("torch", "deepspeed", "accelerate", "transformers", "zerodrift", "lightning", "pytorch_lightning"),
    "transformers.trainer",  # which builds an Accelerator of its own
)


def _accelerate_runs() -> bool:
    """Return True if accelerate has set up a process; transformers imports it in any case."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return bool(getattr(state, "_shared_state", None))


class Watcher:
    """The hooks on torch in this process, until `finish` or `end`. Only one watcher at a time."""

    def __init__(
        self,
        steps: int,
        finished: Callable[[ProcessRecord], None],
        only: Any = None,
        files_after: bool = False,
    ) -> None:
        """Hook on torch. `files_after` also records the files that are written later, until `files_end`."""
        self.state = WatchState(only, self._may_finish)
        self._wanted, self._finished = steps, finished
        self._files_after, self.ended = files_after, False
        self._script = ScriptWatch(self.state)
        self._steps = StepWatch(self.state, self._script)
        CollectiveWatch(self.state, self._script)
        self._gradients = GradientWatch(self.state, self._script)
        self.forwards = ForwardWatch(self.state, self._gradients, self._script)
        self._exports = ExportWatch()
        self.state.adapters += [library(self.state) for library in (Own, Fsdp2, Fsdp1, DeepSpeed)]

    def end(self) -> None:
        self._exports.end()
        self._script.leave()
        if self.state.active:
            self.state.active = False
            self.state.patches.close()

    def files_end(self) -> None:
        """Hand over the record once more, with the files that were written since."""
        if self._files_after and self.ended:
            self._exports.see(self.state.models)
            self._exports.end()
            self._finished(self.state.process)

    def finish(self, ended: str) -> None:
        """Record the tensors between steps, remove the hooks, and hand over the record."""
        state, process = self.state, self.state.process
        if not state.active and process.ended != "broken":
            return
        state.active = False
        self._script.leave()
        try:
            if process.ended != "broken":
                state.settle()
                self._script.copies.end_step()
                self._script.record()
                self._gradients.record()
                self._steps.record()
                for model in state.models:
                    model.look()
        except Exception as error:
            state.broken(error)
        finally:
            self.forwards.leave()
            state.patches.close()
        if process.ended != "broken":
            process.ended = ended
        state.see_place()
        for name in _LIBRARIES:
            if sys.modules.get(name) is not None and (name != "accelerate" or _accelerate_runs()):
                whole = sys.modules[name.partition(".")[0]]
                if not whole.__name__.startswith("zerodrift."):  # the drop-in stands for DeepSpeed
                    process.libraries[name] = str(getattr(whole, "__version__", "unknown"))
        if ".".join(torch.__version__.split(".")[:2]) not in TRIED:
            untried = f"torch {torch.__version__} is not one of the tested versions ({', '.join(TRIED)})"
            process.notes.append(f"{untried}: new uses of it are not observed.")
        if anything_compiled():
            state.note(COMPILED)
        self._exports.see(state.models)
        if not self._files_after:
            self._exports.end()
        self.ended = True
        process.models = [model.record(process.world) for model in state.models]
        process.models += [model for adapter in state.adapters for model in adapter.models()]
        self._finished(process)

    def _may_finish(self) -> None:
        if self._steps.all_took(self._wanted):
            self.finish("steps")
