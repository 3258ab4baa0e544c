"""Run Lightning's Trainer on two CPU ranks, and print the results as one line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from zerodrift.lightning import ZeroDriftStrategy


class Net(pl.LightningModule):
    """A model whose training step calls itself, and whose epochs end with a shorter step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)
        )
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self(x).float() - x.roll(1, -1)).square().mean()

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.loss(x)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, x: torch.Tensor, index: int) -> None:
        self.log("val", self.loss(x), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data(count: int) -> Any:
    values = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(values, batch_size=4)


def main(folder: str, kind: str, stage: str, mode: str, epochs: str, *resume: str) -> None:
    torch.set_num_threads(1)
    pl.seed_everything(0)
    config = {"precision": {"mode": mode}, "zero_optimization": {"stage": int(stage)}}
    model = Net()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, max_epochs=int(epochs),
        accumulate_grad_batches=2, gradient_clip_val=0.5,
        strategy="ddp" if kind == "ddp" else ZeroDriftStrategy(config, quiet=True),
        default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, save_last=True)],
    )  # fmt: skip
    trainer.fit(model, data(40), data(16), ckpt_path=resume[0] if resume else None)
    found = {
        "steps": trainer.global_step,
        "losses": model.losses,
        "val": float(trainer.callback_metrics["val"]),
        "weights": [parameter.double().sum().item() for parameter in model.parameters()],
    }
    trainer.validate(model, data(16), verbose=False)
    found["again"] = float(trainer.callback_metrics["val"])
    if trainer.global_rank == 0:
        print("found", json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
