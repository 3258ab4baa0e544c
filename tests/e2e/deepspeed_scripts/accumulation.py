"""Gradient accumulation whose boundaries the script sets itself; `step` is called once per batch."""

import deepspeed
import torch
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2},
}


def main() -> dict:
    deepspeed.init_distributed()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(32, 24), nn.Flatten(), nn.Linear(4 * 24, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    data = torch.Generator().manual_seed(10 + engine.global_rank)
    losses, norms, boundaries = [], [], []
    for _ in range(6):
        for micro in range(engine.gradient_accumulation_steps()):
            last = micro == engine.gradient_accumulation_steps() - 1
            engine.set_gradient_accumulation_boundary(last)
            tokens = torch.randint(32, (engine.train_micro_batch_size_per_gpu(), 5), generator=data)
            tokens = tokens.to(engine.device)
            loss = nn.functional.cross_entropy(engine(tokens[:, :4]), tokens[:, 4])
            engine.backward(loss)
            boundaries.append(engine.is_gradient_accumulation_boundary())
            losses.append(loss.item())
        engine.step()
        assert engine.was_step_applied()
        norms.append(float(engine.get_global_grad_norm()))
    told = {
        "losses": losses,
        "norms": norms,
        "boundaries": boundaries,
        "steps": engine.global_steps,
        "train_batch_size": engine.train_batch_size(),
    }
    engine.destroy()
    return told


if __name__ == "__main__":
    told = main()
