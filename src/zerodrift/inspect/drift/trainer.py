"""The trainer's side: a model with its trained values, and the policy of its forward.

The policy comes from a config of zerodrift or DeepSpeed, from a plan of `plan --json`, or from a table of
`check --save`, which is converted to a config with the recorded dtypes.

Invariant: values are exactly those of the files, and all parameters are frozen.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerodrift.config import load, without_torch_classes
from zerodrift.dtypes import DType, from_torch
from zerodrift.errors import ConfigError, ModelError, NonFiniteError, listed
from zerodrift.inspect.audit import literal_glob, without_update
from zerodrift.inspect.check import table as tables
from zerodrift.inspect.drift.sampler import Role, role_of, roles_of
from zerodrift.inspect.trace import Column, ModelRecord, ParameterRecord
from zerodrift.mesh import MeshShape
from zerodrift.model import ModelSpec, build_runnable, describe, holds, is_factory, make
from zerodrift.plan import Plan, build
from zerodrift.policy import AutoValues, Policy, mesh_for, resolve
from zerodrift.weights import fill_module


@dataclass(frozen=True, slots=True)
class TrainerSide:
    module: nn.Module  # the frozen model, with its values in the dtypes of the files
    plan: Plan  # plan of its forward
    spec: ModelSpec
    roles: Mapping[str, Role]

    @property
    def vocabulary(self) -> int:
        """Most rows of an embedding, or 0 without embeddings."""
        embeddings = [module for module in self.module.modules() if isinstance(module, nn.Embedding)]
        return max((each.num_embeddings for each in embeddings), default=0)

    @property
    def head(self) -> str:
        """Path of the module that makes logits, or `""` if it is not known."""
        for parameter in self.spec.parameters:
            for name, owner in zip(parameter.names, parameter.owners, strict=True):
                if role_of(name, owner) == "head":
                    return owner.path
        return ""

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers under all their names. Floating ones are in fp32."""
        module = self.module
        parameters, buffers = module.named_parameters, module.named_buffers
        named = (*parameters(remove_duplicate=False), *buffers(remove_duplicate=False))
        return {n: t.detach().float() if t.is_floating_point() else t.detach() for n, t in named}


def load_trainer(
    config: str | os.PathLike[str] | Mapping[str, Any],
    model: str | nn.Module,
    weights: str | os.PathLike[str] | None = None,
    auto: AutoValues | None = None,
    overrides: Sequence[str] = (),
) -> TrainerSide:
    """Load a model from a folder or file with a config or from `package.module:function`, or copy a module.
    Dropout is off, as in a sampler."""
    module = _load_model(model, weights).eval().requires_grad_(False)
    spec = describe(module)
    policy = without_update(_load_policy(config, auto, overrides))
    return TrainerSide(module, build(policy, spec, MeshShape()), spec, roles_of(spec))


def _load_model(model: str | nn.Module, weights: str | os.PathLike[str] | None) -> nn.Module:
    if isinstance(model, nn.Module):
        module = copy.deepcopy(model)
    else:
        factory = weights is None and is_factory(model) and not Path(model).exists()
        module = make(model).train() if factory else build_runnable(model)
        if weights is None and Path(model).is_dir() and holds(Path(model)):
            weights = model
    if weights is not None:
        fill_module(module, Path(weights))
    bare = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if bare:
        must = "must be given if the model has no values"
        do = "Give the checkpoint or the folder that the trainer wrote."
        raise ModelError("--weights", must, got=f"none for {listed(bare[:3])}", do=do)
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            count = int((~parameter.isfinite()).sum())
            raise NonFiniteError(name, "must be finite on the trainer's side", got=f"{count:,} inf or nan")
    return module


def _load_policy(
    config: str | os.PathLike[str] | Mapping[str, Any], auto: AutoValues | None, overrides: Sequence[str]
) -> Policy:
    source: Any = config
    if not isinstance(config, Mapping):
        declaration = tables.read_declaration(Path(config))
        if isinstance(declaration, Plan):
            return declaration.policy
        if declaration is not None:
            models = [model for model in declaration[0].models if model.trained]
            if len(models) != 1:
                names = listed(model.name for model in models) or "none"
                raise ConfigError(str(config), "must be a table of a run that trains one model", got=names)
            source = config_from_table(models[0])
    loaded = without_torch_classes(load(source, overrides))
    return resolve(loaded, mesh_for(loaded, 1), auto)


def config_from_table(model: ModelRecord) -> dict[str, Any]:
    """Make a config with the recorded storage and compute dtypes."""
    cells: dict[str, tuple[DType, DType]] = {}
    sizes: Counter[tuple[DType, DType]] = Counter()
    for parameter in model.parameters:
        storage, compute = _first(parameter, "storage"), _first(parameter, "compute")
        if storage is not None and compute is not None:
            cells |= dict.fromkeys((parameter.name, *parameter.also), (storage, compute))
            sizes[storage, compute] += parameter.numel
    if not cells:
        raise ConfigError(model.name, "must have parameters whose compute dtype was seen", got="none")
    usual = storage, compute = sizes.most_common(1)[0][0]
    if storage is DType.FP32 and compute is not DType.FP32:
        return {"precision": {"mode": f"autocast-{compute}"}}
    rules = [
        {"match": literal_glob(name), "storage": str(storage), "compute": str(compute)}
        for name, (storage, compute) in cells.items()
        if (storage, compute) != usual
    ]
    return {"precision": {"mode": str(usual[1]), **({"rules": rules} if rules else {})}}


def _first(parameter: ParameterRecord, column: Column) -> DType | None:
    dtype = getattr(torch, (parameter.dtypes(column) or ("",))[0], None)
    return from_torch(dtype) if isinstance(dtype, torch.dtype) else None
