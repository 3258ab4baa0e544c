"""What a user of the library calls: thin compositions of the rooms, exported by `zerodrift`.

Invariant: nothing is decided here.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from zerodrift import versions
from zerodrift.config.load import load
from zerodrift.config.schema import Config
from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, UnsupportedError
from zerodrift.model.dtensors import ranks as ranks_of
from zerodrift.model.sources import describe
from zerodrift.model.spec import ModelSpec
from zerodrift.plan.build import build
from zerodrift.plan.table import Plan
from zerodrift.policy.nouns import Policy
from zerodrift.policy.numbers import AutoValues
from zerodrift.policy.resolve import mesh_for, resolve

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zerodrift.engine.engine import Engine
    from zerodrift.io.initial import InitialValues
    from zerodrift.io.safetensors.export import Exported
    from zerodrift.io.safetensors.weights import LoadedWeights
    from zerodrift.pipeline.cut import Parts
    from zerodrift.pipeline.run import PipelineEngine
    from zerodrift.plan.timeline import Timeline


def make_plan(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    model: str | os.PathLike[str] | ModelSpec | nn.Module,
    world_size: int = 1,
    auto: AutoValues | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """The plan of `model` under `config` on `world_size` ranks; nothing is allocated, nothing is started.

    `config` is a YAML or JSON file or a dict, `model` a module (the meta device will do), a
    `transformers` config or folder, safetensors files, or `package.module:function`. `auto` gives the
    numbers that stand in for numeric "auto" values, `overrides` are `key=value` texts.
    """
    loaded = load(config, overrides)
    mesh = mesh_for(loaded, world_size)
    spec = describe(model)
    versions.warn()  # when whatever reads the model has been imported
    return build(resolve(loaded, mesh, auto), spec, mesh)


def empty(policy: Policy | None = None) -> AbstractContextManager[None]:
    """A context in which modules are built without memory for their parameters.

    Buffers are computed as ever. `initialize` gives the parameters memory, each rank its own slices, and
    fills them from `weights` or with what their modules would have set, the same bits on every number of
    ranks. With a `policy` whose masters are fp32, narrower floating parameters are declared in fp32, so that
    first values are drawn in it and rounded once.
    """
    from zerodrift.model.empty import empty as build

    same = policy is not None and ("master", "same") in [demand[:2] for demand in policy.demands]
    return build(DType.FP32.torch if policy is not None and not same else None)


def load_weights(
    engine: Engine | PipelineEngine,
    path: str | os.PathLike[str],
    strict: bool | Sequence[str] = True,
    *,
    quiet: bool = False,
) -> LoadedWeights:
    """Replace the weights of an engine by those of safetensors files; moments and step stay. A call of all
    ranks."""
    from zerodrift.io.safetensors.reload import load_weights as replace

    return replace(_own(engine), path, strict, quiet=quiet)


def export(
    engine: Engine | PipelineEngine,
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> Exported:
    """Write the model of an engine as a folder that `transformers` loads, in the dtypes of the `export`
    column; every rank calls it and writes its own slices, of a pipeline those of its own pieces. `dtype`
    replaces them, but for pinned parameters."""
    from zerodrift.io.safetensors.export import export as write

    return write(_own(engine), folder, dtype=dtype, max_shard_size=max_shard_size, overwrite=overwrite)


def save_16bit(
    engine: Engine | PipelineEngine, folder: str | os.PathLike[str], *, overwrite: bool = False
) -> Exported:
    """The same as one file in 16 bits; pinned parameters stay fp32."""
    from zerodrift.io.safetensors.export import save_16bit as write

    return write(_own(engine), folder, overwrite=overwrite)


def _own(engine: Engine | PipelineEngine) -> Engine:
    """The engine over what this rank holds."""
    from zerodrift.pipeline.run import PipelineEngine

    return engine.stage if isinstance(engine, PipelineEngine) else engine


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | Config = "zerodrift.yaml",
    *,
    weights: str | os.PathLike[str] | None = None,
    strict: bool | Sequence[str] = True,
    schedule: Any = None,
    device: str | torch.device | None = None,
    auto: AutoValues | None = None,
    overrides: Sequence[str] = (),
    quiet: bool = False,
) -> Engine:
    """An engine that trains `model` as `config` says; prints the plan on rank 0 unless `quiet`.

    Joins the ranks that torchrun started, or those of a running torch.distributed, or is alone. `optimizer`
    is built over `model.parameters()` as usual, or comes from the config's `optimizer` block. `schedule` is
    a torch scheduler, or a function that makes one from an optimizer.

    `weights` is a folder of a `transformers` model, a `.safetensors` file or an index: every rank reads its
    own slices. Names that the files lack or have too many of are an error unless `strict` is False or has a
    glob for them. A model built inside `empty()` needs no memory of its own before.
    """
    from zerodrift.comm.collectives import Collectives
    from zerodrift.comm.mesh import start
    from zerodrift.engine.engine import Engine
    from zerodrift.io.initial import InitialValues

    loaded = load(config, overrides)
    if loaded.pipeline is not None and loaded.pipeline.stages > 1:
        raise UnsupportedError(
            "pipeline.stages",
            "must be 1 for `initialize`",
            got=loaded.pipeline.stages,
            do=(
                "Call `zerodrift.initialize_pipeline`, whose engine takes the micro-batches of a step "
                "together."
            ),
        )
    tensor = ranks_of(model)
    mesh = start(lambda world: mesh_for(loaded, world, tensor), device)
    try:
        if mesh.rank() == 0:
            versions.warn()
        first = InitialValues.begin(model, weights, strict, Collectives(mesh))
        plan = build(resolve(loaded, mesh.shape, auto), first.spec, mesh.shape)
        if plan.policy.backend == "fsdp2":
            from zerodrift.backends.fsdp2 import FsdpEngine

            make: Callable[..., Any] = FsdpEngine
        else:
            make = Engine
        with _told(first, plan, shown=mesh.rank() == 0 and not quiet):
            return make(plan, model, mesh, optimizer, schedule, first.sources(plan))
    except BaseException:
        mesh.stop()
        raise


def initialize_pipeline(
    model: nn.Module,
    config: str | os.PathLike[str] | Mapping[str, Any] | Config = "zerodrift.yaml",
    *,
    parts: Parts | None = None,
    weights: str | os.PathLike[str] | None = None,
    strict: bool | Sequence[str] = True,
    schedule: Any = None,
    device: str | torch.device | None = None,
    auto: AutoValues | None = None,
    quiet: bool = False,
) -> PipelineEngine:
    """An engine that trains `model` cut over ranks as the config's `pipeline` block says.

    `model` is a causal language model of `transformers`, or any module with a list of layers, which `parts`
    names. Every rank builds all of it; built inside `empty()` it takes no memory, and each rank fills its own
    pieces. The rest is as in `initialize`; the optimizer is the config's.
    """
    from zerodrift.comm.collectives import Collectives
    from zerodrift.comm.mesh import start
    from zerodrift.io.initial import InitialValues
    from zerodrift.pipeline.make import pipeline_engine
    from zerodrift.pipeline.schedules import timeline

    loaded = load(config)
    if ranks_of(model) > 1:
        raise UnsupportedError(
            "model",
            "must not be spread over ranks layer by layer in a pipeline",
            got=f"tensor parallelism over {ranks_of(model)} ranks",
            do="Use one of the two.",
        )
    mesh = start(lambda world: mesh_for(loaded, world), device)
    try:
        if mesh.rank() == 0:
            versions.warn()
        first = InitialValues.begin(model, weights, strict, Collectives(mesh))
        plan = build(resolve(loaded, mesh.shape, auto), first.spec, mesh.shape)
        if plan.policy.pipeline is None:
            raise ConfigError(
                "pipeline.stages",
                "must be above 1 for `initialize_pipeline`",
                got="none",
                do="Write `pipeline: {stages: 2}`, or call `zerodrift.initialize`.",
            )
        with _told(first, plan, timeline(plan), shown=mesh.rank() == 0 and not quiet):
            return pipeline_engine(plan, model, mesh, first.sources(plan), parts, schedule)
    except BaseException:
        mesh.stop()
        raise


@contextlib.contextmanager
def _told(first: InitialValues, plan: Plan, order: Timeline | None = None, *, shown: bool) -> Iterator[None]:
    """Around the making of an engine: the plan before, what was read of weights after."""
    from zerodrift.plan.cost import cost
    from zerodrift.report.rows import grouped
    from zerodrift.report.terminal import plan_text

    if shown:
        print(plan_text(plan, cost(plan), grouped(plan), order, color=sys.stdout.isatty()))
    first.show(shown)
    yield
    done = first.finish()
    if shown and done is not None:
        print(done)
