"""Whether the model's parameters still are what the engine was given, and how to load into them.

`load_state_dict(assign=True)`, `.half()`, `.to()` and module surgery give a module other tensors than the
segments' views; the engine would go on with the old ones and nobody would see it. So every forward and
every step looks at each parameter's place, and loading asks first.

Invariant: a parameter that is not its segment's view is named in an error before anything is computed with
it, or its values have been taken over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerodrift.engine.segment import FlatSegment
from zerodrift.errors import ModelError, Problems


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter hangs; a tied one hangs in several places."""

    name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    segment: FlatSegment
    index: int
    """Its place in the segment."""

    @property
    def home(self) -> torch.Tensor:
        """What it must be a view of now."""
        return self.segment.shown[self.index]

    @property
    def found(self) -> torch.Tensor | None:
        return self.module._parameters.get(self.attribute)

    def problem(self) -> tuple[str, str, str] | None:
        """What must hold, what is, and what to do."""
        found, trained = self.found, self.segment.update is not None
        if found is not self.parameter:
            return "must stay the parameter that the engine was given", "another one", LOAD
        if not _is_view(self.parameter, self.home):
            return "must stay a view of its segment", "memory of its own", LOAD
        if self.parameter.requires_grad != trained:
            got = f"requires_grad={self.parameter.requires_grad}"
            must = f"must stay {'trained' if trained else 'frozen'}, as planned"
            return must, got, "Set it before `initialize`, and build the engine anew to change it."
        return None


LOAD = (
    "Load weights inside `engine.gathered(write=True)`, cast through the config's `precision`, and change "
    "the model before `initialize`."
)


class Attached:
    """All places of a model."""

    def __init__(self, model: nn.Module, segments: list[FlatSegment]) -> None:
        home = {id(p): (segment, n) for segment in segments for n, p in enumerate(segment.parameters)}
        self._places = [
            Place(f"{path}.{attribute}".lstrip("."), module, attribute, parameter, *home[id(parameter)])
            for path, module in model.named_modules()
            for attribute, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in home
        ]
        self._writable: set[int] = set()
        """Parameters whose full values are there to be written."""

    def check(self) -> None:
        """Raise where a parameter has left its place."""
        problems = Problems()
        for place in self._places:
            problem = place.problem()
            if problem is not None:
                problems.add(place.name, *problem)
        problems.raise_as(ModelError)

    # --- writing ----------------------------------------------------------------------------------------

    def open(self, segments: Iterable[FlatSegment]) -> None:
        """The parameters of these segments are gathered, and what is written to them will be kept."""
        self._writable = {id(p) for segment in segments for p in segment.parameters}

    def close(self) -> None:
        """Take over what was assigned meanwhile, and put the parameters back in their places."""
        with torch.no_grad():
            for place in self._places:
                if id(place.parameter) in self._writable:
                    self._take_over(place)
        self._writable = set()

    def _take_over(self, place: Place) -> None:
        home = place.home
        for tensor in (place.found, place.parameter):
            if tensor is not None and not _is_view(tensor, home):
                home.copy_(tensor)
        place.parameter.data = home
        place.module._parameters[place.attribute] = place.parameter

    def attach(self) -> list[Any]:
        """Hooks that refuse `load_state_dict` where its values would be lost; returns their handles."""
        held: dict[nn.Module, list[Place]] = {}
        for place in self._places:
            held.setdefault(place.module, []).append(place)
        return [
            module.register_load_state_dict_pre_hook(self._asks(places)) for module, places in held.items()
        ]

    def _asks(self, places: list[Place]) -> Any:
        def ask(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            if module is not places[0].module:
                return  # a deep copy carries its hooks along
            for place in places:
                if id(place.parameter) not in self._writable and prefix + place.attribute in state:
                    raise ModelError(
                        f"`{place.name}`: must be loaded inside `engine.gathered(write=True)`, where its "
                        f"full value is there and reaches the optimizer's master; got `load_state_dict` "
                        f"outside of it."
                    )

        return ask


def _is_view(tensor: torch.Tensor, home: torch.Tensor) -> bool:
    return tensor.data_ptr() == home.data_ptr() and tensor.dtype is home.dtype and tensor.shape == home.shape
