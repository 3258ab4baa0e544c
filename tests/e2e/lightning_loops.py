"""Lightning's Trainer and Fabric with their DeepSpeed strategies, by the name of DeepSpeed; started by
`zerodrift run -- torchrun`.

    zerodrift run -- torchrun --nproc-per-node=2 tests/e2e/lightning_loops.py FOLDER [STAGE/PRECISION]...

Trains, saves, and resumes in new ones; the results are in FOLDER/told.json. Lightning's strategies ask for
CUDA: here the CPU passes for it.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.accelerators import CPUAccelerator as FabricCPU
from lightning.fabric.strategies import DeepSpeedStrategy as FabricStrategy
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy

for name, kind in (("fabric", FabricCPU), ("pytorch", CPUAccelerator)):
    module: Any = importlib.import_module(f"lightning.{name}.strategies.deepspeed")
    module.CUDAAccelerator = kind
    module._validate_device_index_selection = lambda devices: None

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
STEPS = 4


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def loader() -> torch.utils.data.DataLoader:
    rows = [torch.randn(8, generator=torch.Generator().manual_seed(index)) for index in range(32)]
    return torch.utils.data.DataLoader([(x, x.sum().view(1)) for x in rows], batch_size=4)  # type: ignore[arg-type]


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = network()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x.to(self.net[0].weight.dtype)).float(), y.float())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer(stage: int, precision: Any, steps: int, folder: str) -> Any:
    strategy = DeepSpeedStrategy(stage=stage, process_group_backend="gloo")
    return lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, precision=precision, max_steps=steps,
        gradient_clip_val=0.5, default_root_dir=folder, use_distributed_sampler=True,
        enable_progress_bar=False, enable_checkpointing=False, logger=False,
    )  # fmt: skip


def of_trainer(stage: int, precision: str, folder: str) -> dict[str, list[float]]:
    first, model = trainer(stage, precision, 2, folder), Model()
    first.fit(model, loader())
    first.save_checkpoint(f"{folder}/half.ckpt")
    straight, resumed = Model(), Model()
    trainer(stage, precision, STEPS, folder).fit(straight, loader())
    trainer(stage, precision, STEPS, folder).fit(resumed, loader(), ckpt_path=f"{folder}/half.ckpt")
    return {"first": model.losses, "straight": straight.losses, "resumed": resumed.losses}


def of_fabric(stage: int, precision: str, folder: str) -> dict[str, Any]:
    strategy = FabricStrategy(stage=stage, process_group_backend="gloo")
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)  # type: ignore[arg-type]
    fabric.launch()

    def begin() -> tuple[Any, Any]:
        with fabric.init_module():
            net = network()
        return fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))

    def step(net: Any, optimizer: Any, batch: Any) -> float:
        x, y = batch
        loss = torch.nn.functional.mse_loss(net(x).float(), y)
        fabric.backward(loss, model=net)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    net, optimizer = begin()
    batches = list(fabric.setup_dataloaders(loader()))
    losses = [step(net, optimizer, batch) for batch in batches[:2]]
    fabric.save(f"{folder}/fabric", {"model": net, "optimizer": optimizer, "step": 2})
    losses += [step(net, optimizer, batch) for batch in batches[2:STEPS]]
    other, its = begin()
    state: dict[str, Any] = {"model": other, "optimizer": its, "step": 0}
    fabric.load(f"{folder}/fabric", state)
    resumed = [step(other, its, batch) for batch in batches[2:STEPS]]
    return {"losses": losses, "resumed": resumed}


def main() -> None:
    torch.set_num_threads(1)
    told = {}
    for case in sys.argv[2:]:
        stage, _, precision = case.partition("/")
        folder = Path(sys.argv[1]) / case.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        told[case] = {
            "trainer": of_trainer(int(stage), precision, str(folder)),
            "fabric": of_fabric(int(stage), precision, str(folder)),
        }
    if os.environ["RANK"] == "0":
        (Path(sys.argv[1]) / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
