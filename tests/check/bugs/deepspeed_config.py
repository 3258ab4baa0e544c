"""A plain DeepSpeed loop; what goes wrong is in the config that it is given.

`gradient_accumulation_dtype.json` (#1835): fp32 accumulation at top level, where unknown keys are dropped
    without a word: stage 3 accumulates in bf16.
`communication_data_type_autocast.json` (#6993): stages 1 to 3 reduce linears in the dtype of
    `torch_autocast`, whatever the key says.
`stage_1_average.json` (#4083): what is averaged over ranks is a temporary copy; each rank's shard gets the
    gradient of its owner alone.
`fp16_autocast_clip.json` (#6993): gradients are clipped while they are multiplied by the loss scale of 65536.
"""

import argparse

import deepspeed
import torch

from tiny import Dense, batch, loss_of

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
torch.manual_seed(0)
model = Dense()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
steps = engine.gradient_accumulation_steps()
for step in range(4):
    for micro in range(steps):
        tokens, targets = batch(engine.global_rank, 10 * step + micro)
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
