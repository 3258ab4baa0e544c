"""Functions of the library that `zerodrift` exports.

Invariant: they only compose other rooms and decide nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from zerodrift import versions
from zerodrift.config import ConfigSource, load, without_block
from zerodrift.dtypes import DType
from zerodrift.errors import ModelError, UnsupportedError, kind_of
from zerodrift.model import ModelSpec, describe
from zerodrift.model import ranks as ranks_of
from zerodrift.plan import Plan, build
from zerodrift.policy import AutoValues, Policy, mesh_for, resolve

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zerodrift.comm import Mesh
    from zerodrift.engine import Engine, ValueSources
    from zerodrift.pipeline import Parts

FROM_BLOCK = "_zerodrift_from_block"
"""An attribute of an optimizer that the drop-in has made from the config's block, over parameter groups."""


def make_plan(
    config: ConfigSource,
    model: str | os.PathLike[str] | ModelSpec | nn.Module,
    world_size: int = 1,
    auto: AutoValues | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """Plan `model` under `config` on `world_size` ranks. Nothing is allocated and nothing is started.

    `config` is a YAML or JSON file, a dict or a `Config`. `model` is a module (the meta device will do), a
    `transformers` config or folder, safetensors files, or `package.module:function`. `auto` has the numbers
    for keys that the config sets to "auto", and `overrides` are texts such as `bf16.enabled=true`.
    """
    loaded = load(config, overrides)
    mesh = mesh_for(loaded, world_size)
    spec = describe(model)
    versions.warn()  # after the library that reads the model is imported
    return build(resolve(loaded, mesh, auto), spec, mesh)


def empty(policy: Policy | None = None) -> AbstractContextManager[None]:
    """Return a context in which modules are built without memory for their parameters.

    Buffers are computed as usual. `initialize` then gives each rank memory for its own slices and fills them
    from `weights`, or with the values that the modules would have set, which are the same bits on any number
    of ranks. With a `policy` whose masters are fp32, narrower floating parameters are declared in fp32, so
    that initial values are drawn in fp32 and rounded once.
    """
    from zerodrift.model import empty as build

    same = policy is not None and ("master", "same") in [demand[:2] for demand in policy.demands]
    return build(DType.FP32.torch if policy is not None and not same else None)


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: ConfigSource | None = None,
    *,
    parts: Parts | None = None,
    weights: str | os.PathLike[str] | None = None,
    strict: bool | Sequence[str] = True,
    schedule: Any = None,
    elementwise: bool | None = None,
    device: str | torch.device | None = None,
    auto: AutoValues | None = None,
    overrides: Sequence[str] = (),
    quiet: bool = False,
) -> Engine:
    """Make an engine that trains `model` as `config` says, and print the plan on rank 0 unless `quiet`.

    The engine joins the ranks of torchrun or of a running torch.distributed; otherwise it has one rank.
    `optimizer` is built over `model.parameters()` as usual; without one, the config's `optimizer` block is
    used. `schedule` is a torch scheduler, or a function that makes one from an optimizer, in place of the
    config's `scheduler` block. `elementwise` declares how an optimizer that zerodrift does not know updates:
    True if an element's update depends on that element alone, so that it can step shards; False if it steps
    every tensor separately and needs it whole.

    `weights` is a folder of a `transformers` model, a `.safetensors` file or an index. Every rank reads its
    own slices. Missing and unexpected names are an error unless `strict` is False or has a glob for them. A
    model built inside `empty()` takes no memory before this call.

    If the config's `pipeline` block has several stages, the model is cut over ranks. Each rank builds the
    whole model, preferably inside `empty()`. A causal language model of `transformers` can be cut as it is;
    other modules with a list of layers need `parts`. `engine.train_batch` trains with or without a pipeline.
    """
    from zerodrift.comm import Collectives, start
    from zerodrift.optim import declare
    from zerodrift.weights import initial_values, open_weights

    _require_instances(model, optimizer)
    loaded = load(config, overrides)
    for name, given in (("optimizer", optimizer), ("scheduler", schedule)):
        if given is not None and not hasattr(given, FROM_BLOCK):
            loaded = without_block(loaded, name, "one was passed to `initialize`, which is used")
    if optimizer is not None:
        declare(
            optimizer, loaded.zero_allow_untested_optimizer or None if elementwise is None else elementwise
        )
    tensor = ranks_of(model)
    if loaded.pipeline is not None and loaded.pipeline.stages > 1:
        _require_cuttable(tensor, optimizer)
    mesh = start(lambda world: mesh_for(loaded, world, tensor), device)
    try:
        if mesh.rank() == 0:
            versions.warn()
        shown = mesh.rank() == 0 and not quiet
        comm = Collectives(mesh)
        spec, files = open_weights(model, weights, strict, comm, shown)
        plan = build(resolve(loaded, mesh.shape, auto), spec, mesh.shape)
        if shown:
            print_plan(plan)
        sources = initial_values(plan, model, files, comm)
        engine = _engine(plan, model, mesh, optimizer, schedule, sources, parts)
        done = None if files is None else files.finish(model, comm)
        if shown and done is not None:
            print(done)
        return engine
    except BaseException:
        mesh.stop()
        raise


