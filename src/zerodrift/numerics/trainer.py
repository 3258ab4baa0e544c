"""The trainer's side: a model with the values that were trained, and the policy of its forward.

The policy comes from a config, ours or DeepSpeed's, from a plan that `plan --json` wrote, or from a table
that `check --save` wrote of a run of any library: that one is read as the config that asks for what was seen.

Invariant: values are those of the files, exactly, and nothing is trained here: parameters are frozen.
"""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerodrift.config.load import load
from zerodrift.dtypes import DType, from_torch
from zerodrift.errors import ConfigError, ModelError, NonFiniteError, listed, said
from zerodrift.inspect.check import table as tables
from zerodrift.inspect.trace.records import Column, ModelRecord, ParameterRecord
from zerodrift.mesh import MeshShape
from zerodrift.model.factory import is_factory, make
from zerodrift.model.runnable import runnable
from zerodrift.model.safetensors import holds
from zerodrift.model.sources import describe
from zerodrift.model.spec import ModelSpec
from zerodrift.numerics.roles import Role, role_of, roles
from zerodrift.numerics.variants import literal, without_update
from zerodrift.plan.build import build
from zerodrift.plan.table import Plan
from zerodrift.policy.nouns import Policy
from zerodrift.policy.numbers import AutoValues
from zerodrift.policy.resolve import mesh_for, resolve
from zerodrift.weights.convert import open_source


@dataclass(frozen=True, slots=True)
class Trainer:
    """A model as it is trained."""

    module: nn.Module
    """With its values in the dtypes that the files have them in, all of it frozen."""
    plan: Plan
    """Of its forward."""
    spec: ModelSpec
    roles: Mapping[str, Role]

    @property
    def vocabulary(self) -> int:
        """Rows of the table of embeddings; 0 where there is none."""
        tables_ = [module for module in self.module.modules() if isinstance(module, nn.Embedding)]
        return max((table.num_embeddings for table in tables_), default=0)

    @property
    def head(self) -> str:
        """The module that makes logits; empty where none is known."""
        for parameter in self.spec.parameters:
            for name, owner in zip(parameter.names, parameter.owners, strict=True):
                if role_of(name, owner) == "head":
                    return owner.path
        return ""


def trainer(
    config: str | os.PathLike[str] | Mapping[str, Any],
    model: str | nn.Module,
    weights: str | os.PathLike[str] | None = None,
    auto: AutoValues | None = None,
    overrides: Sequence[str] = (),
) -> Trainer:
    """`model` is a folder or file with a config, `package.module:function`, or a module with its values; that
    one stays as it is. Nothing is dropped out: a sampler drops nothing."""
    module = _with_values(model, weights).eval()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    spec = describe(module)
    policy = without_update(_policy(config, auto, overrides))
    return Trainer(module, build(policy, spec, MeshShape()), spec, roles(spec))


# --- values -------------------------------------------------------------------------------------------


def _with_values(model: str | nn.Module, weights: str | os.PathLike[str] | None) -> nn.Module:
    if isinstance(model, nn.Module):
        module, text = copy.deepcopy(model), ""
    else:
        text = str(model)
        if weights is None and is_factory(text) and not Path(text).exists():
            module = make(text).train()
        else:
            module = runnable(text)
    if weights is None and text and Path(text).is_dir() and holds(Path(text)):
        weights = text
    if weights is not None:
        _fill(module, Path(weights))
    bare = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if bare:
        raise ModelError(
            "--weights",
            "must be given where the model has no values of its own",
            got=f"none for {listed(bare[:3])}",
            do="Give the checkpoint or the folder that the trainer wrote.",
        )
    _require_finite(module)
    return module


