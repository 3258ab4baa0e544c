"""Small checkpoints in DeepSpeed's layout, made by hand for tests without DeepSpeed.

`tests/ranks/saved_by_deepspeed.py` has the real ones, which the same readers read.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

NAMES = {"0.weight": (5, 3), "0.bias": (5,), "2.weight": (3, 5)}
"""Parameters of `torch.nn.Sequential(Linear(3, 5), GELU(), Linear(5, 3, bias=False))`."""
VERSION = "0.19.6"


def values(seed: int) -> dict[str, torch.Tensor]:
    """Return masters by name."""
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made) for name, shape in NAMES.items()}


def lay_out(
    folder: Path,
    stage: int,
    *,
    step: int = 3,
    seed: int = 0,
    ranks: int = 2,
    scheduler: tuple[dict[str, Any], Any] = ({}, None),
    lr: float = 1e-3,
    archive: bool = True,
) -> Path:
    """Write a folder with `latest` and one tag. `scheduler` is the config's block and the state, `lr` the
    rate that it had set. Without `archive` files are in the format that torch wrote before zips. Moments are
    longer than masters, and stage 3 has two sub-groups."""
    tag = folder / f"global_step{step}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    block, state = scheduler
    squares = {name: value.square() for name, value in values(seed + 2).items()}
    moments = {"master": values(seed), "exp_avg": values(seed + 1), "exp_avg_sq": squares}
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "scheduler": block}
    low = {name: value.bfloat16() for name, value in moments["master"].items()}
    model: dict[str, Any] = {"module": low if stage < 3 else {}, "lr_scheduler": state, "optimizer": None}
    model["param_shapes"] = [OrderedDict((name, torch.Size(shape)) for name, shape in NAMES.items())]
    model |= {"frozen_param_shapes": {}, "frozen_param_fragments": {}, "shared_params": {}}
    model |= {"buffer_names": [], "epoch": 7, "ds_config": config, "ds_version": VERSION}
    model |= {"global_steps": step, "skipped_steps": 0, "global_samples": 4 * step, "dp_world_size": ranks}
    options = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
    for rank in range(ranks):
        flat = {key: _share(of, rank, ranks, stage) for key, of in moments.items()}
        cut = [-(-15 // ranks)] if stage == 3 else []
        parts = {key: value.tensor_split(cut) for key, value in flat.items()}
        masters = list(parts.pop("master"))
        base: dict[str, Any] = {"state": {}, "param_groups": [options]}
        for number in range(len(masters)):
            longer = {key: torch.cat([part[number], torch.ones(2)]) for key, part in parts.items()}
            base["state"][number] = {"step": torch.tensor(float(step)), **longer}
        own: dict[str, Any] = {"zero_stage": stage, "loss_scaler": None, "overflow": False}
        if stage == 3:
            own |= {"partition_count": ranks, "optimizer_state_dict": base, "fp32_flat_groups": masters}
        else:
            own |= {"partition_count": [ranks], "base_optimizer_state": base}
            own |= {"single_partition_of_fp32_groups": masters}
        optimizer = {"optimizer_state_dict": own, "ds_config": config, "ds_version": VERSION}
        files: dict[str, Any] = {f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": optimizer}
        if stage == 3:
            files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = model
        elif rank == 0:
            files["mp_rank_00_model_states.pt"] = model
        for name, content in files.items():
            torch.save(content, tag / name, _use_new_zipfile_serialization=archive)
    return folder


def _share(of: dict[str, torch.Tensor], rank: int, ranks: int, stage: int) -> torch.Tensor:
    """Return a rank's share: at stage 3 its part of each parameter, below its part of all in a row."""
    if stage == 3:
        return torch.cat([_part(value.reshape(-1), rank, ranks) for value in of.values()])
    return _part(torch.cat([value.reshape(-1) for value in of.values()]), rank, ranks)


def _part(flat: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    share = -(-flat.numel() // ranks)
    padded = torch.cat([flat, flat.new_zeros(share * ranks - flat.numel())])
    return padded[rank * share : (rank + 1) * share].clone()
