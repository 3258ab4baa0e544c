"""A model cut into the pieces of a pipeline: which modules a piece has, and what its forward is.

A piece is the model's own tree of modules, with the same paths, in which the modules of other pieces are
replaced: a layer by one that passes its input on, any other module by one that refuses to run. So names are
those of the whole model, and its own code runs: the library's forward for causal language models of
`transformers`, the functions of `Parts` for other models. `plan/stages.py` assigns parameters to pieces.

Invariant: the given model is not changed. A module whose parameters are all in one piece is there as itself,
so hooks on it work wherever it is called from.

[Note: entering] A piece behind the first runs the library's forward of the whole base model. Its first layer
is replaced by one that ignores its input, returns the output of the piece before, and restores the random
generators, since the first piece has already done the work before the layers. Masks and rotary tables are
made as in the whole model.

[Note: router logits] The loss that balances experts multiplies two means over all layers. So if a model's
loss asks for router logits, each piece sends those of its layers along, and the last piece's base model
returns all of them to the library's own loss.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from zerodrift.engine import generators
from zerodrift.errors import ModelError, Problem, UnsupportedError
from zerodrift.versions import numbers

Hidden = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Parts:
    """Cuts a model of your own that has a list of layers, by functions for the parts before, in and after the
    layers. All get a micro-batch as it was given, with floating tensors in the dtype of the mode. In the
    order of the model's parameters, those of `before` must precede the layers and those of `after` must
    follow."""

    layers: str
    """Path of the module whose children are the layers; `""` is the model itself, an `nn.Sequential`."""
    before: Callable[[Any, Any], Hidden]
    """(model, micro-batch) -> the input of the first layer."""
    after: Callable[[Any, Any, Any], torch.Tensor]
    """(model, output of the last layer, micro-batch) -> the loss."""
    each: Callable[..., Hidden] = lambda model, layer, hidden, batch: layer(hidden)
    """(model, layer, its input, micro-batch) -> its output. A function of three arguments gets no model."""

    def __post_init__(self) -> None:
        given = _positional(self.each)
        if given not in (3, 4):
            must = "must take the model, a layer, its input and the micro-batch"
            do = "Write `each=lambda model, layer, hidden, batch: ...`."
            raise ModelError("each", must, got=f"a function of {given}", do=do)

    @property
    def passes(self) -> tuple[str, ...]:
        return ()

    def first(self, piece: nn.Module, batch: Any) -> Hidden:
        return self.middle(piece, self.before(piece, batch), batch)

    def middle(self, piece: nn.Module, hidden: Hidden, batch: Any) -> Hidden:
        model = (piece,) if _positional(self.each) == 4 else ()
        for layer in piece.get_submodule(self.layers).children():
            if not isinstance(layer, PassThrough | AbsentModule):
                hidden = self.each(*model, layer, hidden, batch)
        return hidden

    def last(self, piece: nn.Module, hidden: Hidden, batch: Any) -> torch.Tensor:
        return self.after(piece, self.middle(piece, hidden, batch), batch)

    def whole(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of a model that is not cut."""
        return self.last(model, self.before(model, batch), batch)

    def problem(self, batch: Any) -> Problem | None:
        return None


