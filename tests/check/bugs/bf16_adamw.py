"""Pure bf16 with AdamW, by DDP: no master anywhere (axolotl #3154: "trained pure bf16 for months").

Asked for: a bf16 model that trains. What happens: AdamW adds lr-sized updates to bf16 weights, which lose all
that is below half a unit in the last place; its second moment is bf16 and can never shrink, since v * 0.999
rounds back to v.
"""

from torch.nn.parallel import DistributedDataParallel

from tiny import Tiny, fit, start

start()
fit(DistributedDataParallel(Tiny().bfloat16()))
