"""HF Trainer with `bf16=True` on a model that was loaded in bf16.

Asked for: mixed precision. What happens: `bf16=True` turns autocast on, it does not upcast what was
loaded: since transformers 5 a bf16 checkpoint is loaded as bf16 by default, so AdamW updates bf16 weights
with bf16 moments (verl #5308 and many others).
"""

import tempfile

import torch
import transformers

from tiny import llama_config, train_by_transformers

transformers.set_seed(0)
with tempfile.TemporaryDirectory() as folder:
    transformers.LlamaForCausalLM(llama_config()).to(torch.bfloat16).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
train_by_transformers(model, bf16=True)
