"""DeepSpeed #7718: gradient norms of ZeRO-2 are a third of what they are with ZeRO-3.

Gradients of some micro-batches never reached the optimizer from 0.17.6 to 0.18.2. That was mended, and
the same loss is still there in 0.19.6 for a loop that accumulates by itself (accelerate #3877, open-
instruct #1498): with `gradient_accumulation_steps: 1` every `backward` counts as the last, and stages 1
and 2 keep that one only.

Asked for: the sum over four micro-batches. What happens: what the optimizer gets is the last micro-
batch's gradient, the norm is about half. No error.
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
