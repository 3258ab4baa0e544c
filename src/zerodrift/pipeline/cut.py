"""A model cut into the pieces of a pipeline: which modules a piece has, and what its forward is.

A piece is the model's own tree of modules with the same paths, in which what other pieces hold is replaced:
a layer by one that passes its input on, anything else by one that refuses to run. So names stay those of the
whole model, a model that counts its layers counts right, and its own code runs. What runs in a piece follows
from `Cut`: for causal language models of `transformers` the library's own forward, for a list of layers
what its owner says in `Parts`. Which parameter is in which piece is the plan's affair (`plan/stages.py`).

Invariant: nothing of the given model is changed, and a module is in a piece as itself if all of its
parameters are, so hooks on it hold wherever it is called from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from zerodrift.errors import ModelError, UnsupportedError

Hidden = torch.Tensor | tuple[torch.Tensor, ...]
"""What travels from piece to piece."""


class Cut(Protocol):
    """How a model is cut, and how its pieces run."""

    @property
    def layers(self) -> str:
        """Path of the module whose children are the layers; `""` is the model itself."""

    @property
    def passes(self) -> tuple[str, ...]:
        """Paths of other modules that a piece without them passes by."""

    def first(self, piece: nn.Module, batch: Any) -> Hidden:
        """From a micro-batch to what leaves the first piece."""

    def middle(self, piece: nn.Module, hidden: Hidden, batch: Any) -> Hidden:
        """From what came to what goes on."""

    def last(self, piece: nn.Module, hidden: Hidden, batch: Any) -> torch.Tensor:
        """From what came to the loss of the micro-batch."""


@dataclass(frozen=True)
class Parts:
    """A model of one's own that has a list of layers: what comes before, in and after them.

    All are called with a micro-batch as it was given, floating tensors in the dtype of the mode. What
    `before` uses must come before the layers in the order of the model's parameters, what `after` uses
    behind them.
    """

    layers: str
    """Path of the module whose children are the layers; `""` is the model itself, an `nn.Sequential`."""
    before: Callable[[Any, Any], Hidden]
    """(model, micro-batch) -> the input of the first layer."""
    after: Callable[[Any, Any, Any], torch.Tensor]
    """(model, output of the last layer, micro-batch) -> the loss."""
    each: Callable[[Any, Any, Any], Hidden] = lambda layer, hidden, batch: layer(hidden)
    """(layer, its input, micro-batch) -> its output."""

    @property
    def passes(self) -> tuple[str, ...]:
        return ()

    def first(self, piece: nn.Module, batch: Any) -> Hidden:
        return self.middle(piece, self.before(piece, batch), batch)

    def middle(self, piece: nn.Module, hidden: Hidden, batch: Any) -> Hidden:
        for layer in piece.get_submodule(self.layers).children():
            if not isinstance(layer, Pass | Elsewhere):
                hidden = self.each(layer, hidden, batch)
        return hidden

    def last(self, piece: nn.Module, hidden: Hidden, batch: Any) -> torch.Tensor:
        return self.after(piece, self.middle(piece, hidden, batch), batch)


CAUSAL = (
    "deepseek_v3", "gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe",
)  # fmt: skip
"""Model types of `transformers` whose pieces are tested to compute what the whole model computes."""


@dataclass(frozen=True)
class Causal:
    """A causal language model of `transformers`: embedding, decoder layers, norm, head. A micro-batch is a
    dict of its keyword arguments, with `labels`."""

    layers: str = "model.layers"
    passes: tuple[str, ...] = ("model.norm",)

    @staticmethod
    def of(model: nn.Module) -> Causal:
        """For a model that is one of CAUSAL; the others are refused by name."""
        config = getattr(model, "config", None)
        kind = getattr(config, "model_type", None)
        if kind not in CAUSAL or not type(model).__name__.endswith("ForCausalLM"):
            raise UnsupportedError(
                f"`model`: must be a causal language model of transformers of type {', '.join(CAUSAL)}, "
                f"or come with `parts`, to be cut into a pipeline; got {type(model).__name__}. Pass "
                f"`parts=zerodrift.Parts(...)`, which names its list of layers."
            )
        if getattr(config, "output_router_logits", False):
            raise UnsupportedError(
                "`output_router_logits`: must be False with a pipeline: the auxiliary loss of routers "
                "needs the logits of all layers in one place; got True. Set it to False."
            )
        return Causal()

    def first(self, piece: nn.Module, batch: Any) -> Hidden:
        return self._base(piece, batch, {"input_ids": batch["input_ids"]})

    def middle(self, piece: nn.Module, hidden: Hidden, batch: Any) -> Hidden:
        return self._base(piece, batch, {"inputs_embeds": hidden})

    def _base(self, piece: nn.Module, batch: Any, entry: dict[str, Any]) -> Hidden:
        rest = {key: value for key, value in batch.items() if key not in ("input_ids", "labels")}
        made: Hidden = piece.get_submodule("model")(**entry, **rest, use_cache=False).last_hidden_state
        return made

    def last(self, piece: nn.Module, hidden: Hidden, batch: Any) -> torch.Tensor:
        rest = {key: value for key, value in batch.items() if key != "input_ids"}
        if rest.get("labels") is None:
            raise ModelError("`labels`: must be in every micro-batch of a pipeline; got none. Add them.")
        made: torch.Tensor = piece(inputs_embeds=hidden, **rest, use_cache=False).loss
        return made


# --- a tree of modules, pruned ----------------------------------------------------------------------------


class Pass(nn.Module):
    """Stands for a layer of another piece: what comes goes on as it is."""

    def forward(self, hidden: Any, *rest: Any, **named: Any) -> Any:
        return hidden


class Elsewhere(nn.Module):
    """Stands for a module of another piece that nothing here may run."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelError(
            f"`{self.path}`: must not be used here, it is in another piece of the pipeline. What `before` "
            f"uses must "
            f"come before the layers in the order of the model's parameters, what `after` uses behind them."
        )