def _fill(module: nn.Module, path: Path) -> None:
    source = open_source(path.expanduser(), module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    entries = {name: entry for entry in source.entries for name in entry.names}
    names = [parameter.names for parameter in describe(module).parameters]
    lacking = [name[0] for name in names if not set(name) & entries.keys()]
    if lacking:
        must = "must have a value for every parameter of the model"
        raise ModelError(path, must, got=f"none for {listed(lacking[:3])}")
    for tied in names:
        entry = entries[next(name for name in tied if name in entries)]
        if entry.shape != tuple(parameters[tied[0]].shape):
            must = f"must have shape {list(parameters[tied[0]].shape)}"
            raise ModelError(tied[0], must, got=f"{list(entry.shape)} in {path}")
        flat: Tensor | None = None
        for start, run in source.weight(entry):
            if flat is None:
                flat = torch.empty(parameters[tied[0]].numel(), dtype=run.dtype)
            flat[start : start + run.numel()] = run.reshape(-1)
        if flat is None:
            flat = torch.empty(0, dtype=parameters[tied[0]].dtype)
        parameter = nn.Parameter(flat.view(entry.shape), requires_grad=False)
        for name in tied:
            put(module, name, parameter)
    buffers = dict(module.named_buffers())
    for name, values in source.buffers.items():
        if name in buffers:
            buffers[name].copy_(values)


def put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """A parameter in the place of another."""
    path, _, attribute = name.rpartition(".")
    module.get_submodule(path)._parameters[attribute] = parameter


def _require_finite(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name.rpartition(".")[2] == "attn_mask" or not tensor.is_floating_point():
            continue
        if isinstance(tensor, nn.Parameter) and not bool(tensor.isfinite().all()):
            count = int((~tensor.isfinite()).sum())
            raise NonFiniteError(name, "must be finite on the trainer's side", got=f"{count:,} inf or nan")


# --- the policy ---------------------------------------------------------------------------------------


def _policy(
    config: str | os.PathLike[str] | Mapping[str, Any], auto: AutoValues | None, overrides: Sequence[str]
) -> Policy:
    data = None if isinstance(config, Mapping) else _json(Path(config))
    if tables.is_table(data) and not isinstance(config, Mapping):
        return _resolved(as_config(_trained(Path(config))), auto, overrides)
    if isinstance(data, dict) and {"rows", "segments", "digest"} <= data.keys():
        try:
            return Plan.from_json(data).policy
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ConfigError(
                str(config), "must be a plan that `plan --json` wrote", got=said(error)
            ) from None
    return _resolved(config, auto, overrides)


def _resolved(config: Any, auto: AutoValues | None, overrides: Sequence[str]) -> Policy:
    loaded = load(config, overrides)
    return resolve(loaded, mesh_for(loaded, 1), auto)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None  # the reader of configs says what is wrong with it


def _trained(path: Path) -> ModelRecord:
    models = [model for model in tables.read(path)[0].models if model.trained]
    if len(models) != 1:
        names = listed(model.name for model in models) or "none"
        raise ConfigError(path, "must be a table of a run that trains one model", got=names)
    return models[0]


def as_config(model: ModelRecord) -> dict[str, Any]:
    """What of a forward was seen, as the config that asks for it."""
    cells = {name: cell for p in model.parameters for name in (p.name, *p.also) if (cell := _forward(p))}
    if not cells:
        raise ConfigError(model.name, "must have parameters whose compute dtype was seen", got="none")
    sizes: Counter[tuple[DType, DType]] = Counter()
    for parameter in model.parameters:
        if parameter.name in cells:
            sizes[cells[parameter.name]] += parameter.numel
    storage, compute = sizes.most_common(1)[0][0]
    autocast = storage is DType.FP32 and compute is not DType.FP32
    mode = f"autocast-{compute}" if autocast else str(compute)
    rules = [
        {"match": literal(name), "storage": str(rests), "compute": str(computes)}
        for name, (rests, computes) in cells.items()
        if (rests, computes) != (storage, compute) and not autocast
    ]
    return {"precision": {"mode": mode, **({"rules": rules} if rules else {})}}


def _forward(parameter: ParameterRecord) -> tuple[DType, DType] | None:
    """What it rests and computes in, by the first sightings."""
    rests, computes = _first(parameter, "storage"), _first(parameter, "compute")
    return (rests, computes) if rests is not None and computes is not None else None


def _first(parameter: ParameterRecord, column: Column) -> DType | None:
    dtype = getattr(torch, (parameter.dtypes(column) or ("",))[0], None)
    return from_torch(dtype) if isinstance(dtype, torch.dtype) else None
