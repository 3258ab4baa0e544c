"""fp16 with a dynamic loss scale that begins too high: the first steps are skipped."""

import deepspeed
import torch
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 4, "hysteresis": 1},
}


def main() -> dict:
    deepspeed.init_distributed()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    assert engine.fp16_enabled() and optimizer.dynamic_loss_scale
    data = torch.Generator().manual_seed(20 + engine.global_rank)
    direction = torch.randn(16, 1, generator=torch.Generator().manual_seed(3))
    losses, scales, skipped, overflows = [], [], [], []
    for _ in range(24):
        x = torch.randn(8, 16, generator=data)
        y = (x @ direction).to(engine.device)
        loss = nn.functional.mse_loss(engine(x.half().to(engine.device)).float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        scales.append(optimizer.cur_scale)
        overflows.append(bool(optimizer.overflow))
        skipped.append(engine.skipped_steps)
    told = {
        "losses": losses,
        "scales": scales,
        "skipped": skipped,
        "overflows": overflows,
        "steps": engine.global_steps,
    }
    engine.destroy()
    return told


if __name__ == "__main__":
    told = main()
