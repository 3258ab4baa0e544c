"""The engine that verl's trainers drive: micro-batches and their loss, the update, weights and checkpoints.

verl's own code for models of `transformers` makes model inputs, log-probabilities and values. Optimizer,
schedule and clipping norm are those of its `optim` block.

Invariant: gradients are summed over the micro-batches of a step and averaged over ranks, as verl's losses
expect; temperature, softmax and entropy get logits in fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from verl.utils import torch_functional
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine.utils import enable_full_determinism

from zerodrift.api import initialize
from zerodrift.engine import Engine
from zerodrift.errors import ConfigError, UnsupportedError, first_line
from zerodrift.verl.config import NAME, ZeroDriftEngineConfig, require_supported, written
from zerodrift.verl.model import (
    SavedRuns,
    Weights,
    adapter_of,
    adapter_weights,
    counted,
    model_weights,
    prepared_model,
)


@EngineRegistry.register(model_type="language_model", backend=NAME, device=["cuda", "cpu"])
class ZeroDriftEngine(FSDPEngineWithLMHead):
    """The engine for language models. From its base class it uses the code for micro-batches only."""

    def __init__(
        self,
        model_config: Any,
        engine_config: ZeroDriftEngineConfig,
        optimizer_config: Any,
        checkpoint_config: Any,
    ) -> None:
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        require_supported(engine_config, model_config, optimizer_config, checkpoint_config)
        self.mode: str | None = None
        self.rank = torch.distributed.get_rank()
        self.sent: dict[str, str] = {}
        """Name -> digest of the tensors that were last sent to a sampler."""
        self._zerodrift: Engine | None = None
        self._changes = 0
        """The number of times that weights changed."""
        self._runs = SavedRuns(checkpoint_config, model_config)
        # verl's code for micro-batches, inputs and outputs reads these.
        self._autocast_dtype = torch.float32  # off, because the engine enters autocast
        self._is_offload_param = self._is_offload_optimizer = False
        self.use_remove_padding = model_config.use_remove_padding
        self.use_ulysses_sp, self.ulysses_device_mesh = False, None
        self.ulysses_sequence_parallel_size = 1
        self.pad_to_length = engine_config.pad_to_length
        self.pad_to_length_bucket = engine_config.pad_to_length_bucket
        chunking = "_with_chunking" if engine_config.entropy_from_logits_with_chunking else ""
        entropy: Any = getattr(torch_functional, f"entropy_from_logits{chunking}")
        compiles = engine_config.use_torch_compile
        self.compute_entropy_from_logits = torch.compile(entropy, dynamic=True) if compiles else entropy
        if engine_config.full_determinism:
            enable_full_determinism(seed=engine_config.seed)

    @property
    def engine(self) -> Engine:
        """zerodrift's engine."""
        if self._zerodrift is None:
            raise UnsupportedError("engine", "must be read after `initialize`", got="none yet")
        return self._zerodrift

    def initialize(self) -> None:
        if self._zerodrift is not None:
            self._zerodrift.destroy()
        given, trains = self.model_config, not self.engine_config.forward_only
        clip = float(self.optimizer_config.clip_grad or 0.0) if trains else 0.0
        config = written(self.engine_config, clip)
        model, weights = prepared_model(given)
        self.pass_packed_cu_seqlens = "cu_seqlens" in signature(model.forward).parameters
        if given.lora_rank:
            model = self._build_lora_module(model)
        optimizer = self._client_optimizer(model) if trains else None
        quiet = self.engine_config.quiet
        self._zerodrift = initialize(model, optimizer, config, weights=weights, quiet=quiet)
        self._zerodrift.progress.accumulation = 1  # verl's losses are divided already
        self.module = self.scaler = _Callable(self._zerodrift)
        self.optimizer = self._zerodrift.optimizer
        self.lr_scheduler = self._build_lr_scheduler(self.optimizer) if trains else None

    def _client_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        block = self.optimizer_config
        if block.lr_warmup_steps is None:  # the ratio counts then, as verl documents
            block.lr_warmup_steps = -1
        try:
            optimizer: torch.optim.Optimizer = build_optimizer(model.parameters(), block)
        except (AttributeError, ImportError, TypeError, ValueError) as error:
            must = f"must be one that verl can build, {block.optimizer_impl}.{block.optimizer} here"
            raise ConfigError("optim.optimizer", must, got=first_line(error)) from error
        return optimizer

    # --- a step -----------------------------------------------------------------------------------------

    def train_mode(
        self, disable_auto_offload: bool = False, zero_grad_on_exit: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Train, and drop the gradients at the end."""
        return self._in_mode("train", zero_grad_on_exit)

    def eval_mode(
        self, disable_auto_offload: bool = False, zero_grad_on_exit: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        return self._in_mode("eval", False)

    @contextlib.contextmanager
    def _in_mode(self, mode: str, zero_grad: bool) -> Iterator[None]:
        self.mode = mode
        self.engine.train(mode == "train")
        try:
            yield
        except BaseException:
            zero_grad = mode == "train"
            raise
        finally:
            self.mode = None
            if zero_grad:
                self.engine.zero_grad()

    def optimizer_zero_grad(self) -> None:
        self.engine.zero_grad()

    def optimizer_step(self) -> float:
        """Clip and update, or skip a gradient that is not finite. Return the norm before clipping."""
        if not self.engine.micro_batches:
            must = "must follow a `forward_backward_batch`"
            raise UnsupportedError("optimizer_step", must, got="none since the last step")
        self._changes += 1
        norm = self.engine.step().grad_norm
        assert norm is not None
        return norm

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        engine = self.engine
        updates = [row.columns.update for row in engine.plan.rows]
        reduces_every = all(update.reduce.when == "every" for update in updates if update is not None)
        if not forward_only and engine.micro_batches and not reduces_every:
            must = "must be followed by `optimizer_step` or `optimizer_zero_grad` where `reduce.when` is last"
            got, do = "a second call in a step", "Write `precision: {reduce: {when: every}}`."
            raise UnsupportedError("forward_backward_batch", must, got=got, do=do)
        return super().forward_backward_batch(data, loss_function, forward_only)

    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> contextlib.AbstractContextManager[None]:
        self.engine.progress.boundary = is_last_micro_batch
        return contextlib.nullcontext()

    def prepare_model_outputs(self, output: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Cast the logits to fp32 first, because verl computes softmax and losses in their dtype."""
        if output.logits.dtype.itemsize < 4:
            output.logits = output.logits.float()
        outputs: dict[str, Any] = super().prepare_model_outputs(output, *args, **kwargs)
        return outputs

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        there = self.engine.mesh.device.type
        if device != there and (model or optimizer or grad):
            must, got = "must not move weights, moments or gradients", f"{device!r}, not {there}"
            do = "Write `zero_optimization: {offload_optimizer: {device: cpu}}` for moments on the host."
            raise UnsupportedError("to", must, got=got, do=do)

    # --- weights for a sampler --------------------------------------------------------------------------

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **_: Any
    ) -> tuple[Weights, dict[str, Any] | None]:
        """Return whole tensors by name, one unit at a time, in the dtypes of the `export` column. All ranks
        must read all of them before the next update. With an adapter, its tensors are returned if
        `base_sync_done`, and the base model's otherwise."""
        engine, adapter = self.engine, adapter_of(self.engine)
        if adapter is not None and base_sync_done:
            weights = adapter_weights(engine)
        else:
            weights = model_weights(engine, self.model_config.hf_config.model_type)
        self.sent = {}
        settings = None if adapter is None else adapter.to_dict()
        return counted(weights, self.sent, lambda: self._changes), settings

    def get_per_tensor_param_shard(self, **_: Any) -> Any:
        where, must = "rollout.checkpoint_engine.backend", "must be one that sends whole tensors"
        raise UnsupportedError(
            where, must, got="one that sends parts of tensors", do="Write `naive` or `nccl`."
        )

    prime_delta_snapshots = get_per_tensor_param_delta_shard = get_per_tensor_param_shard

    def disable_adapter(self) -> Any:
        model: Any = self.engine.module
        return model.disable_adapter() if hasattr(model, "peft_config") else contextlib.nullcontext()

    # --- checkpoints ------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        self._runs.save(self.engine, Path(local_path), self.lr_scheduler, hdfs_path, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False, **_: Any
    ) -> None:
        """Load a checkpoint. `del_local_after_load` has no effect, as in verl's engine for fsdp, because the
        folder is not a copy."""
        self._changes += 1
        self._runs.load(self.engine, Path(local_path), self.lr_scheduler)


@EngineRegistry.register(model_type="value_model", backend=NAME, device=["cuda", "cpu"])
class ZeroDriftValueEngine(ZeroDriftEngine, FSDPEngineWithValueHead):
    """The engine for a critic, whose outputs are values."""


class _Callable:
    """The module and the loss scaler for verl's code."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def scale(self, loss: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(backward=lambda: self._engine.backward(loss))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.module, name)
