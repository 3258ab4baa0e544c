"""Build a module, on the meta device or with weights, and describe it.

The module itself is not changed. Parameters are refused if they have no shape, a dtype that zerodrift lacks,
or memory that is shared with another parameter. A DTensor, from a tensor-parallel plan of the user, is
described with the shape of its local shard, which must be the same on all ranks: a sharded dimension must
divide evenly.

Invariant: the order is that of `named_parameters`, and each Parameter object is one `ParameterSpec`. torch's
DTensors are not imported for a model that has none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from zerodrift.dtypes import DType, from_torch
from zerodrift.errors import ModelError, Problems
from zerodrift.model.document import listed
from zerodrift.model.spec import BufferSpec, ModelSpec, OwningModule, ParameterSpec

if TYPE_CHECKING:
    import torch
    from torch import nn


Result = TypeVar("Result")

CAUSE_SHOWN = 600
"""Most characters of an exception's message that an error of ours shows."""


def on_meta(make: Callable[[], Result], where: str, must: str) -> Result:
    """Return the result of `make`, called with the meta device as the default device."""
    import torch

    def build() -> Result:
        with torch.device("meta"):
            return make()

    return attempt(build, where, must)


def attempt(make: Callable[[], Result], where: str, must: str) -> Result:
    """Return the result of `make`; turn an exception into a ModelError of one line, with its cause."""
    try:
        return make()
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(where, must, got=cause(error)) from error


def cause(error: BaseException) -> str:
    """Describe an exception in one line: its class and its message."""
    message = " ".join(str(error).split())
    if len(message) > CAUSE_SHOWN:
        message = message[:CAUSE_SHOWN] + " ..."
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


@dataclass(slots=True, eq=False)
class _TiedParameters:
    parameters: list[nn.Parameter]
    names: list[str]


def from_module(module: nn.Module, source: str = "") -> ModelSpec:
    """Describe a module. Titles name it `source`; without a source they name its class."""
    import torch
    from torch.nn.parameter import is_lazy

    problems = Problems()
    by_parameter: dict[int, _TiedParameters] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), _TiedParameters([parameter], [])).names.append(name)
    groups = list(by_parameter.values())
    buffers = list(module.named_buffers())
    tensors = [*((group.names[0], group.parameters[0]) for group in groups), *buffers]
    for name, tensor in tensors:
        if is_lazy(tensor):
            do = "Run one batch through the lazy module first, or write its sizes."
            problems.add(name, "must have a shape", got="an uninitialized parameter or buffer", do=do)
        elif tensor.is_inference():
            got, do = "one that was made in `torch.inference_mode`", "Build the model outside of it."
            problems.add(name, "must be a tensor that can be trained or written", got=got, do=do)
        elif tensor.layout is not torch.strided:
            do = "Call `to_dense`, or register its indices and values."
            problems.add(name, "must be a dense parameter or buffer", got=tensor.layout, do=do)
    _check_plain(tensors, problems)
    problems.raise_as(ModelError)
    _merge_declared_ties(module, groups, problems)
    _check_memory(module, groups, problems)
    dtypes: dict[str, DType] = {}
    unknown: dict[str, list[str]] = {}
    for name, tensor in tensors:
        if known := from_torch(tensor.dtype):
            dtypes[name] = known
        else:
            unknown.setdefault(str(tensor.dtype), []).append(name)
    for kind, names in unknown.items():
        must, got = "must have a dtype that zerodrift knows", f"{kind} in {listed(names)}"
        do = "Load the model unquantized: zerodrift trains fp32, bf16 and fp16."
        problems.add(names[0], must, got=got, do=do)
    problems.raise_as(ModelError)

    modules = dict(module.named_modules(remove_duplicate=False))
    classes = {path: f"{type(part).__module__}.{type(part).__qualname__}" for path, part in modules.items()}
    first = {id(part): path for path, part in reversed(modules.items())}
    experts_at = functools.cache(functools.partial(_count_experts, modules))
    parameters = []
    for group in groups:
        paths = [name.rpartition(".")[0] for name in group.names]
        owners = tuple(OwningModule(path, classes[path]) for path in paths)
        held: Any = group.parameters[0]
        shape = tuple(held.to_local().shape if is_dtensor(held) else held.shape)
        trained = any(parameter.requires_grad for parameter in group.parameters)
        name = group.names[0]
        counts = _used_experts(name, shape, experts_at)
        parameters.append(ParameterSpec(tuple(group.names), shape, dtypes[name], owners, trained, counts))
    return ModelSpec(
        source=source or type(module).__qualname__,
        parameters=tuple(parameters),
        buffers=tuple(BufferSpec(name, tuple(buffer.shape), dtypes[name]) for name, buffer in buffers),
        containers=frozenset(path for path, part in modules.items() if path and not has_forward(part)),
        shared=tuple((path, first[id(part)]) for path, part in modules.items() if path != first[id(part)]),
    )


