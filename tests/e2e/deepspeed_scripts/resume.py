"""Checkpoint and resume: with a client state, in the middle of a schedule, and the weights in fp32."""

import argparse
import os

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.05, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 12, "warmup_max_lr": 2e-3, "warmup_num_steps": 4},
    },
    "zero_optimization": {"stage": 2},
}


def build() -> tuple:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 2))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)


def train(engine, first: int, last: int) -> list:
    losses = []
    for step in range(first, last):
        data = torch.Generator().manual_seed(100 * step + engine.global_rank)
        x = torch.randn(4, 8, generator=data).to(engine.device)
        loss = nn.functional.cross_entropy(engine(x), (x.sum(-1) > 0).long())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main() -> dict:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="checkpoints")
    args = parser.parse_args()
    deepspeed.init_distributed()
    engine, _, _, _ = build()
    nothing = engine.load_checkpoint(args.folder)
    before = train(engine, 0, 5)
    engine.save_checkpoint(args.folder, client_state={"epoch": 3, "seen": [1, 2, 3]})
    engine.save_checkpoint(args.folder, tag="chosen", save_latest=False)
    engine.save_16bit_model(args.folder, "weights.bin")
    after = train(engine, 5, 9)
    engine.destroy()

    engine, _, _, scheduler = build()
    path, client = engine.load_checkpoint(args.folder)
    resumed = train(engine, 5, 9)
    weights = torch.load(os.path.join(args.folder, "weights.bin"), weights_only=True)
    masters = get_fp32_state_dict_from_zero_checkpoint(args.folder)
    with open(os.path.join(args.folder, "latest")) as file:
        latest = file.read().strip()
    told = {
        "nothing": nothing,
        "before": before,
        "after": after,
        "resumed": resumed,
        "client": {key: client[key] for key in ("epoch", "seen")},
        "steps": engine.global_steps,
        "rate": scheduler.get_last_lr(),
        "latest": latest,
        "folders": sorted(n for n in os.listdir(args.folder) if os.path.isdir(f"{args.folder}/{n}")),
        "path_is_in": os.path.abspath(args.folder) in os.path.abspath(path),
        "weights": {name: value.double().sum().item() for name, value in weights.items()},
        "masters": {name: value.double().sum().item() for name, value in masters.items()},
        "dtypes": sorted({str(value.dtype) for value in weights.values()}),
    }
    engine.destroy()
    return told


if __name__ == "__main__":
    told = main()
