"""FSDP1 with `no_sync`: gradients are added in bf16 however they are reduced.

Asked for: fp32 weights, bf16 compute, `reduce_dtype=float32`, four micro-batches between reductions. What
happens: the unsharded gradient is that of a bf16 flat parameter, and `.grad` of that one is where micro-
batches are added; the cast to fp32 comes with the reduction, after the rounding. With `--reduce bf16`
the sum over ranks is rounded too.
"""

import argparse

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tiny import Expert, Tiny, fit, start

parser = argparse.ArgumentParser()
parser.add_argument("--reduce", default="fp32")
parser.add_argument("--flat", action="store_true", help="use_orig_params=False")
args = parser.parse_args()
start()
reduce_dtype = torch.float32 if args.reduce == "fp32" else torch.bfloat16
model = FullyShardedDataParallel(
    Tiny(),
    auto_wrap_policy=ModuleWrapPolicy({Expert}),
    mixed_precision=MixedPrecision(torch.bfloat16, reduce_dtype),
    use_orig_params=not args.flat,
    device_id=torch.device("cpu"),
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
fit(model, optimizer, micro_batches=4, unsynchronized=model.no_sync)
