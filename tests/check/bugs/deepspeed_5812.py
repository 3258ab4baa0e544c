"""DeepSpeed #5812: buffers that are made in fp32 and are bf16 under `zero.Init`.

Rotary frequencies are computed from `arange` in the constructor. `zero.Init` replaces torch's factories while
it is on, so that what they return is bf16, parameters and buffers alike; positions beyond 256 fall together.

Asked for: bf16 weights, fp32 frequencies. What happens (0.19.6): `frequencies` is bf16, and
`data_types.buffer_dtype: fp32` gives it back its dtype, not its digits.
"""

import deepspeed
import torch

from tiny import WIDTH, Dense, batch, loss_of


class Rotating(Dense):
    """A model with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, 1, 2 / WIDTH)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), self.frequencies.float())
        sine, cosine = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
        even, odd = x.chunk(2, -1)
        x = torch.cat([even * cosine - odd * sine, even * sine + odd * cosine], -1)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


deepspeed.init_distributed()
torch.manual_seed(0)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 100000,
        "stage3_param_persistence_threshold": 0,
    },
    "communication_data_type": "fp32",
}
with deepspeed.zero.Init(config_dict_or_path=config):
    model = Rotating()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for step in range(4):
    tokens, targets = batch(engine.global_rank, step)
    engine.backward(loss_of(engine(tokens), targets))
    engine.step()
