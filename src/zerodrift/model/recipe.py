"""Recipes that compute the initial values of parameters without memory, by replaying recorded operations.

`model/empty_model.py` records every operation by which a constructor or a reset function wrote a parameter. A
recipe replays the operations into real memory, one parameter at a time, with random numbers that depend only
on a seed and the parameter's name. So any rank can compute any parameter, with the bits of every other rank.

Invariant: only recorded operations write values. A missing operation is an error, and torch's random state is
unchanged afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerodrift.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn

TODO = (
    "Give weights that have them, or build the model inside `zerodrift.empty()` with parameters that are "
    "written in place, as the functions of `torch.nn.init` do."
)
ATTRIBUTE = "_zerodrift_recipe"
"""Attribute of a parameter that holds its recipe, so that the recipe lives as long as the parameter."""


@dataclass(frozen=True, slots=True)
class Window:
    """A view of the parameter's memory, as an argument of an operation."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """A call that wrote to a parameter, or that computed a tensor without memory."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    """Arguments of the call, with a `Window` for each view of the parameter's memory, and a `RecordedCall`
    for each other tensor without memory."""
    kwargs: Mapping[str, Any]

    def play(self, flat: torch.Tensor, done: dict[RecordedCall, Any]) -> None:
        """Replay the call on the CPU; `done` holds earlier results, so that random numbers are drawn once."""
        for each in self.calls():
            if each not in done:
                recorded = (each.args, dict(each.kwargs))
                args, kwargs = replace_items(recorded, lambda item: _real(item, flat, done))
                done[each] = each.call(*args, **kwargs)

    def drawn(self) -> list[RecordedCall]:
        """Return the calls behind the result that draw random numbers."""
        return [call for call in self.calls() if getattr(call.call, "__name__", "") in _RANDOM]

    def calls(self) -> list[RecordedCall]:
        """Return the calls behind the result, each once and after its inputs; this call is the last."""
        ordered: dict[RecordedCall, None] = {}
        waiting = [(self, False)]
        while waiting:
            call, is_ready = waiting.pop()
            if call in ordered:
                continue
            if is_ready:
                ordered[call] = None
                continue
            waiting.append((call, True))
            needs: list[Any] = []
            replace_items((call.args, dict(call.kwargs)), needs.append)
            waiting += [(need, False) for need in reversed(needs) if isinstance(need, RecordedCall)]
        return list(ordered)


_RANDOM = frozenset(
    (
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal"),
        *("normal_", "uniform_", "bernoulli", "bernoulli_", "exponential_", "cauchy_", "geometric_"),
        *("log_normal_", "random_", "multinomial", "poisson", "dropout", "trunc_normal_"),
    )
)


def _real(value: Any, flat: torch.Tensor, done: dict[RecordedCall, Any]) -> Any:
    """Return the tensor or device that stands for a recorded argument in a replay."""
    import torch

    if isinstance(value, RecordedCall):
        return done[value]
    if isinstance(value, Window):
        return value.of(flat)
    if isinstance(value, torch.device) and value.type == "meta":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value == "meta" else value


def replace_items(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested tuples, lists and dicts with `change` applied to every item."""
    if type(value) in (tuple, list):
        return type(value)(replace_items(item, change) for item in value)
    if type(value) is dict:
        return {key: replace_items(item, change) for key, item in value.items()}
    return change(value)


@dataclass(slots=True)
class InitRecipe:
    """The operations that wrote one piece of memory."""

    numel: int
    dtype: torch.dtype
    window: Window
    operations: list[RecordedCall] = field(default_factory=list)
    obstacle: str = ""
    """Reason why the recipe cannot be replayed, as a clause; empty if it can."""
    version: int = 0
    """Version of the parameter at the end of recording; a later version means another write."""


def find_recipe(parameter: nn.Parameter) -> InitRecipe | None:
    return getattr(parameter, ATTRIBUTE, None)


def find_obstacle(parameter: nn.Parameter) -> str:
    """Return the reason why a parameter without memory has no initial values, as a clause, or ""."""
    recipe = find_recipe(parameter)
    if recipe is None:
        return "no record of how it is initialised"
    if parameter._version != recipe.version:
        return "a write after `zerodrift.empty()` had ended"
    if recipe.obstacle:
        return recipe.obstacle
    return "" if recipe.operations else "memory that no operation wrote"


def replay(recipe: InitRecipe, name: str, seed: int) -> torch.Tensor:
    """Compute the initial values of a parameter on the CPU, in its shape and the dtype of its operations."""
    import torch

    generator = torch.default_generator
    before = generator.get_state()
    flat = torch.empty(recipe.numel, dtype=recipe.dtype, device="cpu")
    if recipe.dtype.is_floating_point:
        flat.fill_(float("nan"))
    try:
        generator.manual_seed(derive_seed(name, seed))
        with torch.no_grad(), torch.device("cpu"):
            done: dict[RecordedCall, Any] = {}
            for operation in recipe.operations:
                operation.play(flat, done)
    finally:
        generator.set_state(before)
    return recipe.window.of(flat)


def derive_seed(name: str, seed: int) -> int:
    text = f"{seed}:{name}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class RecipeValues:
    """A source of initial values for the parameters of one model.

    The values of one parameter are kept, because segments read them in pieces; never those of a second one.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], seed: int) -> None:
        self._seed = seed
        # Recipes and dtypes are copied, because the parameters get memory before they are filled.
        self._recipes = {name: find_recipe(parameter) for name, parameter in parameters.items()}
        self._dtypes = {name: parameter.dtype for name, parameter in parameters.items()}
        self._name = ""
        self._values: torch.Tensor | None = None

    def exact(self, name: str) -> torch.dtype:
        """Return a dtype that represents the values of a parameter exactly."""
        return self._dtypes[name]

    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        """Copy the elements of a parameter from `start` on into flat memory."""
        if self._name != name or self._values is None:
            self._name, self._values = name, None  # before the next one is made
            recipe = self._recipes[name]
            assert recipe is not None, f"{name} has no recipe"
            # A cast after construction rounds the values, as it would have rounded real ones.
            values = replay(recipe, name, self._seed).to(self._dtypes[name]).reshape(-1)
            if values.is_floating_point() and bool(values.isnan().any()):
                must = "must be initialized as a whole by its own module"
                raise ModelError(name, must, got="elements that nobody wrote", do=TODO)
            self._values = values
        out.copy_(self._values[start : start + out.numel()])

    def fill_packed(self, name: str, start: int, run: object, at: int, numel: int) -> bool:
        """Return False, since computed values are in no narrow format."""
        return False


def list_obstacles(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, str]]:
    """Return (name, reason) of every parameter that has neither memory nor a recipe."""
    reasons = [(name, find_obstacle(parameter)) for name, parameter in parameters if parameter.is_meta]
    return [(name, why) for name, why in reasons if why]
