"""An engine for verl: what its trainers ask of `fsdp` or `megatron`, done by zerodrift as a config says.

    engine:
      _target_: zerodrift.verl.ZeroDriftEngineConfig
      strategy: zerodrift
      config: {zero_optimization: {stage: 3}, precision: {mode: bf16}}
      pins: ["*.router.*"]

verl finds it by itself where zerodrift is installed. Model inputs, log-probabilities and values are made by
verl's own code for models of `transformers`; optimizer, schedule and clipping norm are those of its `optim`
block. Weights go to the sampler in the dtypes of the `export` column. A digest of each is in `sent`, which a
sampler can compare with what it holds: `require_same`.

Invariant: gradients are summed over the micro-batches of a step and averaged over ranks, as verl's losses are
written for; nothing of verl decides a dtype.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForTokenClassification
from verl.utils import tensordict_utils, torch_functional
from verl.utils.model import convert_weight_keys, get_hf_auto_model_class
from verl.utils.py_functional import convert_to_regular_types
from verl.workers.config import EngineConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from verl.workers.engine.utils import (
    detach_tree,
    enable_full_determinism,
    postprocess_batch_func,
    prepare_micro_batches,
)

from zerodrift.api import empty, export, initialize
from zerodrift.config.tree import tree_of
from zerodrift.engine.digest import tensor_digest
from zerodrift.engine.engine import Engine
from zerodrift.errors import ConfigError, Problems, RankError, UnsupportedError
from zerodrift.io.checkpoint.checkpoints import Checkpoints
from zerodrift.io.whole import whole_values

NAME = "zerodrift"
TAG = "state"
_MODES = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "fp16": "fp16",
    "float32": "fp32",
    "fp32": "fp32",
}


@dataclass
class ZeroDriftEngineConfig(EngineConfig):
    """What verl's trainers say of every engine, and a config of zerodrift."""

    strategy: str = NAME
    config: Any = field(default_factory=dict)
    """A file, or keys: precision with its rules, stage, offload. `precision.mode` is `dtype` without one."""
    pins: list[str] = field(default_factory=list)
    """Globs on names of parameters that are fp32 throughout."""
    quiet: bool = False
    """Print no plan."""
    ulysses_sequence_parallel_size: int = 1
    use_torch_compile: bool = False
    """Of the entropy alone."""
    entropy_from_logits_with_chunking: bool = False
    entropy_from_logits_chunk_size: int = 2048
    entropy_checkpointing: bool = False
    pad_to_length: bool = False
    pad_to_length_bucket: int = 1024


