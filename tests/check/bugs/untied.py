"""Tied weights that are no longer tied after `to_empty`.

A model is built on the meta device, sharded, and given memory; `to_empty` makes a new parameter for each
name, so embedding and head, one tensor before, are two. Each is loaded from the same values and then
trained by its own gradient.

Asked for: `tie_word_embeddings=True`. What happens: lm_head.weight and model.embed_tokens.weight drift
apart, and an export that saves only one of them loses the other.
"""

import torch
import transformers
from torch.nn.parallel import DistributedDataParallel

from tiny import batch, llama_config, rank, start

start()
config = llama_config(tie_word_embeddings=True)
values = transformers.LlamaForCausalLM(config).state_dict()
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(config)
rotary = model.model.rotary_emb
model.to_empty(device="cpu")
model.load_state_dict(values)
rotary.__init__(config)
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
for step in range(4):
    tokens, _ = batch(rank(), step)
    wrapped(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