def prune(model: nn.Module, names: frozenset[str], cut: Cut) -> nn.Module:
    """The model's tree with the parameters of these names and no others."""
    return _pruned(model, "", _Wanted(names, cut.passes, cut.layers, _without(model, names, cut)))


@dataclass(frozen=True)
class _Wanted:
    names: frozenset[str]
    passes: tuple[str, ...]
    layers: str
    absent: frozenset[str]
    """Layers without parameters that follow one of another piece."""

    def passed(self, path: str) -> bool:
        return path in self.passes or path.rpartition(".")[0] == self.layers


def _without(model: nn.Module, names: frozenset[str], cut: Cut) -> frozenset[str]:
    """A layer without parameters is where the layer before it is."""
    try:
        layers = model.get_submodule(cut.layers)
    except AttributeError:
        raise ModelError(
            f"`layers`: must be the path of the model's list of layers; got {cut.layers!r}, which "
            f"{type(model).__name__} has not."
        ) from None
    found, here = set(), True
    for name, layer in layers.named_children():
        path = f"{cut.layers}.{name}".lstrip(".")
        held = [f"{path}.{each}" for each, _ in layer.named_parameters(remove_duplicate=False)]
        here = any(each in names for each in held) if held else here
        if not here:
            found.add(path)
    return frozenset(found)


def _pruned(module: nn.Module, path: str, wanted: _Wanted) -> nn.Module:
    prefix = f"{path}." if path else ""
    held = {prefix + name for name, _ in module.named_parameters(remove_duplicate=False)}
    if path in wanted.absent or (held and not held & wanted.names and path):
        return Pass() if wanted.passed(path) else Elsewhere(path)
    if held <= wanted.names and not any(each.startswith(prefix) for each in wanted.absent):
        return module
    clone = _shallow(module)
    for name, child in module.named_children():
        clone._modules[name] = _pruned(child, prefix + name, wanted)
    for name, parameter in module._parameters.items():
        if parameter is not None and prefix + name not in wanted.names:
            clone._parameters[name] = None
    return clone


def _shallow(module: nn.Module) -> nn.Module:
    """The same module over the same parts, with registers of its own: a hook on one is not on the other."""
    clone = module.__class__.__new__(module.__class__)
    clone.__dict__ = {
        key: value.copy() if isinstance(value, dict) and key.startswith("_") else value
        for key, value in module.__dict__.items()
    }
    return clone


def check_names(piece: nn.Module, names: frozenset[str]) -> None:
    """What the plan gives to a piece must be what the cut left in it."""
    there = {name for name, _ in piece.named_parameters(remove_duplicate=False)}
    if there != names:
        raise AssertionError(f"a piece has {sorted(there ^ names)[:4]} that the plan has elsewhere")


def batch_on(batch: Any, device: torch.device, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A micro-batch with its tensors changed and moved."""
    if isinstance(batch, torch.Tensor):
        return change(batch.to(device))
    if isinstance(batch, Mapping):
        return {key: batch_on(value, device, change) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(batch_on(value, device, change) for value in batch)
    return batch