def _require_instances(model: object, optimizer: object) -> None:
    """Refuse a class, a function or None in the place of a model or an optimizer, and a context in which
    nothing can be trained."""
    import torch
    from torch import nn

    if torch.is_inference_mode_enabled():
        raise UnsupportedError("initialize", "must be called outside of `torch.inference_mode`")
    if not isinstance(model, nn.Module):
        do = "Pass an instance: `model = Model(...)`."
        raise ModelError("model", "must be a torch.nn.Module", got=kind_of(model), do=do)
    if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "param_groups")):
        must, do = "must be a torch.optim.Optimizer", "Build it over `model.parameters()`."
        raise UnsupportedError("optimizer", must, got=kind_of(optimizer), do=do)


def _require_cuttable(tensor_ranks: int, optimizer: torch.optim.Optimizer | None) -> None:
    if tensor_ranks > 1:
        must = "must not be spread over ranks layer by layer in a pipeline"
        got = f"tensor parallelism over {tensor_ranks} ranks"
        do = "Use one of the two."
        raise UnsupportedError("model", must, got=got, do=do)
    if optimizer is not None:
        must = "must be a block of the config with a pipeline, whose ranks each build their part of it"
        got = f"a {type(optimizer).__name__}"
        do = "Write `optimizer: {type: AdamW, params: {...}}`."
        raise UnsupportedError("optimizer", must, got=got, do=do)


def _engine(
    plan: Plan,
    model: nn.Module,
    mesh: Mesh,
    optimizer: torch.optim.Optimizer | None,
    schedule: Any,
    sources: ValueSources,
    parts: Parts | None,
) -> Engine:
    """Build the engine for the backend of a plan."""
    from zerodrift.engine import Engine

    if plan.policy.pipeline is not None:
        from zerodrift.pipeline import pipeline_engine

        return pipeline_engine(plan, model, mesh, sources, parts, schedule)
    if plan.policy.backend == "fsdp2":
        from zerodrift.backends import FullyShardExecutor

        execute: Any = FullyShardExecutor
    else:
        from zerodrift.engine import NativeExecutor

        execute = NativeExecutor
    loss_of = None if parts is None else parts.whole
    return Engine(plan, mesh, lambda comm: execute(plan, model, comm, optimizer, sources), schedule, loss_of)


def print_plan(plan: Plan, briefly_for: str = "") -> None:
    """Print a plan, or only the lines that the run of a verb needs."""
    from zerodrift.pipeline import timeline
    from zerodrift.plan import cost
    from zerodrift.report import brief_text, group_rows, plan_text, report_width

    bill, rows = cost(plan), group_rows(plan)
    look: Any = {"color": sys.stdout.isatty(), "width": report_width()}
    if briefly_for:
        print(brief_text(plan, bill, rows, briefly_for, **look))
    else:
        print(plan_text(plan, bill, rows, timeline(plan), **look))