@EngineRegistry.register(model_type="language_model", backend=NAME, device=["cuda", "cpu"])
class ZeroDriftEngine(FSDPEngineWithLMHead):
    """What verl calls. Of its base there is what makes model inputs and outputs; none of FSDP."""

    def __init__(
        self,
        model_config: Any,
        engine_config: ZeroDriftEngineConfig,
        optimizer_config: Any,
        checkpoint_config: Any,
    ) -> None:
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.checkpoint_config = checkpoint_config
        require_supported(engine_config, model_config)
        self.mode: str | None = None
        self.rank = torch.distributed.get_rank()
        self.sent: dict[str, str] = {}
        """Name of each tensor that was last given to a sampler -> its digest."""
        self._zerodrift: Engine | None = None
        self._saved: list[Path] = []
        # What verl's code for inputs and outputs reads.
        self.use_remove_padding = model_config.use_remove_padding
        self.use_ulysses_sp, self.ulysses_device_mesh = False, None
        self.ulysses_sequence_parallel_size = 1
        self.pad_to_length = engine_config.pad_to_length
        self.pad_to_length_bucket = engine_config.pad_to_length_bucket
        self.compute_entropy_from_logits = _entropy(engine_config)
        if engine_config.full_determinism:
            enable_full_determinism(seed=engine_config.seed)

    @property
    def engine(self) -> Engine:
        """Of zerodrift."""
        if self._zerodrift is None:
            raise UnsupportedError("engine", "must be asked for after `initialize`", got="none yet")
        return self._zerodrift

    # --- making it --------------------------------------------------------------------------------------

    def initialize(self) -> None:
        if self._zerodrift is not None:
            self._zerodrift.destroy()
        config = self._config()
        model, weights = self._model()
        self.pass_packed_cu_seqlens = "cu_seqlens" in signature(model.forward).parameters
        trains = not self.engine_config.forward_only
        optimizer = build_optimizer(model.parameters(), self.optimizer_config) if trains else None
        self._zerodrift = initialize(
            model, optimizer, config, weights=weights, quiet=self.engine_config.quiet
        )
        self._zerodrift.progress.accumulation = 1  # the losses of verl are divided already
        self.module = _Callable(self._zerodrift)
        self.optimizer = self._zerodrift.optimizer
        self.lr_scheduler = self._build_lr_scheduler(self.optimizer) if trains else None

    def _config(self) -> dict[str, Any]:
        """With the pins, and with what verl says; an error where the config says something else."""
        written = convert_to_regular_types(self.engine_config.config)
        heading, tree, problems = tree_of(written, "config")
        for key in ("optimizer", "scheduler"):
            if tree.get(key) is not None:
                problems.add(
                    key, "must be left to verl's `optim`", got="one in the config", do="Leave it out."
                )
        said: dict[str, tuple[Any, str]] = {"gradient_accumulation_steps": (1, "count of micro-batches")}
        if not self.engine_config.forward_only:
            said["gradient_clipping"] = float(self.optimizer_config.clip_grad or 0.0), "optim.clip_grad"
        for key, (there, name) in said.items():
            if tree.get(key) not in (None, "auto", there):
                got = f"{tree[key]} in the config and {there} there"
                problems.add(key, f"must be verl's {name}", got=got, do="Leave it out.")
        problems.raise_as(ConfigError, heading)
        precision = tree.get("precision") or {}
        if "mode" not in precision and not any(
            (tree.get(key) or {}).get("enabled") for key in ("bf16", "fp16", "torch_autocast")
        ):
            precision = {"mode": _MODES[self.engine_config.dtype], **precision}
        pins = [{"match": pattern, "pin": "fp32"} for pattern in self.engine_config.pins]
        precision = {**precision, "rules": [*(precision.get("rules") or ()), *pins]}
        return {**tree, **{key: there for key, (there, _) in said.items()}, "precision": precision}

    def _model(self) -> tuple[torch.nn.Module, str | None]:
        """The model, and where its weights are if it has none yet."""
        given = self.model_config
        build, config = get_hf_auto_model_class(hf_config=given.hf_config), given.hf_config
        trusted = {"trust_remote_code": given.trust_remote_code}
        if given.model_type == "language_model" and not given.lora_rank:
            with empty():
                model = build.from_config(config, dtype=config.dtype, **trusted)
            return self._patched(model), given.local_path
        if given.model_type == "value_model":
            build = AutoModelForTokenClassification
            config.num_labels, config.classifier_dropout, config.hidden_dropout = 1, 0.0, 0.0
        model = build.from_pretrained(given.local_path, dtype=torch.float32, config=config, **trusted)
        model = self._patched(model)
        return self._build_lora_module(model) if given.lora_rank else model, None

    def _patched(self, model: Any) -> Any:
        """As verl's own engines have it."""
        from verl.models.transformers.monkey_patch import apply_monkey_patch

        given = self.model_config
        if given.use_liger:
            from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, swiglu=True)
        apply_monkey_patch(
            model=model,
            use_remove_padding=self.use_remove_padding,
            ulysses_sp_size=1,
            use_fused_kernels=given.use_fused_kernels,
            fused_kernels_backend=(given.fused_kernel_options or {}).get("impl_backend"),
        )
        if given.enable_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    # --- a step -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def train_mode(
        self, disable_auto_offload: bool = False, zero_grad_on_exit: bool = True
    ) -> Iterator[None]:
        """Training; the gradients are forgotten at its end."""
        self.mode = "train"
        self.engine.train()
        try:
            yield
        except BaseException:
            self.engine.zero_grad()
            raise
        finally:
            self.mode = None
        if zero_grad_on_exit:
            self.engine.zero_grad()

    @contextlib.contextmanager
    def eval_mode(self, disable_auto_offload: bool = False, zero_grad_on_exit: bool = True) -> Iterator[None]:
        self.mode = "eval"
        self.engine.eval()
        try:
            yield
        finally:
            self.mode = None

    def optimizer_zero_grad(self) -> None:
        self.engine.zero_grad()

    def optimizer_step(self) -> float:
        """Clip and update, or skip where a gradient is not finite. Returns the norm before clipping."""
        if not self.engine.micro_batches:
            raise UnsupportedError(
                "optimizer_step", "must follow a `forward_backward_batch`", got="none since the last step"
            )
        norm = self.engine.step().grad_norm
        assert norm is not None
        return norm

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        engine, group = self.engine, self.get_data_parallel_group()
        if not forward_only and engine.micro_batches and not self._reduces_every:
            raise UnsupportedError(
                "forward_backward_batch",
                "must be followed by `optimizer_step` or `optimizer_zero_grad` where `reduce.when` is last",
                got="a second call in a step",
                do="Write `precision: {reduce: {when: every}}`.",
            )
        tensordict_utils.assign_non_tensor(data, sp_size=1)
        keeps = tensordict_utils.get_non_tensor_data(data=data, key="return_model_output", default=False)
        tokens = data["loss_mask"].sum().to(engine.mesh.device)
        torch.distributed.all_reduce(tokens, group=group)
        tensordict_utils.assign_non_tensor(
            data, batch_num_tokens=tokens.item(), dp_size=self.get_data_parallel_size()
        )
        batches, indices = prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        outputs = []
        for number, batch in enumerate(batches):
            with torch.set_grad_enabled(not forward_only):
                loss, output = self.forward_step(batch, loss_function, forward_only)
            if not forward_only:
                engine.progress.boundary = number == len(batches) - 1
                engine.backward(loss)
                if not keeps:
                    output.pop("model_output", None)
            outputs.append(output)
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    @property
    def _reduces_every(self) -> bool:
        updates = [row.columns.update for row in self.engine.plan.rows]
        return all(update.reduce.when == "every" for update in updates if update is not None)

    def forward_step(
        self, micro_batch: Any, loss_function: Any, forward_only: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        device = self.engine.mesh.device
        micro_batch = micro_batch.to(device)
        inputs, arguments = self.prepare_model_inputs(micro_batch=micro_batch)
        raw = self.module(**inputs, use_cache=False)
        output = self.prepare_model_outputs(
            output=raw, output_args=arguments, micro_batch=micro_batch, logits_processor_func=loss_function
        )
        metrics: dict[str, Any] = {}
        loss = torch.tensor(1.0, device=device)
        if loss_function is not None:
            loss, metrics = loss_function(
                model_output=output, data=micro_batch, dp_group=self.get_data_parallel_group()
            )
        return loss, {"model_output": detach_tree(output), "loss": loss.detach().item(), "metrics": metrics}

    # --- ranks and places -------------------------------------------------------------------------------

    def get_data_parallel_rank(self) -> int:
        return torch.distributed.get_rank()

    def get_data_parallel_size(self) -> int:
        return torch.distributed.get_world_size()

    def get_data_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    @property
    def is_param_offload_enabled(self) -> bool:
        return False

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return False  # it never has to be moved: `zero_optimization.offload_optimizer` keeps it on the host

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        there = self.engine.mesh.device.type
        if device != there and (model or optimizer or grad):
            raise UnsupportedError(
                "to",
                "must leave weights, moments and gradients where they are",
                got=f"{device!r}, and they are on {there}",
                do="Write `zero_optimization: {offload_optimizer: {device: cpu}}` for moments on the host.",
            )

    # --- weights for a sampler --------------------------------------------------------------------------

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **_: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        """Whole tensors by name, a unit at a time, in the dtypes of the `export` column. Every rank takes all
        of them. With an adapter: its tensors where `base_sync_done`, else those of the model beneath."""
        model = self.engine.module
        peft = getattr(model, "peft_config", {}).get("default")
        if peft is None:
            return self._counted(self._whole(lambda name: name)), None
        from verl.utils.fsdp_utils import replace_lora_wrapper

        def of_adapter(name: str) -> str | None:
            return name.replace(".default.", ".").replace(".default", "") if "lora_" in name else None

        def of_model(name: str) -> str | None:
            if "lora_" in name:
                return None
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            return replace_lora_wrapper(plain, peft)

        return self._counted(self._whole(of_adapter if base_sync_done else of_model)), peft.to_dict()

    def _whole(self, named: Callable[[str], str | None]) -> Iterator[tuple[str, torch.Tensor]]:
        engine = self.engine
        for unit in engine.plan.units:
            rows = [engine.plan.rows[index] for index in unit.rows]
            rows = [row for row in rows if named(row.name) is not None]
            for row, value in zip(rows, whole_values(engine, rows), strict=True):
                assert value is not None
                for to in map(named, row.names):
                    if to is not None:
                        yield to, value
        for path, module in engine.module.named_modules():
            for own, buffer in module.named_buffers(path, recurse=False):
                name = named(own)
                kept = own.rpartition(".")[2] not in module._non_persistent_buffers_set
                if kept and name is not None:
                    yield name, buffer.detach().clone()

    def _counted(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """By the sampler's names, each with its digest in `sent`."""
        self.sent = {}
        kind = self.model_config.hf_config.model_type
        for own, value in unfuse_moe_params(weights, kind):
            (name,) = convert_weight_keys({own: value}, self.engine.module)
            self.sent[name] = tensor_digest(name, value)
            yield name, value

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
        """The engine's state, which loads at any stage and on any number of ranks, and under `huggingface`
        what `transformers` needs beside weights; with `hf_model` among `save_contents`, these too."""
        if hdfs_path is not None:
            raise UnsupportedError(
                "hdfs_path", "must be None", got=repr(hdfs_path), do="Copy the folder afterwards."
            )
        path = Path(local_path)
        schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        Checkpoints(self.engine, path, quiet=True, shared=True).save(TAG, {"lr_scheduler": schedule})
        if "hf_model" in self.checkpoint_config.save_contents:
            export(self.engine, path / "huggingface", overwrite=True)
        if self.rank == 0:
            self.model_config.hf_config.save_pretrained(path / "huggingface")
            if self.model_config.get_processor() is not None:
                self.model_config.get_processor().save_pretrained(path / "huggingface")
            self._saved = [*(old for old in self._saved if old != path), path]
            for old in self._saved[:-max_ckpt_to_keep] if max_ckpt_to_keep else ():
                shutil.rmtree(old, ignore_errors=True)
            self._saved = self._saved[-max_ckpt_to_keep:] if max_ckpt_to_keep else self._saved
        torch.distributed.barrier()

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False, **_: Any
    ) -> None:
        if hdfs_path is not None:
            raise UnsupportedError(
                "hdfs_path", "must be None", got=repr(hdfs_path), do="Copy the folder here before."
            )
        whole = self.engine.updater is not None and "optimizer" in self.checkpoint_config.load_contents
        loaded = Checkpoints(self.engine, local_path, quiet=True, shared=True).load(
            TAG, parts="all" if whole else "weights"
        )
        if whole and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(loaded.client["lr_scheduler"])
        torch.distributed.barrier()
        if del_local_after_load and self.rank == 0:
            shutil.rmtree(local_path, ignore_errors=True)


@EngineRegistry.register(model_type="value_model", backend=NAME, device=["cuda", "cpu"])
class ZeroDriftValueEngine(ZeroDriftEngine):
    """The same for a critic, whose outputs are values."""

    prepare_model_outputs = FSDPEngineWithValueHead.prepare_model_outputs


def require_supported(engine: ZeroDriftEngineConfig, model: Any = None) -> None:
    """Raise where verl's blocks ask for what this engine does not do."""
    problems = Problems()
    offload = "Write `zero_optimization: {offload_optimizer: {device: cpu}}` in the config."
    asked = [
        ("engine.ulysses_sequence_parallel_size", engine.ulysses_sequence_parallel_size, 1, ""),
        ("engine.param_offload", engine.param_offload, False, offload),
        ("engine.optimizer_offload", engine.optimizer_offload, False, offload),
        ("engine.router_replay.mode", engine.router_replay.mode, "disabled", ""),
    ]
    if model is not None:
        asked += [
            ("model.enable_activation_offload", model.enable_activation_offload, False, ""),
            ("model.mtp.enable", model.mtp.enable, False, ""),
            ("model.lora.merge", bool(model.lora.get("merge")), False, "The sampler takes the adapter."),
        ]
    for where, here, must, do in asked:
        if here != must:
            problems.add(where, f"must be {must!r} with this engine", got=repr(here), do=do)
    if engine.dtype not in _MODES:
        problems.add("engine.dtype", f"must be one of {', '.join(_MODES)}", got=repr(engine.dtype))
    problems.raise_as(ConfigError)


def _entropy(config: ZeroDriftEngineConfig) -> Callable[..., torch.Tensor]:
    chunked = config.entropy_from_logits_with_chunking
    made: Any = (
        torch_functional.entropy_from_logits_with_chunking
        if chunked
        else torch_functional.entropy_from_logits
    )
    return torch.compile(made, dynamic=True) if config.use_torch_compile else made


class _Callable:
    """An engine as the module that verl's code calls and looks at."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.module, name)


def digests_of(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Of what a sampler was given, or holds, by name."""
    return {name: tensor_digest(name, value) for name, value in weights}


def require_same(sent: Mapping[str, str], held: Mapping[str, str]) -> None:
    """Raise where a sampler holds other tensors than it was sent."""
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        raise RankError(
            "sampler",
            "must hold the weights that it was sent",
            got=f"other bits in {len(wrong)} of {len(sent)} tensors, `{wrong[0]}` first",
            do="Look for what casts them on their way, or loads them under other names.",
        )
