"""Gradients that are summed over ranks and never divided (NeMo-Automodel #3830: scaled by the world size).

Asked for: data parallelism by hand. What happens: gradients are as many times too large as there are ranks;
a norm that is clipped at 1 hides it, a learning rate that was tuned on one GPU does not.
"""

import torch.distributed as dist

from tiny import Dense, fit, start

start()
model = Dense()
fit(model, before=lambda: [dist.all_reduce(parameter.grad) for parameter in model.parameters()])
