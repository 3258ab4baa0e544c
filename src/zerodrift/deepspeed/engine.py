"""DeepSpeedEngine: DeepSpeed's methods on zerodrift's engine.

The class counts steps and samples like DeepSpeed, and decides like DeepSpeed which micro-batch ends a step.
All other work is zerodrift's engine's. An unknown attribute is looked up in the module, as in DeepSpeed.

Invariant: no dtype, norm, scale or update is decided or stored here.

[Note: boundary] DeepSpeed counts calls of `step`. `set_gradient_accumulation_boundary` overrides the count
until the next call. `update_boundary` passes the answer to zerodrift's engine before every micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DistributedSampler, IterableDataset

from zerodrift.alias import run_settings
from zerodrift.deepspeed.checkpointed_engine import CheckpointedEngine, attach_loading
from zerodrift.deepspeed.config import MANAGED
from zerodrift.deepspeed.getters import GETTERS, wire_dtype
from zerodrift.deepspeed.modules import ENGINE_ABSENT, MisuseError, absent, unknown
from zerodrift.deepspeed.optimizer import DeepSpeedOptimizer, ParameterOffload
from zerodrift.deepspeed.parameters.shards import forget_shards, keep_shards
from zerodrift.deepspeed.parameters.values import engine_parameter, mark_parameters, unmark_parameters
from zerodrift.deepspeed.tools.collectives import get_world_group, local_rank
from zerodrift.deepspeed.tools.curves import DeepSpeedMonitorConfig, MonitorMaster
from zerodrift.deepspeed.tools.functions import DeepSpeedDataLoader, logger, mark_configured_leaves
from zerodrift.engine import Engine, native
from zerodrift.errors import ConfigError, PrecisionError, Problem, UnsupportedError
from zerodrift.inspect.check import compare
from zerodrift.inspect.trace import EngineRecord, anything_compiled, is_compiled, merged, observe_calls

OWN = ("gathered", "parameter", "seed_micro_batch", "micro_batches_of_this_rank", "evaluate")
"""Methods of zerodrift's engine that error messages recommend. DeepSpeed's engine does not have them."""

AFTER_DESTROY = (
    "Make another one. The `Trainer` of transformers destroys the engine of `evaluate` when `train` begins: "
    "pass `eval_on_start=True` instead of calling `evaluate` before `train`."
)


class DeepSpeedEngine(CheckpointedEngine):
    sparse_tensor_module_names: frozenset[str] = frozenset()
    """Embeddings with sparse gradients: none."""

    def __init__(
        self,
        engine: Engine,
        written: dict[str, Any],
        training_data: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        client_optimizer: Any = None,
        monitor: MonitorMaster | None = None,
    ) -> None:
        super().__init__()
        mesh, policy = engine.mesh, engine.plan.policy
        self.module, self._engine, self.config = engine.module, engine, written
        self.device, self.gradient_average = mesh.device, policy.averaging.mean
        self.global_rank, self.local_rank = mesh.rank(), local_rank()
        self.world_size, self.dp_world_size, self.mp_world_size = mesh.size("world"), mesh.size("data"), 1
        self.client_optimizer, self.collate_fn = client_optimizer, collate_fn
        self.monitor = MonitorMaster(DeepSpeedMonitorConfig()) if monitor is None else monitor
        self.micro_steps = 0
        self.global_samples = 0
        self.tput_timer = EpochCounter()
        self._boundary: bool | None = None
        """The value of `set_gradient_accumulation_boundary`; None if `micro_steps` decides."""
        self._managed = bool(written.get(MANAGED, True))
        self._inside_no_sync = self._in_step = self._last_step_applied = False
        self._losses: list[torch.Tensor] = []
        """The losses of this step, if a monitor writes them."""
        self._backwards = 0
        self._micro_batch = policy.batch.micro
        stage, trains = policy.sharding.stage, engine.updater is not None
        self.optimizer: DeepSpeedOptimizer | ParameterOffload | None = None
        if trains:
            self.optimizer = DeepSpeedOptimizer(engine)
        elif stage == 3:
            self.optimizer = ParameterOffload(engine.module)
        self._first_step = FirstStep(engine) if run_settings() is not None and trains else None
        forget_shards(self.module)
        if stage:
            mark_configured_leaves(self.module, (written.get("zero_optimization") or {}).get("leaf_module"))
        mark_parameters(engine)
        if stage == 0:
            native(engine.executor).gradients.exposure_scale = engine.progress.unscale_of
        attach_loading(engine)
        self.training_dataloader = self.deepspeed_io(training_data) if training_data is not None else None
        self.update_boundary()

    @property
    def running(self) -> Engine:
        """zerodrift's engine, as `zerodrift.initialize` returns it."""
        return self._engine

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute, as DeepSpeed does."""
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        if name in ENGINE_ABSENT:
            raise absent(f"engine.{name}", ENGINE_ABSENT[name])
        module = self.__dict__.get("_modules", {}).get("module")
        if module is not None and hasattr(module, name):
            return getattr(module, name)
        if name in OWN:
            return getattr(self._engine, name)
        raise unknown("engine", name, dir(type(self)))

    def compile(self, backend: Any = "inductor", compile_kwargs: Any = None, **others: Any) -> None:
        """Compile the model's blocks in place, or all of a model without them. A second call does nothing."""
        for name, given in others.items():
            if given:
                do = "Leave it out: blocks are compiled as `torch.compile` does."
                raise UnsupportedError("engine.compile", f"must not be given `{name}`", got=given, do=do)
        names = [unit.name for unit in self._engine.plan.units if unit.name] or [""]
        for name in names if not self.is_compiled else ():
            self.module.get_submodule(name).compile(**{**(compile_kwargs or {}), "backend": backend})

    @property
    def is_compiled(self) -> bool:
        return any(map(is_compiled, self.module.modules()))

    # --- a micro-batch ----------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._engine.progress.closed:
            raise UnsupportedError("engine", "must not be used after `destroy`", do=AFTER_DESTROY)
        if self._first_step is None or torch.compiler.is_compiling():
            return self._engine(*inputs, **kwargs)
        with self._first_step.call():
            return self._engine(*inputs, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run the backward of one micro-batch. Return the loss divided by the number of micro-batches.

        The step divides the summed gradients. With `scale_wrt_gas=False` the caller has divided the loss
        already, so the loss is multiplied first.
        """
        self._require_optimizer("backward")
        _require_loss(loss)
        steps = self.gradient_accumulation_steps()
        kwargs = {"retain_graph": True} if retain_graph else {}
        with contextlib.nullcontext() if self._first_step is None else self._first_step.call():
            self._engine.backward(loss if scale_wrt_gas or steps == 1 else loss * steps, **kwargs)
        self._backwards += 1
        if self.monitor.enabled:
            self._losses.append(loss.detach())
        return loss.detach() / steps if scale_wrt_gas else loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        self._require_optimizer("scale")
        return self._engine.scale(loss)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Delay the reduction of gradients, if the plan reduces once per step. Works at every stage. `step`
        must be called outside."""
        if self._inside_no_sync:
            todo = "Leave the outer one first."
            raise MisuseError("no_sync", "must not be entered inside itself", do=todo)
        self._inside_no_sync = True
        try:
            with self._engine.no_sync():
                yield
        finally:
            self._inside_no_sync = False

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        self._require_managed("coalesce_grad_reduction")
        with self.no_sync():
            yield

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the current micro-batch ends its step. See [Note: boundary]."""
        if self._boundary is not None:
            return self._boundary
        if not self._managed:
            return self._in_step
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set the boundary for all micro-batches until the next call."""
        self._require_managed("set_gradient_accumulation_boundary")
        self._boundary = is_boundary
        self.update_boundary()

    def update_boundary(self) -> None:
        self._engine.progress.boundary = self.is_gradient_accumulation_boundary()

    # --- the step ---------------------------------------------------------------------------------------

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch, and update at a boundary. `lr_kwargs` go to the schedule's `step`."""
        self._require_optimizer("step")
        if self._inside_no_sync:
            raise MisuseError("step", "must be called outside of `no_sync`", do="Leave that first.")
        self._in_step = True
        self.update_boundary()
        try:
            result = self._engine.step(schedule_arguments=lr_kwargs)
        finally:
            self._in_step = False
        ends = self._engine.progress.boundary
        if self._first_step is not None and ends:
            first, self._first_step = self._first_step, None
            first.end()
        self._last_step_applied = result.updated
        if not self._managed:
            per_micro = self.train_micro_batch_size_per_gpu() * self.dp_world_size
            self.global_samples += per_micro * self._backwards
            self._backwards = 0
        elif self.is_gradient_accumulation_boundary():
            self.global_samples += self.train_batch_size()
        if self.monitor.enabled and ends:
            self._write_curves()
        self.micro_steps += 1
        self.update_boundary()

    def _write_curves(self) -> None:
        numbers = {"lr": self.get_lr()[0]}
        if self._losses:
            numbers["train_loss"] = sum(map(float, self._losses)) / len(self._losses)
            self._losses = []
        if self.fp16_enabled():
            numbers["loss_scale"] = self._engine.scaler.scale
        self.monitor.write_events(
            (f"Train/Samples/{name}", float(value), self.global_samples) for name, value in numbers.items()
        )

    @property
    def global_steps(self) -> int:
        return self._engine.progress.steps_tried

    @property
    def skipped_steps(self) -> int:
        return self._engine.skipped_steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.zero_grad()

    def _require_managed(self, what: str) -> None:
        if not self._managed:
            must = f"must not be called where the config says `{MANAGED}: false`"
            raise MisuseError(what, must, do="Call `step` where a step ends.")

    def _require_optimizer(self, what: str) -> None:
        if self._engine.updater is None:
            do = "Pass one to `initialize`, or write an `optimizer` block."
            raise MisuseError(what, "must have an optimizer", got="none", do=do)

    # --- data and batch sizes ---------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Make a loader of this rank's share of a dataset."""
        if num_local_io_workers:
            must = "must be left out: batches are loaded in the process"
            do = "Use a `torch.utils.data.DataLoader` with workers."
            raise UnsupportedError("num_local_io_workers", must, do=do)
        size, collate = batch_size or self._micro_batch, collate_fn or self.collate_fn
        if size < 1:
            must, got = "must be known to make a loader of `training_data`", "no batch size in the config"
            do = "Write it, or use a loader of your own."
            raise ConfigError("train_micro_batch_size_per_gpu", must, got=got, do=do)
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            rank, shuffle = self._engine.mesh.rank("data"), route == "train"
            data_sampler = DistributedSampler(dataset, self.dp_world_size, rank, shuffle=shuffle)
        drop_last = self.dataloader_drop_last()
        return DeepSpeedDataLoader(dataset, size, data_sampler, collate, drop_last, pin_memory=True)

    def set_data_post_process_func(self, post_process_func: Callable[..., Any]) -> None:
        """Set a function that is called with every batch of `training_dataloader`."""
        if self.training_dataloader is not None:
            self.training_dataloader.post_process_func = post_process_func

    def gradient_accumulation_steps(self) -> int:
        return self._engine.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the size in the config, or 1 if the config has none, as in DeepSpeed."""
        return self._micro_batch or 1

    def train_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.dp_world_size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches per step, between two steps."""
        per_round = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size < 1 or train_batch_size % per_round:
            must = f"must be a multiple of micro-batch x ranks, {per_round}"
            raise ValueError(str(Problem("train_batch_size", must, got=str(train_batch_size))))
        self._engine.progress.accumulation = train_batch_size // per_round
        self.update_boundary()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the size of a micro-batch, for loaders that are made later."""
        self._micro_batch = micro_batch_size

    # --- the module -------------------------------------------------------------------------------------

    @property
    def lr_scheduler(self) -> Any:
        return self._engine.schedule

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        self._engine.progress.schedule = schedule

    @property
    def data_parallel_group(self) -> Any:
        return get_world_group()

    @property
    def communication_data_type(self) -> torch.dtype:
        return wire_dtype(self)

    def empty_partition_cache(self) -> None:
        """Do nothing: a unit is released after its forward and backward."""

    def _backward_epilogue(self) -> None:
        """Do nothing. Scripts for DeepSpeed before 0.18 call this after `loss.backward()`."""

    def destroy(self) -> None:
        """Remove the hooks and leave the engine's process groups. The module keeps its weights, sharded at
        stage 3, and may be given to `initialize` again."""
        if self._engine.progress.closed:
            return
        if self._first_step is not None:
            self._first_step.leave()
        self._checkpoints = None
        end_engine(self._engine)


for _name, _getter in GETTERS.items():
    setattr(DeepSpeedEngine, _name, _getter)


class EpochCounter:
    """The engine's `tput_timer`. Scripts call `update_epoch_count` after an epoch; nothing is timed."""

    def __init__(self) -> None:
        self.epoch_count = 0

    def update_epoch_count(self) -> None:
        self.epoch_count += 1

    def __getattr__(self, name: str) -> Any:
        raise absent(f"engine.tput_timer.{name}", "Time the loop, or use `torch.profiler`.")


def end_engine(engine: Engine) -> None:
    """Destroy an engine. Its parameters stay as they are, sharded at stage 3."""
    attach_shards = keep_shards(engine)
    engine.destroy()
    unmark_parameters(engine.module)
    attach_shards()


def end_engines_of(model: nn.Module) -> None:
    """Destroy engines whose parameters all belong to this model, before another engine takes them over.
    Lightning initializes a model for each of `fit`, `validate` and `test`, and destroys no engine."""
    found = [place.engine() for place in map(engine_parameter, model.parameters()) if place is not None]
    here = {id(parameter) for parameter in model.parameters()}
    for engine in {id(engine): engine for engine in found if engine is not None}.values():
        if not engine.progress.closed and here.issuperset(map(id, engine.module.parameters())):
            logger.warning("an engine that ran this model was destroyed, because `initialize` got it again")
            end_engine(engine)


def _require_loss(loss: Any) -> None:
    """Raise unless the loss is a scalar with a graph, as DeepSpeed asserts."""
    do = ""
    if not isinstance(loss, torch.Tensor):
        got, do = f"a {type(loss).__name__}", "Pass the loss tensor."
    elif loss.numel() != 1:
        got = f"one of shape {list(loss.shape)}"
        do = "Call `backward` of the outputs with their gradients."
    elif loss.grad_fn is None:
        got = "one without a graph: it was computed without gradients, or from no trained parameter"
    else:
        return
    raise MisuseError("backward", "must get a loss of one element, with a graph", got=got, do=do)


class FirstStep:
    """Records an engine's first step under `zerodrift run`, and prints the precision that was used.

    Only operations inside calls of the engine are recorded, from the first forward in training mode on. A
    difference from the plan is printed and does not end the run.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stack = contextlib.ExitStack()
        self._observed: EngineRecord | None = None
        self._calls: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def call(self) -> contextlib.AbstractContextManager[Any]:
        module = self._engine.module
        if self._observed is None and module.training and torch.is_grad_enabled():
            compiled = anything_compiled() or any(map(is_compiled, module.modules()))
            observing = observe_calls(self._engine, operations=not compiled)
            self._observed, self._calls = self._stack.enter_context(observing)
        return self._calls()

    def leave(self) -> None:
        self._stack.close()

    def end(self) -> None:
        """Print the result on rank 0. Collective."""
        self.leave()
        engine = self._engine
        observed = merged(engine.comm.all_gather_object(self._observed or EngineRecord()))
        if engine.mesh.rank() or self._observed is None:
            return
        lines = [compare.line(engine.plan, observed), *compare.widened(engine.plan, observed)]
        try:
            compare.require_declared(engine.plan, observed)
        except PrecisionError as error:
            lines.append(str(error))
        print("\n".join(lines), flush=True)
