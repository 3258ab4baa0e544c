"""ZeRO-3: a model that is built in pieces, weights that one rank sets, and full values of sharded ones."""

import deepspeed
import torch
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.inward = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.outward = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


def main() -> dict:
    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    torch.manual_seed(4 + rank)  # rank 0's values are everybody's
    with deepspeed.zero.Init(config_dict_or_path=CONFIG, dtype=torch.float32):
        model = Model()
    assert all(hasattr(p, "ds_id") for p in model.parameters())
    with deepspeed.zero.GatheredParameters(model.blocks[1].up.weight, modifier_rank=0):
        if rank == 0:
            nn.init.eye_(model.blocks[1].up.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    data = torch.Generator().manual_seed(30 + rank)
    losses, norms, gradients = [], [], []
    weight = model.blocks[1].up.weight
    for step in range(8):
        x = torch.randn(4, 8, generator=data).to(engine.device)
        loss = nn.functional.mse_loss(engine(x), x.square().mean(-1, keepdim=True))
        engine.backward(loss)
        gradients.append(deepspeed.utils.safe_get_full_grad(weight).norm().item())
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
        if step == 3:  # into a running engine, and into the master, as DeepSpeed wants it
            with deepspeed.zero.GatheredParameters([model.blocks[0].down.bias], modifier_rank=1):
                if rank == 1:
                    model.blocks[0].down.bias.data.fill_(0.125)
            deepspeed.utils.safe_set_full_fp32_param(model.blocks[0].down.bias, torch.full((24,), 0.125))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        visible = {name: p.detach().sum().item() for name, p in model.named_parameters()}
    master = deepspeed.utils.safe_get_full_fp32_param(weight)
    moment = deepspeed.utils.safe_get_full_optimizer_state(weight, "momentum_buffer")
    told = {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "visible": visible,
        "master": master.flatten()[:40].tolist(),
        "moment": moment.flatten()[:40].tolist(),
        "shape": list(weight.ds_shape),
    }
    engine.destroy()
    return told


if __name__ == "__main__":
    told = main()
