"""How a parameter without memory gets its first values: what its module did to it, done again.

`model/empty.py` records every operation by which a constructor or a reset function wrote a parameter; here
that is played back into real memory, one parameter at a time, with random numbers that depend on a seed and
the parameter's name alone. So a rank can make any parameter, whichever others it makes, and gets the bits
that every other rank would get.

Invariant: values are those operations' and nothing else's; where one is missing there is no value but an
error, and torch's random state is afterwards what it was before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

ATTRIBUTE = "_zerodrift_recipe"
"""Where a parameter keeps its recipe: on itself, so that it lives as long and no longer."""


@dataclass(frozen=True, slots=True)
class Window:
    """A view of the parameter's memory: what an operation was called with."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A tensor without memory that a parameter was written from: the call that made it."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    """As they were, with what was computed before in the place of tensors without memory."""
    kwargs: Mapping[str, Any]

    def value(self, done: dict[Computed, Any]) -> Any:
        """The tensor, on the CPU; `done` is what has been made already, so that numbers are drawn once."""
        for call in self.calls():
            if call not in done:
                args, kwargs = replaced((call.args, dict(call.kwargs)), lambda item: _on_cpu(item, done))
                done[call] = call.call(*args, **kwargs)
        return done[self]

    def drawn(self) -> list[Computed]:
        """Those of the calls behind it that draw numbers."""
        return [call for call in self.calls() if getattr(call.call, "__name__", "") in _DRAWN]

    def calls(self) -> list[Computed]:
        """The calls that it is made of, each once and after those that it needs; itself is the last."""
        ordered: dict[Computed, None] = {}
        waiting = [(self, False)]
        while waiting:
            call, is_ready = waiting.pop()
            if call in ordered:
                continue
            if is_ready:
                ordered[call] = None
                continue
            waiting.append((call, True))
            waiting += [(need, False) for need in reversed(call._needs())]
        return list(ordered)

    def _needs(self) -> list[Computed]:
        needs: list[Computed] = []

        def look(item: Any) -> None:
            if isinstance(item, Computed):
                needs.append(item)

        replaced((self.args, dict(self.kwargs)), look)
        return needs


_DRAWN = frozenset(
    (
        *(
            "rand",
            "rand_like",
            "randn",
            "randn_like",
            "randint",
            "randint_like",
            "randperm",
            "normal",
            "normal_",
        ),
        *("uniform_", "bernoulli", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_"),
        *("random_", "multinomial", "poisson", "dropout", "trunc_normal_"),
    )
)
"""Functions that draw numbers."""


def _on_cpu(value: Any, done: dict[Computed, Any]) -> Any:
    import torch

    if isinstance(value, Computed):
        return done[value]
    if isinstance(value, torch.device) and value.type == "meta":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value == "meta" else value


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested tuples, lists and dicts with everything in them changed."""
    if type(value) in (tuple, list):
        return type(value)(replaced(item, change) for item in value)
    if type(value) is dict:
        return {key: replaced(item, change) for key, item in value.items()}
    return change(value)


@dataclass(frozen=True, slots=True)
class Operation:
    """One call that wrote the parameter."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    """As they were, with a Window wherever the parameter's memory was, and what was computed for it."""
    kwargs: Mapping[str, Any]

    def play(self, flat: torch.Tensor, done: dict[Computed, Any]) -> None:
        def real(value: Any) -> Any:
            if isinstance(value, Window):
                return value.of(flat)
            return value.value(done) if isinstance(value, Computed) else value

        self.call(*map(real, self.args), **{key: real(value) for key, value in self.kwargs.items()})


@dataclass(slots=True)
class InitRecipe:
    """What was done to one piece of memory."""

    numel: int
    dtype: torch.dtype
    window: Window
    """The parameter in it."""
    operations: list[Operation] = field(default_factory=list)
    lost: str = ""
    """Why it cannot be played back, as a clause; empty where it can."""
    version: int = 0
    """The parameter's version when recording ended; another one means that it was written since."""


def of(parameter: nn.Parameter) -> InitRecipe | None:
    return getattr(parameter, ATTRIBUTE, None)


def missing(parameter: nn.Parameter) -> str:
    """Why a parameter without memory has no first values, as a clause; empty where it has."""
    recipe = of(parameter)
    if recipe is None:
        return "no record of how it is initialised"
    if parameter._version != recipe.version:
        return "a write after `zerodrift.empty()` had ended"
    if recipe.lost:
        return recipe.lost
    return "" if recipe.operations else "memory that nobody wrote"


def play(recipe: InitRecipe, name: str, seed: int) -> torch.Tensor:
    """The first values of a parameter, on the CPU, in its shape and the dtype they were made in."""
    import torch

    generator = torch.default_generator
    before = generator.get_state()
    flat = torch.empty(recipe.numel, dtype=recipe.dtype)
    if recipe.dtype.is_floating_point:
        flat.fill_(float("nan"))
    try:
        generator.manual_seed(key(name, seed))
        with torch.no_grad():
            done: dict[Computed, Any] = {}
            for operation in recipe.operations:
                operation.play(flat, done)
    finally:
        generator.set_state(before)
    return recipe.window.of(flat)


def key(name: str, seed: int) -> int:
    """The seed of one parameter."""
    text = f"{seed}:{name}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class Initial:
    """The first values of the parameters of one model, by name: a source that a segment is filled from.

    The last parameter made is kept, because it is asked for window by window; never a second one.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], seed: int) -> None:
        self._seed = seed
        # What is needed of them, because they have memory by the time that they are filled.
        self._recipes = {name: of(parameter) for name, parameter in parameters.items()}
        self._dtypes = {name: parameter.dtype for name, parameter in parameters.items()}
        self._name = ""
        self._values: torch.Tensor | None = None

    def exact(self, name: str) -> torch.dtype:
        """A dtype that the values of a parameter are exact in."""
        return self._dtypes[name]

    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        """The elements from `start` on of a parameter, into flat memory."""
        if self._name != name or self._values is None:
            self._name, self._values = name, None  # before the next one is made
            self._values = self._made(name)
        out.copy_(self._values[start : start + out.numel()])

    def _made(self, name: str) -> torch.Tensor:
        recipe = self._recipes[name]
        if recipe is None:
            raise AssertionError(f"{name} has no recipe")
        # Rounded where the model was cast after it was built, as its own values would have been.
        values = play(recipe, name, self._seed).to(self._dtypes[name]).reshape(-1)
        if values.is_floating_point() and bool(values.isnan().any()):
            raise Unwritten(name)
        return values


class Unwritten(Exception):  # noqa: N818 (turned into a ModelError with all names by whoever fills)
    """A parameter of which some elements were never written."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def refusals(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, str]]:
    """(name, why) of every parameter that has neither memory nor a recipe."""
    reasons = [(name, missing(parameter)) for name, parameter in parameters if parameter.is_meta]
    return [(name, why) for name, why in reasons if why]
