"""DeepSpeed #7718: gradient norms of ZeRO-2 are a third of what they are with ZeRO-3.

In a loop that accumulates by itself, with `gradient_accumulation_steps: 1`, every `backward` counts as the
last, and stages 1 and 2 keep that one only. No error.
"""

import deepspeed
import torch

from tiny import Tiny, batch, loss_of

MICRO_BATCHES = 4

deepspeed.init_distributed()
torch.manual_seed(0)
model = Tiny()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 100000,
        "stage3_param_persistence_threshold": 0,
    },
    "gradient_clipping": 0.0,
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for step in range(4):
    for micro in range(MICRO_BATCHES):
        tokens, targets = batch(engine.global_rank, 10 * step + micro)
        engine.backward(loss_of(engine(tokens), targets) / MICRO_BATCHES)
    engine.step()
