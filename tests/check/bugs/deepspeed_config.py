"""A plain DeepSpeed loop; what goes wrong is in the config that it is given.

`grad_accum_dtype_stage_2.json` (#2768): fp32 accumulation is asked for where DeepSpeed's own docs say, under
    `data_types`. Stage 2 reads the key only to type gradients that are missing: it accumulates in bf16
    (0.19.6).
`gradient_accumulation_dtype.json` (#1835): the same asked for at top level. Unknown keys are dropped there
    without a word: stage 3 accumulates in bf16.
`communication_data_type_autocast.json` (#6993): gradients are to be reduced in fp32 under `torch_autocast`.
    Stages 1 to 3 take the dtype of autocast for the modules it lowers, whatever the key says: linears
    reduce in bf16.
`stage_1_average.json` (#4083): fp32 accumulation of a bf16 model at stage 1, optimizer on the host. What is
    averaged over ranks is a temporary copy; each rank's shard gets the gradient of its owner alone.
`stage_1_average_autocast.json`: the same way by bf16 accumulation of an fp32 model.
`fp16_autocast_clip.json` (#6993): fp16 autocast at stage 2 with clipping. Gradients are clipped while they
    are still multiplied by the loss scale of 65536, so every update is 65536 times too small, and the norm is
    told wrong.
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
