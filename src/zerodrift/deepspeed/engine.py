"""DeepSpeedEngine: DeepSpeed's methods on zerodrift's engine.

It translates: counts as DeepSpeed counts, decides which micro-batch ends a step as DeepSpeed does, and hands
everything else on. Getters are in `getters.py`, the loop over a batch in `batches.py`, files in
`checkpoints.py`; a name that none of them has is looked for in the module, as in DeepSpeed, and then refused
with what to use instead.

Invariant: dtypes, norms, scales and updates are the engine's; nothing of them is decided or kept here.

[Note: boundary] DeepSpeed counts calls of `step`, and `set_gradient_accumulation_boundary` overrides the
count until it is set again. The engine below is told before every micro-batch whether it ends its step.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zerodrift.alias import errand
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.deepspeed import batches, checkpoints, comm, consolidated, unsupported
from zerodrift.deepspeed.first_step import FirstStep
from zerodrift.deepspeed.getters import ConfigGetters
from zerodrift.deepspeed.launch import local_rank
from zerodrift.deepspeed.loading import let_load
from zerodrift.deepspeed.monitor.config import DeepSpeedMonitorConfig
from zerodrift.deepspeed.monitor.monitor import MonitorMaster
from zerodrift.deepspeed.optimizer import DeepSpeedOptimizer
from zerodrift.deepspeed.parameter_offload import ParameterOffload
from zerodrift.deepspeed.parameters import mark_parameters, unmark
from zerodrift.deepspeed.runtime.dataloader import DeepSpeedDataLoader, make_loader
from zerodrift.deepspeed.spellings import MANAGED
from zerodrift.deepspeed.unsupported import MisuseError
from zerodrift.deepspeed.zero.slices import leave_in_pieces, release
from zerodrift.engine.engine import Engine
from zerodrift.engine.native import native
from zerodrift.errors import Problem, UnsupportedError


def _optimizer(engine: Engine) -> DeepSpeedOptimizer | ParameterOffload | None:
    if engine.updater is not None:
        return DeepSpeedOptimizer(engine)
    return ParameterOffload(engine.module) if engine.plan.policy.sharding.stage == 3 else None


OWN = ("gathered", "parameter", "seed_micro_batch", "micro_batches_of_this_rank", "evaluate")
"""Of the engine below, what messages name and DeepSpeed has not."""


class DeepSpeedEngine(nn.Module):
    """Made by `initialize`."""

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
        self.module = engine.module
        self._engine = engine
        self._getters = ConfigGetters(engine, written, client_optimizer)
        self._boundary: bool | None = None
        """What `set_gradient_accumulation_boundary` said; None where `micro_steps` decides."""
        self._inside_no_sync = False
        self._managed = self._getters.managed_gradient_accumulation()
        self.monitor = MonitorMaster(DeepSpeedMonitorConfig()) if monitor is None else monitor
        """Writes the curves that the config asks for."""
        self._losses: list[torch.Tensor] = []
        """Of the micro-batches of this step, where they are written."""
        self._stepping = False
        self._backwards = 0
        """Since the last step."""
        self._last_step_applied = False
        self.config = written
        """What was written, as a dict."""
        self.device = engine.mesh.device
        self.global_rank = engine.mesh.rank()
        self.world_size = engine.mesh.size("world")
        self.local_rank = local_rank()
        self.dp_world_size = engine.mesh.size("data")
        self.mp_world_size = 1
        self.micro_steps = 0
        """Calls of `step`."""
        self.global_samples = 0
        self.gradient_average = engine.plan.policy.averaging.mean
        self.client_optimizer = client_optimizer
        self.collate_fn = collate_fn
        self.optimizer = _optimizer(engine)
        """What DeepSpeed has there: at stage 3 without an optimizer, who gathers parameters."""
        told = errand() is not None and engine.updater is not None
        self._first_step = FirstStep(engine) if told else None
        self._micro_batch = engine.plan.policy.batch.micro
        release(self.module)
        mark_parameters(engine)
        if engine.plan.policy.sharding.stage == 0:
            native(engine.executor).gradients.seen = engine.progress.unscale_of
        let_load(engine)
        self.training_dataloader = self.deepspeed_io(training_data) if training_data is not None else None
        self._batches: Iterator[Any] | None = None
        """What `train_batch` reads where it gets no iterator."""
        self._checkpoints: tuple[str, Checkpoints] | None = None
        """The folder that was used last, and what saves and loads there."""
        self.tell()

    @property
    def running(self) -> Engine:
        """The engine below: `zerodrift.initialize`'s, with its reports and values."""
        return self._engine

    def __getattr__(self, name: str) -> Any:
        """The getters, then the module's own attributes, as in DeepSpeed."""
        getters = self.__dict__.get("_getters")
        if getters is not None and not name.startswith("_") and hasattr(getters, name):
            return getattr(getters, name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        if name in unsupported.ENGINE:
            raise unsupported.absent(f"engine.{name}", unsupported.ENGINE[name])
        module = self.__dict__.get("_modules", {}).get("module")
        if module is not None and hasattr(module, name):
            return getattr(module, name)
        if name in OWN:
            return getattr(self._engine, name)
        raise unsupported.unknown("engine", name, [*dir(type(self)), *dir(ConfigGetters)])

    @property
    def compile(self) -> Any:
        """torch's own would compile the engine."""
        raise unsupported.absent("engine.compile", unsupported.ENGINE["compile"])

    # --- a micro-batch ----------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model, in the plan's precision."""
        if self._first_step is None or torch.compiler.is_compiling():
            return self._engine(*inputs, **kwargs)
        with self._first_step.call():
            return self._engine(*inputs, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Backward of one micro-batch; returns the loss divided by the number of micro-batches.

        The division is made in the step, after the sum. With `scale_wrt_gas=False` the caller has divided
        already, so the loss is multiplied first.
        """
        self._require_optimizer("backward")
        batches.require_loss(loss)
        steps = self.gradient_accumulation_steps()
        kwargs = {"retain_graph": True} if retain_graph else {}
        with contextlib.nullcontext() if self._first_step is None else self._first_step.call():
            self._engine.backward(loss if scale_wrt_gas or steps == 1 else loss * steps, **kwargs)
        self._backwards += 1
        if self.monitor.enabled:
            self._losses.append(loss.detach())
        return loss.detach() / steps if scale_wrt_gas else loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `backward` on by hand."""
        self._require_optimizer("scale")
        return self._engine.scale(loss)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not reduced where the plan reduces once per step. At every stage; `step` must
        be called outside."""
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
        """The same: what waits is reduced once, in the step."""
        self._require_managed("coalesce_grad_reduction")
        with self.no_sync():
            yield

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch that is under way ends its step. See [Note: boundary]."""
        if self._boundary is not None:
            return self._boundary
        if not self._managed:
            return self._stepping
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say so for the micro-batches that follow, until the next call."""
        self._require_managed("set_gradient_accumulation_boundary")
        self._boundary = is_boundary
        self.tell()

    def tell(self) -> None:
        """Tell the engine below. See [Note: boundary]."""
        self._engine.progress.boundary = self.is_gradient_accumulation_boundary()

    # --- the step ---------------------------------------------------------------------------------------

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at a boundary, update. `lr_kwargs` are arguments of the schedule's step."""
        self._require_optimizer("step")
        if self._inside_no_sync:
            raise MisuseError("step", "must be called outside of `no_sync`", do="Leave that first.")
        self._stepping = True
        self.tell()
        try:
            result = self._engine.step(schedule_arguments=lr_kwargs)
        finally:
            self._stepping = False
        if self._first_step is not None and self._engine.progress.boundary:
            first, self._first_step = self._first_step, None
            first.end()
        self._last_step_applied = result.updated
        if not self._managed:
            per_micro = self.train_micro_batch_size_per_gpu() * self.dp_world_size
            self.global_samples += per_micro * self._backwards
            self._backwards = 0
        elif self.is_gradient_accumulation_boundary():
            self.global_samples += self.train_batch_size()
        if self.monitor.enabled and self._engine.progress.boundary:
            self._write_numbers()
        self.micro_steps += 1
        self.tell()

    def _write_numbers(self) -> None:
        """Of the step that has ended, by the samples of all ranks so far."""
        losses, self._losses = self._losses, []
        numbers = {"lr": self.get_lr()[0]}
        if losses:
            numbers["train_loss"] = sum(float(loss) for loss in losses) / len(losses)
        if self.fp16_enabled():
            numbers["loss_scale"] = self._engine.scaler.scale
        self.monitor.write_events(
            (f"Train/Samples/{name}", float(value), self.global_samples) for name, value in numbers.items()
        )

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` updated parameters."""
        return self._last_step_applied

    def get_global_grad_norm(self) -> float | None:
        """Of the last complete step, before clipping: of the averaged and unscaled gradient."""
        return self._engine.grad_norm

    @property
    def global_steps(self) -> int:
        """Complete steps, skipped ones too."""
        return self._engine.global_steps + self._engine.skipped_steps

    @property
    def skipped_steps(self) -> int:
        return self._engine.skipped_steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this step."""
        self._engine.zero_grad()

    def _require_managed(self, what: str) -> None:
        if not self._managed:
            raise MisuseError(
                what,
                f"must not be called where the config says `{MANAGED}: false`",
                do="Call `step` where a step ends.",
            )

    def _require_optimizer(self, what: str) -> None:
        if self._engine.updater is None:
            raise MisuseError(
                what,
                "must have an optimizer",
                got="none",
                do="Pass one to `initialize`, or write an `optimizer` block.",
            )

    # --- whole batches ----------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """All micro-batches of a step from an iterator; returns the mean loss over them and the ranks."""
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
        self.train()
        losses = []
        for batch in batches.take(self._iterator(data_iter), self.gradient_accumulation_steps()):
            loss = batches.loss_of(batches.call(self, batch, self.device))
            self.backward(loss)
            losses.append(loss)
            self.step()
        return batches.mean_loss(losses, self._engine.comm)

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The same without gradients and update. Without `compute_loss` the outputs of the micro-batches."""
        if reduce_output not in ("avg", None):
            raise UnsupportedError("reduce_output", "must be 'avg' or None", got=repr(reduce_output))
        count = num_micro_batches or self.gradient_accumulation_steps()
        trained = self.module.training
        self.eval()
        try:
            with torch.no_grad():
                taken = batches.take(self._iterator(data_iter), count)
                outputs = [batches.call(self, batch, self.device) for batch in taken]
        finally:
            self.train(trained)
        if not compute_loss:
            return outputs
        losses = [batches.loss_of(output) for output in outputs]
        mean = batches.mean_loss(losses, self._engine.comm) if reduce_output else losses
        return (mean, outputs) if return_logits else mean

    def _iterator(self, given: Iterator[Any] | None) -> Iterator[Any] | None:
        if given is None and self.training_dataloader is not None and self._batches is None:
            self._batches = iter(self.training_dataloader)
        return self._batches if given is None else given

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
        """A loader of this rank's share of a dataset."""
        if num_local_io_workers:
            raise UnsupportedError(
                "num_local_io_workers",
                "must be left out: batches are loaded in the process",
                do="Use a `torch.utils.data.DataLoader` with workers.",
            )
        return make_loader(
            dataset,
            batch_size or self._micro_batch,
            (self._engine.mesh.rank("data"), self.dp_world_size),
            data_sampler,
            collate_fn or self.collate_fn,
            self._getters.dataloader_drop_last(),
            shuffle=route == "train",
        )

    def set_dataloader(self, loader: Any) -> None:
        self.training_dataloader, self._batches = loader, None

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        self._batches = iterator

    def set_data_post_process_func(self, post_process_func: Callable[..., Any]) -> None:
        """Called with every batch that `training_dataloader` loads."""
        if self.training_dataloader is not None:
            self.training_dataloader.post_process_func = post_process_func

    # --- batch numbers ----------------------------------------------------------------------------------

    def gradient_accumulation_steps(self) -> int:
        return self._engine.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """1 where the config leaves it to the caller's loader, as in DeepSpeed."""
        return self._micro_batch or 1

    def train_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.dp_world_size

    def get_batch_info(self) -> tuple[int, int, int]:
        """Batch over all ranks, micro-batch, micro-batches per step."""
        micro, steps = self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()
        return self.train_batch_size(), micro, steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches per step, between two steps."""
        per_round = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size < 1 or train_batch_size % per_round:
            must = f"must be a multiple of micro-batch x ranks, {per_round}"
            raise ValueError(str(Problem("train_batch_size", must, got=str(train_batch_size))))
        self._engine.progress.accumulation = train_batch_size // per_round
        self.tell()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the size of a micro-batch; loaders that are made afterwards obey it."""
        self._micro_batch = micro_batch_size

    # --- learning rates ---------------------------------------------------------------------------------

    @property
    def lr_scheduler(self) -> Any:
        return self._engine.schedule

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        self._engine.progress.schedule = schedule

    def get_lr(self) -> list[Any]:
        return self._of_groups("lr")

    def get_type(self) -> list[Any]:
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        """Betas per group, or momentum where the optimizer has no betas."""
        groups = self._groups()
        return self._of_groups("betas" if any("betas" in group for group in groups) else "momentum")

    def _of_groups(self, key: str) -> list[Any]:
        return [group.get(key, 0.0) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if isinstance(self.optimizer, torch.optim.Optimizer) else []

    # --- modes, values, files ---------------------------------------------------------------------------

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        self.module.train(mode)
        self.training = mode
        return self

    def eval(self) -> DeepSpeedEngine:
        return self.train(False)

    @property
    def data_parallel_group(self) -> Any:
        return comm.get_world_group()

    @property
    def communication_data_type(self) -> torch.dtype:
        """What gradients travel in, where no rule says otherwise."""
        updates = [row.columns.update for row in self._engine.plan.rows if not row.columns.pinned]
        wires = [update.reduce.wire.torch for update in updates if update is not None]
        return wires[0] if wires else torch.float32

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's state dict, whole on every rank; at stage 3 DeepSpeed's holds placeholders."""
        if keep_vars:
            raise UnsupportedError(
                "keep_vars", "must be false: what is returned is a copy", do="Use `named_parameters`."
            )
        state = consolidated.state_dict(self._engine, prefix, exclude_frozen_parameters, everywhere=True)
        if destination is None:
            return state
        destination.update(state)
        return destination

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load the state dict under `module`; masters follow."""
        with self._engine.gathered(write=True):
            if custom_load_fn is not None:
                custom_load_fn(src=checkpoint["module"], dst=self.module)
            else:
                self.module.load_state_dict(checkpoint["module"], strict=strict)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Whole and on the CPU, on rank 0; None on the others. The name is what transformers asks for."""
        state = consolidated.state_dict(self._engine, "", exclude_frozen_parameters, everywhere=False)
        return state if self.global_rank == 0 else None

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """The model in its `export` dtypes, whole, in one file that `torch.load` or safetensors reads."""
        return consolidated.save(self._engine, save_dir, save_filename, exclude_frozen_parameters)

    def save_fp16_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin"
    ) -> bool:
        return self.save_16bit_model(save_dir, save_filename)

    def checkpoints_in(self, folder: str | os.PathLike[str]) -> Checkpoints:
        """Of this run, in a folder. All folders that an engine saves to or loaded from are of one run."""
        path = os.path.realpath(folder)
        if self._checkpoints is None or self._checkpoints[0] != path:
            run = "" if self._checkpoints is None else self._checkpoints[1].run
            self._checkpoints = (path, Checkpoints(self._engine, folder, quiet=True, run=run, shared=True))
        return self._checkpoints[1]

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] = {},
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Everything that a resume needs, for any number of ranks and any stage. Without frozen parameters it
        loads with `load_module_strict=False`."""
        return checkpoints.save(
            self, save_dir, tag, client_state, save_latest, frozen=not exclude_frozen_parameters
        )

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Back to where `save_checkpoint` was, ours or DeepSpeed's own; returns the path and the client
        state, or two Nones. Without `load_module_strict`, what only one side has is left alone."""
        checkpoints.refuse_custom(custom_load_fn)
        wanted = checkpoints.LoadRequest(
            optimizer=load_optimizer_states and not load_module_only,
            schedule=load_lr_scheduler_states and not load_module_only,
            counts=not load_module_only,
            strict=load_module_strict,
        )
        return checkpoints.load(self, load_dir, tag, wanted)

    def empty_partition_cache(self) -> None:
        """Nothing is cached: a unit is released when it is left."""

    def destroy(self) -> None:
        """Take the hooks off and leave the process groups that were made for it. The module keeps its
        weights, at stage 3 in slices, and may be given to `initialize` again."""
        if self._engine.progress.closed:
            return
        if self._first_step is not None:
            self._first_step.leave()
        leave = leave_in_pieces(self._engine)
        self._engine.destroy()
        self._checkpoints = None
        for parameter in self.module.parameters():
            unmark(parameter)
        leave()