def _positional(function: Callable[..., Any]) -> int:
    """Count the arguments by position; 4 for a function that takes any number."""
    kinds = [each.kind for each in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 4
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(kind in positional for kind in kinds)


ROUTED = "output_router_logits"
"""The keyword argument and config key that ask for a loss of the router logits of all layers."""

ELSEWHERE = ("output_hidden_states", "output_attentions")
"""Outputs of all layers together, which no rank of a pipeline has."""


@dataclass(frozen=True)
class Causal:
    """A causal language model of `transformers`: embedding, decoder layers, norm, head."""

    layers: str = "model.layers"
    passes: tuple[str, ...] = ("model.norm",)

    @staticmethod
    def of(model: nn.Module) -> Causal:
        """Return the cut of a model type in CAUSAL; the others are refused by name."""
        config = getattr(model, "config", None)
        kind = getattr(config, "model_type", None)
        known = CAUSAL.get(kind) if isinstance(kind, str) else None
        if known is None or not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
            must = f"must be a causal language model of transformers of type {', '.join(CAUSAL)}, or "
            must += "come with `parts`, to be cut into a pipeline"
            do = "Pass `parts=zerodrift.Parts(...)`: it names its list of layers."
            raise UnsupportedError("model", must, got=type(model).__name__, do=do)
        _require_the_librarys(model, known)
        for key in ELSEWHERE:
            if getattr(config, key, False):
                raise UnsupportedError(f"config.{key}", _NOT_ON_ONE_RANK, got="True", do="Set it to False.")
        return known

    @property
    def base(self) -> str:
        """Path of the module that has the layers."""
        return self.layers.rpartition(".")[0]

    def problem(self, batch: Any) -> Problem | None:
        if not isinstance(batch, Mapping):
            must = "must each be a dict of the model's keyword arguments"
            return Problem("micro_batches", must, got=type(batch).__name__)
        for key in ELSEWHERE:
            if batch.get(key) not in (None, False):
                return Problem(key, _NOT_ON_ONE_RANK, got=repr(batch[key]), do="Leave it out.")
        for key in ("use_cache", "cache", "past_key_values"):
            if batch.get(key) not in (None, False):
                must = "must be left out of a pipeline's micro-batches, which only train"
                return Problem(key, must, got="one")
        embedded = batch.get("inputs_embeds") is not None
        if (batch.get("input_ids") is not None) == embedded:
            must = "must be in every micro-batch of a pipeline, or `inputs_embeds`"
            return Problem("input_ids", must, got="both" if embedded else "neither")
        if batch.get("labels") is None:
            must = "must be in every micro-batch of a pipeline"
            return Problem("labels", must, got="none", do="Add them.")
        return None

    def first(self, piece: nn.Module, batch: Any) -> Hidden:
        entry = {key: batch[key] for key in ("input_ids", "inputs_embeds") if batch.get(key) is not None}
        return self._base(piece, {**self._rest(batch, "token_type_ids"), **entry}, ())

    def middle(self, piece: nn.Module, hidden: Hidden, batch: Any) -> Hidden:
        came, *routed = hidden if isinstance(hidden, tuple) else (hidden,)
        with self._entered(piece, came):
            return self._base(piece, {**self._rest(batch), "inputs_embeds": came}, tuple(routed))

    def last(self, piece: nn.Module, hidden: Hidden, batch: Any) -> torch.Tensor:
        came, *routed = hidden if isinstance(hidden, tuple) else (hidden,)

        def add(module: nn.Module, args: Any, output: Any) -> None:
            output.router_logits = (*routed, *(output.router_logits or ()))

        base = piece.get_submodule(self.base)
        handle = base.register_forward_hook(add) if self._routes(piece, batch) else None
        try:
            with self._entered(piece, came):
                rest = self._rest(batch, "labels", "logits_to_keep")
                loss: torch.Tensor = piece(inputs_embeds=came, **rest).loss
                return loss
        finally:
            if handle is not None:
                handle.remove()

    def _base(self, piece: nn.Module, arguments: dict[str, Any], came: tuple[torch.Tensor, ...]) -> Hidden:
        """Run the base model. Return its output, with `came` and its own router logits if there are any."""
        routes = self._routes(piece, arguments)
        arguments = {**arguments, ROUTED: True} if routes else arguments
        output = piece.get_submodule(self.base)(**arguments)
        hidden: torch.Tensor = output.last_hidden_state
        return (hidden, *came, *(output.router_logits or ())) if routes else hidden

    @staticmethod
    def _rest(batch: Any, *wanted: str) -> dict[str, Any]:
        """Return the keyword arguments for every piece, and those `wanted` that belong to one piece alone."""
        own = {"input_ids", "inputs_embeds", "labels", "logits_to_keep", "token_type_ids"} - set(wanted)
        rest = {key: value for key, value in batch.items() if key not in own}
        return {**rest, "use_cache": False, "return_dict": True}

    @staticmethod
    def _routes(piece: nn.Module, batch: Mapping[str, Any]) -> bool:
        """Return whether the loss asks for router logits. In some models it never does."""
        if ROUTED not in inspect.signature(type(piece).forward).parameters:
            return False
        asked = batch.get(ROUTED)
        return bool(getattr(piece.config, ROUTED, False) if asked is None else asked)

    @contextlib.contextmanager
    def _entered(self, piece: nn.Module, came: torch.Tensor) -> Iterator[None]:
        first = next(piece.get_submodule(self.layers).children())
        assert isinstance(first, PassThrough), "a piece behind the first that has the first layer"
        first.came = came
        first.stood = [(generator, generator.get_state()) for generator in generators(came.device)]
        try:
            yield
        finally:
            first.came, first.stood = None, []


Cut: TypeAlias = Parts | Causal
"""Cuts a model and runs its pieces: `first` and `middle` return the output of a piece, `last` the loss of a
micro-batch. The children of the module at path `layers` are the layers; a piece without the modules at
`passes` skips them. `problem` returns why no piece can run a micro-batch."""

_NOT_ON_ONE_RANK = "must be off in a pipeline, which returns only losses"

CAUSAL: dict[str, Causal] = {
    **dict.fromkeys(
        (
            "cohere", "cohere2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe",
            "gpt_oss", "granite", "granitemoe", "llama", "mistral", "mixtral", "olmo", "olmo2", "olmo3",
            "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"
        ),
        Causal()
    ),
    "gpt2": Causal("transformer.h", ("transformer.wpe", "transformer.wte", "transformer.ln_f")),
    "phi": Causal(passes=("model.final_layernorm",))
}  # fmt: skip
"""Model types of `transformers` whose pieces are tested to compute what the whole model computes."""

TESTED_SINCE = "5.20"
"""The first `transformers` whose pieces are tested so."""

OLDER = ("deepseek_v3", "gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Model types that are tested with `transformers` 4.57 and 5.0 too. Layers of other types return more than a
tensor there, or the model looks into its first layer."""


def _require_the_librarys(model: nn.Module, cut: Causal) -> None:
    """Refuse a forward of the user's own: it may silently use values that only the whole model has."""
    parts = {"": model, **{path: model.get_submodule(path) for path in (cut.base, cut.layers) if path}}
    for path, part in parts.items():
        forward = part.__dict__.get("forward", type(part).forward)
        if not str(getattr(forward, "__module__", "")).startswith(("transformers.", "torch.")):
            must = "must have the forward of transformers to be cut into a pipeline as it is"
            got = f"one of {type(part).__name__}'s own"
            do = "Pass `parts=zerodrift.Parts(...)`: it says what comes before, in and after its layers."
            raise UnsupportedError(path or "model", must, got=got, do=do)
    version = str(getattr(sys.modules.get("transformers"), "__version__", TESTED_SINCE))
    kind = str(getattr(model.config, "model_type", ""))
    if kind not in OLDER and numbers(version, TESTED_SINCE) < numbers(TESTED_SINCE):
        must = f"must come from transformers {TESTED_SINCE} or later to be cut into a pipeline, being of "
        do = "Update it, or pass `parts=zerodrift.Parts(...)`."
        raise UnsupportedError("model", f"{must}type {kind}", got=f"transformers {version}", do=do)


# --- a tree of modules, pruned ----------------------------------------------------------------------------


class PassThrough(nn.Module):
    """Replaces a layer of another piece and returns its input; for an embedding's lookup, a zero. It has the
    layer's plain attributes, such as the kind of attention, which a model may read before the call."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        own = {key: value for key, value in vars(layer).items() if not key.startswith("_")}
        self.__dict__ |= {key: value for key, value in own.items() if isinstance(value, str | int | float)}
        self.came: torch.Tensor | None = None
        """Passed on instead of the input; see [Note: entering]."""
        self.stood: list[tuple[torch.Generator, torch.Tensor]] = []

    def forward(self, hidden: Any, *rest: Any, **named: Any) -> Any:
        if self.came is not None:
            for generator, state in self.stood:
                generator.set_state(state)
            return self.came
        looks_up = isinstance(hidden, torch.Tensor) and not hidden.is_floating_point()
        return torch.zeros((), device=hidden.device) if looks_up else hidden


class AbsentModule(nn.Module):
    """Replaces a module of another piece, which must not run here."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        do = "What `before` uses must come before the layers in the order of the model's parameters, what "
        do += "`after` uses behind them."
        must = "must be used in the piece of the pipeline that it is in"
        raise ModelError(self.path, must, got="a use in another", do=do)


def prune(model: nn.Module, names: frozenset[str], cut: Cut) -> nn.Module:
    """Return the model's tree with the parameters of these names and no others."""
    return _pruned(model, "", names, cut, _without(model, names, cut))


def _without(model: nn.Module, names: frozenset[str], cut: Cut) -> frozenset[str]:
    """Return the paths of other pieces' modules without parameters. A layer belongs to the piece of the layer
    before it, and a module of `passes` to the last layer's piece."""
    try:
        layers = model.get_submodule(cut.layers)
    except AttributeError:
        got = f"{cut.layers!r}, which {type(model).__name__} does not have"
        must = "must be the path of the model's list of layers"
        raise ModelError("layers", must, got=got) from None
    bare, here = set(), True
    for name, layer in layers.named_children():
        path = f"{cut.layers}.{name}".lstrip(".")
        held = [f"{path}.{name_inside}" for name_inside, _ in layer.named_parameters(remove_duplicate=False)]
        here = any(name_inside in names for name_inside in held) if held else here
        if not here:
            bare.add(path)
    if not here:
        bare |= {path for path in cut.passes if next(model.get_submodule(path).parameters(), None) is None}
    return frozenset(bare)


def _pruned(
    module: nn.Module, path: str, names: frozenset[str], cut: Cut, absent: frozenset[str]
) -> nn.Module:
    prefix = f"{path}." if path else ""
    held = {prefix + name for name, _ in module.named_parameters(remove_duplicate=False)}
    if path in absent or (held and not held & names and path):
        passed = path in cut.passes or path.rpartition(".")[0] == cut.layers
        return PassThrough(module) if passed else AbsentModule(path)
    if held <= names and not any(layer.startswith(prefix) for layer in absent):
        return module
    clone = _shallow(module)
    for name, child in module.named_children():
        clone._modules[name] = _pruned(child, prefix + name, names, cut, absent)
    for name, parameter in module._parameters.items():
        if parameter is not None and prefix + name not in names:
            clone._parameters[name] = None
    return clone


def _shallow(module: nn.Module) -> nn.Module:
    """Copy a module with registries of its own over the same parts, so that hooks are not shared. A method
    that was set on the module is bound to the clone."""
    clone = module.__class__.__new__(module.__class__)
    clone.__dict__ = {
        key: value.copy() if isinstance(value, dict) and key.startswith("_") else value
        for key, value in module.__dict__.items()
    }
    for key, value in module.__dict__.items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            clone.__dict__[key] = types.MethodType(value.__func__, clone)
    return clone


def check_names(piece: nn.Module, names: frozenset[str]) -> None:
    """Check that a piece has the parameters that the plan gives to it."""
    there = {name for name, _ in piece.named_parameters(remove_duplicate=False)}
    if there != names:
        raise AssertionError(f"a piece has {sorted(there ^ names)[:4]} that the plan has elsewhere")