QUANTISED = {"Params4bit": "nf4", "Int8Params": "int8"}
"""Classes of bitsandbytes' parameters -> the storage that replaces them here."""


def _check_plain(tensors: Iterable[tuple[str, torch.Tensor]], problems: Problems) -> None:
    """Refuse parameters that bitsandbytes has quantised, since they cannot be sharded."""
    found: dict[str, list[str]] = {}
    for name, tensor in tensors:
        if type(tensor).__name__ in QUANTISED:
            found.setdefault(type(tensor).__name__, []).append(name)
    for kind, names in found.items():
        do = "Load the model without a `quantization_config` (`load_in_4bit`, `bnb_4bit_...`), and set "
        do += f"`precision.frozen: {QUANTISED[kind]}`."
        got = f"{kind} of bitsandbytes in {listed(names)}"
        problems.add(names[0], "must be a plain tensor, to be sharded and quantised here", got=got, do=do)


def has_forward(module: nn.Module) -> bool:
    """Return False for a container such as `ModuleList`: no code calls it, so its hooks never run."""
    from torch import nn

    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k")
"""Attributes that count the experts a token uses. `top_k` of a config may belong to sampling instead."""


def _used_experts(
    name: str, shape: tuple[int, ...], experts_at: Callable[[str], tuple[int, int]]
) -> tuple[int, int]:
    """Return (experts that a token uses, all experts) of an expert parameter; (1, 1) for any other one."""
    before, marker, after = name.rpartition("experts.")
    if not marker or not (before == "" or before.endswith(".")):
        return 1, 1
    chosen, modules = experts_at(f"{before}experts")
    count = modules if after.partition(".")[0].isdecimal() else (*shape, 0)[0]
    return (chosen, count) if 0 < chosen < count else (1, 1)


def _count_experts(modules: Mapping[str, nn.Module], path: str) -> tuple[int, int]:
    """Return (experts that a token uses, child modules) of a module of experts. The first number is from the
    nearest module or config that has it; 0 if none has."""
    children = len(list(modules[path].children()))
    while True:
        beside = [modules[path], *modules[path].children()]
        places: list[tuple[Any, str]] = [(module, key) for module in beside for key in _CHOSEN]
        places += [(getattr(module, "config", None), key) for module in beside for key in _CHOSEN[:3]]
        for value in (getattr(place, key, None) for place, key in places):
            if type(value) is int:
                return value, children
        if not path:
            return 0, children
        path = path.rpartition(".")[0]


def _merge_declared_ties(module: nn.Module, groups: list[_TiedParameters], problems: Problems) -> None:
    """Join meta parameters that their model declares tied and has not tied yet.

    A model on the meta device may tie parameters only when weights are loaded. For parameters with memory,
    the objects decide, and the declaration is ignored.
    """
    owner = {name: group for group in groups for name in group.names}
    position = {name: number for number, name in enumerate(owner)}
    ties: list[tuple[str, str]] = []
    for path, part in module.named_modules(remove_duplicate=False):
        declared = getattr(part, "all_tied_weights_keys", None)  # of models of `transformers` 5
        if isinstance(declared, Mapping):
            prefix = f"{path}." if path else ""
            ties += ((prefix + target, prefix + origin) for target, origin in declared.items())
    for target, origin in ties:
        one, other = owner.get(target), owner.get(origin)
        if one is None or other is None or one is other:
            continue
        a, b = one.parameters[0], other.parameters[0]
        if not (a.is_meta and b.is_meta):
            continue
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            got = f"{tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
            problems.add(target, f"must be like `{origin}`, which the model declares it tied to", got=got)
            continue
        kept, gone = sorted((one, other), key=lambda group: position[group.names[0]])
        kept.parameters += gone.parameters
        kept.names = sorted(kept.names + gone.names, key=position.__getitem__)
        owner |= dict.fromkeys(gone.names, kept)
        groups.remove(gone)


