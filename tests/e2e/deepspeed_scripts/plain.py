"""A plain loop: config file, loader made by `initialize`, optimizer and schedule of the config."""

import argparse
import json

import deepspeed
import torch
from torch import nn


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", default="")
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    args = parse()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.LayerNorm(48), nn.Linear(48, 4))
    inputs = torch.randn(48, 16)
    targets = (inputs @ torch.randn(16, 4)).argmax(-1)
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        training_data=torch.utils.data.TensorDataset(inputs, targets),
    )
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    criterion = nn.CrossEntropyLoss()
    losses, norms, rates = [], [], []
    for _ in range(args.epochs):
        for x, y in loader:
            logits = engine(x.to(engine.device, dtype))
            loss = criterion(logits.float(), y.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(float(engine.get_global_grad_norm()))
            rates.append(engine.get_lr()[0])
    if deepspeed.comm.get_rank() == 0 and args.out:
        told = {
            "losses": losses,
            "norms": norms,
            "rates": rates,
            "last_lr": scheduler.get_last_lr(),
            "group_lr": optimizer.param_groups[0]["lr"],
            "steps": engine.global_steps,
            "samples": engine.global_samples,
            "batches": len(loader),
            "local_rank": args.local_rank,
        }
        with open(args.out, "w") as file:
            json.dump(told, file)
    engine.destroy()


if __name__ == "__main__":
    main()
