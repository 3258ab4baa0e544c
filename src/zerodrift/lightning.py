"""Strategy for Lightning's `Trainer`, which trains a `LightningModule` on zerodrift's engine.

    trainer = Trainer(strategy=ZeroDriftStrategy("config.yaml"), devices=8)

`import zerodrift.lightning` also registers the name: `Trainer(strategy="zerodrift")` trains with defaults.

Lightning decides when a step ends, and divides losses by the number of batches in the step. A setting that
both sides have (batches per step, clipping, precision) must have the same value on both.

Invariant: the engine steps exactly when Lightning does, and no precision plugin of Lightning runs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn

from zerodrift.api import initialize
from zerodrift.checkpoint import Checkpoints
from zerodrift.config import ConfigSource, load
from zerodrift.engine import Engine
from zerodrift.errors import CheckpointError, ConfigError, UnsupportedError

NAME = "zerodrift"
TAG = "state"
OWN = "lightning.ckpt"
"""Lightning's own file, beside the checkpoint of the engine."""


class EnginePrecision(Precision):
    """Precision plugin that calls the engine's backward and step. The plan decides the dtypes."""

    def __init__(self, strategy: ZeroDriftStrategy) -> None:
        super().__init__()
        self._strategy = strategy

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            must = "must be called with the loss and names"
            raise UnsupportedError("backward", must, got=f"{len(args)} more arguments")
        self._strategy.engine.backward(tensor, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        loss = self._wrap_closure(model, optimizer, closure)
        if model.automatic_optimization and loss is None:
            must = "must return a loss: every rank must take part in every backward"
            do = "Return a loss of zero times something that the model computed."
            raise UnsupportedError("training_step", must, got="None", do=do)
        self._strategy.engine.step()
        return loss

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine clips in its step, by the true norm."""


class ZeroDriftStrategy(DDPStrategy):
    """Strategy that trains a `LightningModule` with an engine of zerodrift."""

    strategy_name = NAME

    def __init__(self, config: ConfigSource | None = None, *, quiet: bool = False, **launching: Any) -> None:
        """`config` is a file, a dict or a `Config`, without the `Trainer`'s settings. The plan is printed
        unless `quiet`. `launching` has arguments of `DDPStrategy` such as `timeout`,
        `process_group_backend` and `start_method`."""
        super().__init__(precision_plugin=EnginePrecision(self), **launching)
        self._config: ConfigSource = {} if config is None else config
        self._quiet = quiet
        self._engine: Engine | None = None
        self._failed = False

    @property
    def engine(self) -> Engine:
        """Engine of the current fit, validation, test or prediction."""
        if self._engine is None:
            raise UnsupportedError("engine", "must be read while the Trainer runs", got="none yet")
        return self._engine

    # --- the engine -------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if not isinstance(self.precision_plugin, EnginePrecision):
            must, got = "must be left to the config of the strategy", type(self.precision_plugin).__name__
            do = "Write `precision: {mode: ...}` there."
            raise ConfigError("Trainer(precision=...)", must, got=got, do=do)
        optimizer = None
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self.setup_optimizers(trainer)
            optimizer = self._client_optimizer()
        self._engine = initialize(
            self.lightning_module,
            optimizer,
            self._config,
            device=self.root_device,
            overrides=self._trainer_settings(trainer) if fits else [],
            quiet=self._quiet,
        )
        if fits:
            self._use_engine_groups()
            # Lightning divides the loss by the number of batches.
            self._engine.progress.accumulation = 1
        self.model = self._engine

    def _client_optimizer(self) -> torch.optim.Optimizer | None:
        if len(self.optimizers) > 1:
            must, got = "must return one optimizer", f"{len(self.optimizers)}"
            do = "Parameter groups of one optimizer may differ; rules of the config, too."
            raise UnsupportedError("configure_optimizers", must, got=got, do=do)
        return next((optimizer for optimizer in self.optimizers if optimizer.param_groups), None)

    def _use_engine_groups(self) -> None:
        """Let schedulers set the learning rates of the engine's groups."""
        groups = self.engine.optimizer
        if groups is None:
            must = "must return an optimizer, or the config must have one"
            raise ConfigError("configure_optimizers", must, got="neither")
        for config in self.lr_scheduler_configs:
            config.scheduler.optimizer = groups
        self.optimizers = [groups]

    def _trainer_settings(self, trainer: Any) -> list[str]:
        """Return the Trainer's settings as keys of the config. Raise if the config contradicts them."""
        written = load(self._config)
        settings = {
            "gradient_accumulation_steps": ("accumulate_grad_batches", trainer.accumulate_grad_batches)
        }
        if trainer.gradient_clip_val is not None or written.gradient_clipping in (None, "auto"):
            settings["gradient_clipping"] = "gradient_clip_val", float(trainer.gradient_clip_val or 0.0)
        if trainer.gradient_clip_algorithm not in (None, "norm"):
            got = str(trainer.gradient_clip_algorithm)
            raise UnsupportedError("Trainer(gradient_clip_algorithm=...)", "must be norm", got=got)
        for key, (argument, there) in settings.items():
            here = getattr(written, key)
            if here not in (None, "auto", there):
                must, got = f"must be the Trainer's {argument}", f"{here} in the config and {there} there"
                do = f"Leave it out, and write Trainer({argument}={here})."
                raise ConfigError(key, must, got=got, do=do)
        return [f"{key}={there}" for key, (_, there) in settings.items()]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.lightning_module
        if module.automatic_optimization:
            self.engine.progress.boundary = not module.trainer.fit_loop._should_accumulate()
        return super().training_step(*args, **kwargs)

    def teardown(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            # After an error the other ranks may not come to gather.
            with contextlib.nullcontext() if self._failed else engine.gathered():
                engine.destroy()
            self.model = self.lightning_module
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        super().on_exception(exception)

    # --- checkpoints ------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}  # the engine's checkpoint has it

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return whole values on rank 0, in their compute dtype. Collective."""
        module: Any = self.lightning_module
        if self._engine is None:
            return dict(module.state_dict())
        with self._engine.gathered():
            if not self.is_global_zero:
                return {}
            return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a folder with the engine's checkpoint and Lightning's file, or one file of weights only."""
        path = Path(self.broadcast(filepath))
        if "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        Checkpoints(self.engine, path, quiet=True, shared=True).save(TAG)
        super().save_checkpoint(checkpoint, path / OWN, storage_options)
        self.barrier("zerodrift.save_checkpoint")

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(checkpoint_path)
        if not path.is_dir():
            return super().load_checkpoint(path, weights_only)
        if not (path / OWN).is_file():
            must = f"must be a folder that {type(self).__name__} saved"
            raise CheckpointError(str(path), must, got=f"no {OWN} in it")
        # The engine reads the weights in shards.
        found: dict[str, Any] = {**super().load_checkpoint(path / OWN, weights_only), "state_dict": {}}
        fits = self.engine.updater is not None
        Checkpoints(self.engine, path, quiet=True, shared=True).load(TAG, parts="all" if fits else "weights")
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of one file. From a folder the engine has loaded them already."""
        module: Any = self.lightning_module
        if checkpoint["state_dict"]:
            with self.engine.gathered(write=True):
                module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if checkpoint["state_dict"]:
            must = f"must be a folder that {type(self).__name__} saved, to resume a run"
            got = "one file, which has the state of another strategy's optimizer"
            do = "Load only its weights: `LightningModule.load_from_checkpoint(...)`, then fit."
            raise CheckpointError("ckpt_path", must, got=got, do=do)


if NAME not in StrategyRegistry:
    StrategyRegistry.register(NAME, ZeroDriftStrategy, description="zerodrift's engine, with its defaults")
