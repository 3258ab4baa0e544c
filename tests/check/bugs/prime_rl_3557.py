"""prime-rl #3557: A_log and D of a Mamba layer made bf16, because FSDP2 refuses a unit of mixed dtypes.

The layer still says `A_log.float()` where it computes, so everything looks like fp32. The values are not:
they were rounded when they were made, and each update is rounded again. Rebuilt in plain torch (the pull
request is open; the layer here is a diagonal recurrence of three lines).

Asked for: a state-space computation in fp32. What happens: fp32 arithmetic on bf16 constants; the upcast
adds no digit. `fully_shard` raises without the cast.
"""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tiny import VOCABULARY, WIDTH, fit, start


class Mixer(nn.Module):
    """h[t] = exp(-exp(A_log)) h[t-1] + x[t]; y = h + D x."""

    def __init__(self) -> None:
        super().__init__()
        dtype = torch.get_default_dtype()  # the pull request; it was torch.float32
        self.A_log = nn.Parameter(torch.log(torch.arange(1, WIDTH + 1, dtype=torch.float32)).to(dtype))
        self.D = nn.Parameter(torch.full((WIDTH,), 1.01, dtype=dtype))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        decay = torch.exp(-torch.exp(self.A_log.float()))
        state, outputs = torch.zeros_like(x[:, 0], dtype=torch.float32), []
        for position in range(x.shape[1]):
            state = decay * state + x[:, position].float()
            outputs.append(state)
        y = torch.stack(outputs, 1) + self.D.float() * x.float()
        return self.out(y.to(x.dtype))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Mixer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


start()
torch.set_default_dtype(torch.bfloat16)
model = Model()
torch.set_default_dtype(torch.float32)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
fit(model)
