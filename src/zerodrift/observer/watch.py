"""Watches whatever model trains in this process, with whatever library, and writes down what it saw.

Everything hangs on doors that every library goes through: `forwards` of modules and the operations in them,
`gradients` that arrive at leaves, `collectives`, `steps` of torch's optimizers. What a library packs into
buffers of its own is unpacked by its `Adapter` in `libraries`. Here is what these share, and when they begin
and end.

A cell is seen where it is a tensor or a call:

    storage     a parameter between steps
    gather      collectives that carry parameters
    compute     what enters the first operation that is no view and no cast, in a forward
    grad        what arrives at the leaf
    accumulate  what a gradient is added to, and what the optimizer is given
    reduce      collectives that carry gradients
    master      the tensor that the optimizer updates
    state       the tensors that it keeps of each
    export      tensors in files that were written

Invariant: watching changes no value, and leaves nothing behind when it ends.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from zerodrift.observer.adapter import Adapter
from zerodrift.observer.collectives import WatchedCollectives
from zerodrift.observer.files import Exports
from zerodrift.observer.forwards import WatchedForwards
from zerodrift.observer.gradients import WatchedGradients
from zerodrift.observer.imports import when_imported
from zerodrift.observer.loss_scale import WatchedScale
from zerodrift.observer.models import WatchedModel
from zerodrift.observer.owners import Owners
from zerodrift.observer.parameter import WatchedParameter
from zerodrift.observer.patches import Patches
from zerodrift.observer.seen import SeenProcess
from zerodrift.observer.steps import WatchedSteps

TRIED = ("2.13", "2.15")
"""Versions of torch."""

Result = TypeVar("Result")


class Watcher:
    """The hooks on torch in this process. One at a time."""

    def __init__(
        self,
        steps: int,
        finished: Callable[[SeenProcess], None],
        adapters: Iterable[Adapter] = (),
        files_after: bool = False,
    ) -> None:
        """`files_after`: see the files that are written after these steps too, until `files_end`."""
        self.active = False
        self.only: Any = None
        """The module or the engine to watch; None for all."""
        self.thread: int | None = None
        """Whose calls are watched; None until one trains."""
        self.several = False
        """Whether there are other ranks."""
        self.in_backward = 0
        self.models: list[WatchedModel] = []
        self.patches = Patches()
        self.process = SeenProcess(rank=0, world=1, steps=0, models=[])
        self.memory: Owners[WatchedParameter] = Owners()
        self.gradient_memory: Owners[WatchedParameter] = Owners()
        self.rested = False
        """Whether what rests may be elsewhere than when it was looked at."""
        self.packed: list[list[WatchedParameter]] = []
        """Whose collectives these are, as an adapter says; the innermost last."""
        self.adapters = tuple(adapters)
        self._wanted, self._finished = steps, finished
        self._files_after, self.ended = files_after, False
        self._settled = 0
        """Steps that there had been when a backward last began."""
        self._forwards = WatchedForwards(self)
        self._gradients = WatchedGradients(self)
        self._steps = WatchedSteps(self)
        self._collectives = WatchedCollectives(self)
        self._exports = Exports()

    # --- its life -------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.active = True
        for part in (self._forwards, self._gradients, self._steps, WatchedScale(self)):
            part.begin()
        if torch.distributed.is_available():
            self._collectives.begin()
        self._exports.begin()
        for adapter in self.adapters:
            adapter.begin(self)

    def end(self) -> None:
        """Remove every hook."""
        self._exports.end()
        if self.active:
            self.active = False
            self.patches.restore()

    def files_end(self) -> None:
        """Hand over once more what was seen, with the files that were written since."""
        if self._files_after and self.ended:
            self._exports.see(self.models)
            self._exports.end()
            self._finished(self.process)

    def finish(self, ended: str) -> None:
        """Look at what rests, end, and hand over what was seen."""
        broken = self.process.ended == "broken"
        if not self.active and not broken:
            return
        self.active = False
        try:
            if not broken:
                self._settle()
                self._rest()
        except Exception as error:
            self.broken(error)
        finally:
            self._forwards.leave()
            self.patches.restore()
        process = self.process
        if process.ended != "broken":
            process.ended = ended
        self._see_place()
        process.libraries = _versions()
        if ".".join(torch.__version__.split(".")[:2]) not in TRIED:
            process.notes.append(
                f"torch {torch.__version__} is not among those that were tried ({', '.join(TRIED)}): what it "
                "does elsewhere than they do may be missing."
            )
        for name, times in sorted(self._collectives.unknown.items()):
            process.notes.append(
                f"{times} {name} in the observed steps carried what no adapter could tell the parameters of."
            )
        self._exports.see(self.models)
        if not self._files_after:
            self._exports.end()
        self.ended = True
        process.models = [model.seen(self.process.world) for model in self.models]
        process.models += [model for adapter in self.adapters for model in adapter.models()]
        self._finished(process)

    def safely(self, call: Callable[[], Result], otherwise: Result) -> Result:
        """Call while the run is watched; where that fails, the run goes on without."""
        if not self.active:
            return otherwise
        try:
            return call()
        except Exception as error:
            self.broken(error)
            return otherwise

    def broken(self, error: Exception) -> None:
        """Stop watching: what was seen is told, and that the rest was not."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        self.process.notes.append(
            f"The observer stopped, a defect of zerodrift's: {type(error).__name__}: {error} "
            f"({where.name}, line {where.lineno} of {where.filename.rpartition('/')[2]})."
        )
        self.active = False  # hooks stay, and do nothing: one of them may be running
        self.process.ended = "broken"

    def may_finish(self) -> None:
        """Finish where every step was seen: a forward begins that is of the next."""
        if self._steps.were(self._wanted):
            self.finish("steps")

    # --- what its parts share -------------------------------------------------------------------------

    def model_of(self, module: torch.nn.Module) -> WatchedModel:
        """The model that this module is, wraps, or is a part of."""
        for model in self.models:
            if model.has(module):
                return model
        made = WatchedModel(module)
        for model in self.models:
            if made.has(model.root):  # a wrapper around it, or what it is a part of
                model.become(made)
                self.forget()
                return model
        self.models.append(made)
        return made

    def resting(self, tensor: torch.Tensor) -> WatchedParameter | None:
        """The parameter that this tensor is."""
        for model in self.models:
            parameter = model.resting(tensor)
            if parameter is not None:
                return parameter
        return None

    def forward_begins(self, module: torch.nn.Module, args: Any) -> None:
        """One that had begun before the hooks were there."""
        self._forwards.begins(module, args)

    def hook(self, parameter: WatchedParameter, leaf: torch.Tensor) -> None:
        """See gradients arrive at a tensor that a forward computes with."""
        self._gradients.hook(parameter, leaf)

    def forget(self) -> None:
        """Names or packs are others than they were."""
        self._steps.forget()

    def when_imported(self, name: str, call: Callable[[Any], None]) -> None:
        """Call with the module; one that lacks what is to be watched goes on unwatched."""

        def imported(module: Any) -> None:
            try:
                call(module)
            except Exception as error:
                self.process.notes.append(
                    f"{name} is not as in the versions that were tried: what it does is not seen "
                    f"({type(error).__name__}: {str(error).partition(' (')[0]})."
                )

        self.patches.undo(when_imported(name, imported))

    def remember(self) -> None:
        """Whose memory it is that rests; asked for before it is used."""
        if self.rested:
            self.rested = False
            self.memory.forget_freed()
            for model in self.models:
                model.remember(self.memory)

    def moved(self) -> None:
        """A collective may have put parameters elsewhere."""
        self._forwards.looked = False

    def passes(self) -> int:
        """Backward passes that there have been."""
        return self._gradients.passes

    def backward_begins(self) -> None:
        """A step may be over: what its optimizer was given belongs to what had arrived."""
        self.gradient_memory.forget_freed()
        self._settle()
        self._see_place()

    def has_stepped(self, what: Any, micro_batches: int) -> None:
        """Count a step of a parameter or an engine."""
        self.process.steps = self._steps.count(what)
        self.process.micro_batches = micro_batches
        self._see_place()

    def event(self, kind: str, line: str, **rest: Any) -> None:
        """Something happened that a finding is made of; once per line."""
        event = {"kind": kind, "line": line, **rest}
        if event not in self.process.events:
            self.process.events.append(event)

    def _settle(self) -> None:
        since, self._settled = self.process.steps > self._settled, self.process.steps
        for model in self.models:
            model.stepped(since)

    def _see_place(self) -> None:
        """The rank and the world, before a program leaves them."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.process.rank = torch.distributed.get_rank()
            self.process.world = torch.distributed.get_world_size()
        self.several = self.process.world > 1

    def _rest(self) -> None:
        for model in self.models:
            model.look()


_LIBRARIES = (
    *("torch", "deepspeed", "accelerate", "transformers", "lightning", "pytorch_lightning", "zerodrift"),
)


def _versions() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        module = sys.modules.get(name)
        if module is not None:
            versions[name] = str(getattr(module, "__version__", "unknown"))
    return versions