def _check_memory(module: nn.Module, groups: list[_TiedParameters], problems: Problems) -> None:
    """Refuse two Parameters over one memory, which would be updated separately although they look tied. Also
    refuse a buffer over the memory of a trained Parameter, which would not be updated.

    `load_state_dict(assign=True)` makes such pairs from tied parameters. Tensor subclasses are not checked,
    since they may have no memory.
    """
    import torch

    seen: dict[tuple[Any, int], str] = {}
    for group in groups:
        parameter, name = group.parameters[0], group.names[0]
        if type(parameter.data) is not torch.Tensor or parameter.is_meta or not parameter.numel():
            continue
        first = seen.setdefault((parameter.device, parameter.data_ptr()), name)
        if first != name:
            must = f"must be the same Parameter as `{first}`, or have its own memory"
            todo = "Assign the one Parameter to both modules."
            problems.add(name, must, got="two Parameters over one memory", do=todo)
    trained = {group.names[0] for group in groups if group.parameters[0].requires_grad}
    for name, buffer in module.named_buffers():
        has_memory = type(buffer) is torch.Tensor and not buffer.is_meta and buffer.numel()
        first = seen.get((buffer.device, buffer.data_ptr()), "") if has_memory else ""
        if first in trained:
            must, todo = "must have its own memory", "Register a clone, or use the Parameter itself."
            problems.add(name, must, got=f"a buffer over the memory of `{first}`", do=todo)


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of buffers that are not in the state dict."""
    return {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules(remove_duplicate=False)
        # Private; the one public way, comparing with `state_dict()`, runs hooks that may rename or gather.
        # Tested with torch 2.13 to 2.15.
        for name in part._non_persistent_buffers_set
    }


LAYOUT = (
    'Use `init_device_mesh(device, (data, tensor), mesh_dim_names=("dp", "tp"))["tp"]`, whose ranks are '
    "neighbours."
)


def is_dtensor(tensor: object) -> bool:
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def ranks(module: nn.Module) -> int:
    """Return the number of ranks that share each DTensor of a model; 1 for a model without DTensors."""
    problems = Problems()
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        tensor: Any = parameter
        if not is_dtensor(tensor):
            continue
        mesh = tensor.device_mesh
        must = got = ""
        if mesh.ndim != 1 or not mesh.mesh_dim_names:
            must, got = "must be a DTensor over a mesh of one named dimension", f"one over {mesh}"
            do = LAYOUT
        elif type(placement := tensor.placements[0]).__name__ not in ("Replicate", "Shard"):
            must, got = "must be divided or whole on each rank", f"a DTensor that is {placement}"
            do = "Call `parallelize_module` before `initialize`, and leave `fully_shard` to it."
        elif not placement.is_replicate() and tensor.shape[placement.dim] % mesh.size():
            must = f"must be divided evenly over {mesh.size()} ranks"
            got = f"{tensor.shape[placement.dim]} along dimension {placement.dim}"
            do = "Pad it, or leave it whole."
        if must:
            problems.add(name, must, got=got, do=do)
        else:
            first.setdefault(mesh.size(), name)
    if len(first) > 1:
        listed = " and ".join(f"{size} ranks for `{name}`" for size, name in first.items())
        problems.add("model", "must have all its DTensors on one mesh", got=listed, do=LAYOUT)
    problems.raise_as(ModelError)
    return next(iter(first), 1)
