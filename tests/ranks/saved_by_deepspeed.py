"""Save checkpoints by DeepSpeed itself, and read their contents by its own tools. Run on ranks.

A small GPT with tied embeddings, a frozen parameter, odd sizes (so that every stage pads) and two parameter
groups is trained for a few steps. Importing this file imports nothing of DeepSpeed.
"""

from __future__ import annotations

import importlib
import os
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.numerics.networks import GPT, batch

WIDTH, STEPS = 33, 3
MOMENTS = ("exp_avg", "exp_avg_sq")
LR, BETAS, EPS, DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1


@dataclass(frozen=True)
class Case:
    """A configuration of training with DeepSpeed."""

    stage: int
    dtype: str
    """`fp32`, `bf16` or `fp16`."""
    rest: dict[str, Any] = field(default_factory=dict)
    """Other keys of `zero_optimization`."""
    hard: bool = True
    """Whether there are several groups, a frozen parameter, and a clip."""

    @property
    def name(self) -> str:
        return "-".join([str(self.stage), self.dtype, *self.rest, *([] if self.hard else ["plain"])])


@dataclass
class Truth:
    """The full values of DeepSpeed's engine, on rank 0; the losses are this rank's."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """fp32 masters and frozen parameters, by every name."""
    moments: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    """Losses of the steps after the save."""


def model(case: Case) -> torch.nn.Module:
    made = GPT(width=WIDTH)
    if case.hard:
        made.layers[0].norm1.weight.requires_grad_(False)
        made.layers[1].mlp.up.weight.requires_grad_(False)
    return made


def groups(made: torch.nn.Module, case: Case) -> list[dict[str, Any]]:
    trained = [p for p in made.parameters() if p.requires_grad]
    if not case.hard:
        return [{"params": trained, "weight_decay": DECAY}]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 2 * LR},
    ]


def start(case: Case) -> Any:
    """Start a DeepSpeed engine on the harness's ranks."""
    os.environ.update(
        DS_ACCELERATOR="cpu",
        RANK=str(dist.get_rank()),
        LOCAL_RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed

        # Compiled on first use, under a lock that a killed process leaves behind; gloo does without.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        if case.dtype == "fp16":
            # It refuses fp16 on a CPU, where it is slow; the files are the same as on a GPU.
            from deepspeed.accelerator import get_accelerator

            get_accelerator().is_fp16_supported = lambda: True
        made = model(case)
        optimizer = torch.optim.AdamW(groups(made, case), lr=LR, betas=BETAS, eps=EPS)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0 if case.hard else 0.0,
            "zero_optimization": {
                "stage": case.stage,
                **({"stage3_param_persistence_threshold": 0} if case.stage == 3 else {}),
                **case.rest,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        if case.dtype != "fp32":
            config[case.dtype] = {"enabled": True}
        if case.dtype == "fp16":
            config["fp16"] |= {"initial_scale_power": 8}
        engine, *_ = deepspeed.initialize(model=made, optimizer=optimizer, config=config)
    return engine


def step(engine: Any, number: int) -> float:
    loss = engine(batch(number, dist.get_rank()))
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def save(case: Case, folder: str, after: int = 0) -> Truth:
    """Train, save, and return the contents; then train `after` steps more."""
    engine = start(case)
    for number in range(STEPS):
        step(engine, number)
    engine.save_checkpoint(folder, client_state={"epoch": 7, "note": "hello"})
    truth = Truth(buffers={name: buffer.clone() for name, buffer in engine.module.named_buffers()})
    if case.stage == 0:
        _look_at_0(engine, case, truth)
    else:
        _look(engine, case, truth)
        if dist.get_rank() == 0:
            _use_its_tool(folder, truth)
            if case.stage == 1:  # where its tool leaves frozen parameters out
                frozen = {n: p for n, p in engine.module.named_parameters() if not p.requires_grad}
                truth.weights |= {name: p.detach().clone() for name, p in frozen.items()}
    truth.losses = [step(engine, STEPS + number) for number in range(after)]
    engine.destroy()
    return truth


def _look(engine: Any, case: Case, truth: Truth) -> None:
    from deepspeed.utils import safe_get_full_optimizer_state

    if case.rest.get("round_robin_gradients"):
        # Its map of fragments is of the order before the shuffle; look at the flat buffers instead.
        _look_at_flat(engine, truth)
        return
    if case.stage < 3:
        # DeepSpeed 0.19.6 links the moments when the first group has stepped and the others have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
            truth.moments[name] = {key: value.detach().clone() for key, value in found.items()}


def _look_at_flat(engine: Any, truth: Truth) -> None:
    """Gather each group's moments and undo its flattening with its own functions."""
    optimizer = engine.optimizer
    for group, parameters in enumerate(optimizer.round_robin_bit16_groups):
        state = optimizer.optimizer.state[optimizer.single_partition_of_fp32_groups[group]]
        for key in MOMENTS:
            parts = [torch.zeros_like(state[key]) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, state[key])
            pieces = optimizer.unflatten(torch.cat(parts), optimizer.round_robin_bit16_meta[group])
            for parameter, piece in zip(parameters, pieces, strict=True):
                truth.moments.setdefault(engine.param_names[parameter], {})[key] = piece.clone()


def _look_at_0(engine: Any, case: Case, truth: Truth) -> None:
    """Read stage 0: a plain optimizer, over masters of its own unless all is fp32."""
    optimizer = engine.optimizer
    inner = optimizer if case.dtype == "fp32" else optimizer.optimizer
    shown = [p for group in groups(engine.module, case) for p in group["params"]]
    masters = [p for group in inner.param_groups for p in group["params"]]
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    truth.weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    for parameter, master in zip(shown, masters, strict=True):
        name = names[id(parameter)]
        truth.weights[name] = master.detach().clone()
        state = inner.state[master]
        truth.moments[name] = {key: state[key].detach().clone() for key in MOMENTS}
    truth.weights["head.weight"] = truth.weights["embed.weight"]


def _use_its_tool(folder: str, truth: Truth) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    truth.weights = {n: value.detach().clone() for n, value in found.items() if n not in truth.buffers}
