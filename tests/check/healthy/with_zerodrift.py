"""zerodrift's own engine, stage 3 in bf16, the router pinned to fp32."""

import torch

import zerodrift as zd
from tiny import Tiny, batch, loss_of

torch.manual_seed(0)
config = {
    "precision": {"mode": "bf16", "rules": [{"match": "router.weight", "pin": "fp32", "output": "keep"}]},
    "zero_optimization": {"stage": 3},
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
engine = zd.initialize(Tiny(), config=config, quiet=True)
for step in range(4):
    for micro in range(2):
        tokens, targets = batch(engine.mesh.rank(), 10 * step + micro)
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
engine.destroy()
